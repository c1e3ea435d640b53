"""From a config to a running engine: the one place where the parts meet.

Cheap checks come before expensive work: components are built and their demands solved, then the checkpoint's config is
read, then weights are loaded, then pages are divided.
"""

import logging
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from hotswap.core.config import Config, ResolvedConfig
from hotswap.core.config.check import Components, check_config
from hotswap.core.engine.client import Engine
from hotswap.core.engine.clock import Clock, SystemClock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop, Parts
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentRef, RequestOptions
from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.interfaces.parallel import RankPlan, WorkerInfo
from hotswap.core.live import LiveComponents
from hotswap.core.registry import Registry

if TYPE_CHECKING:
    from hotswap.core.modeling.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass
class Built:
    """A running engine and what a front needs to talk to it."""

    engine: Engine
    resolved: ResolvedConfig
    checkpoint: "Checkpoint"
    facts: ModelFacts
    max_model_len: int
    components: LiveComponents
    registry: Registry
    cache_plan: CachePlan
    honoured: frozenset[str]
    """The sampling fields that the configured logits processors carry out."""
    notes: list[str] = field(default_factory=list)
    """What was chosen where the config leaves a choice, and why."""
    warnings: list[str] = field(default_factory=list)
    """What the operator should look at: deprecated keys, a checkpoint with something missing."""

    @property
    def request_options(self) -> dict[str, type[RequestOptions]]:
        """Per live component that reads a part of a request's ``extra``: the model of that part."""
        return {
            component.name: component.RequestOptions
            for component in self.components if component.RequestOptions is not None
        }


def build_engine(resolved: ResolvedConfig, *, progress: bool = True, clock: Clock | None = None) -> Built:
    """Load everything and start the loop. ConfigError (ModelLoadError among them) for whatever does not fit."""
    from hotswap.core.execution.worker import WorkerBuilder, WorkerSettings

    config, registry, clock = resolved.config, Registry(), clock or SystemClock()
    parts = check_config(config, registry)
    checkpoint = _open(config, progress)
    model = _build_model(config, registry, checkpoint)
    facts = model.facts(checkpoint.config)
    max_model_len = _context_length(config, facts)
    notes, warnings = [*parts.notes], [*resolved.warnings, *checkpoint.warnings, *_odd_model(config, checkpoint)]
    settings = WorkerSettings.choose(config, checkpoint, max_model_len, notes)
    plan = RankPlan()
    for strategy in reversed(parts.listed("parallel")):
        plan = strategy.layout(facts, plan)
    live = LiveComponents()
    for component in (model, *parts.built.values()):
        live.add(component)
    processors = parts.listed("logits_processors")
    info = parts.executor.launch(
        WorkerBuilder(checkpoint, model, parts.attention, parts.speculator, processors, settings), plan)
    try:
        cache_plan = _allocate(config, parts, info, max_model_len)
        engine = _start(resolved, parts, live, info, max_model_len, plan, clock)
    except BaseException:
        parts.executor.stop()
        raise
    honoured = frozenset(field for processor in processors for field in processor.honours)
    return Built(
        engine, resolved, checkpoint, facts, max_model_len, live, registry, cache_plan, honoured, notes, warnings)


def _start(
    resolved: ResolvedConfig, parts: Components, live: LiveComponents, info: WorkerInfo, max_model_len: int,
    plan: RankPlan, clock: Clock,
) -> Engine:
    config, observers = resolved.config, live.observers
    limits = Limits(
        config.scheduler.max_batch_tokens, config.scheduler.max_running, max_model_len, info.lookahead, info.reuse_tail)
    depth = min(config.execution.depth, plan.depth or config.execution.depth)
    loop = EngineLoop(
        Parts(parts.scheduler, parts.kvcache, parts.executor, observers), limits, clock, depth, plan.chained)
    observers.notify("hotswap_engine_started", versions=versions(), config=resolved.effective(), time=clock.now())
    if observers.silenced:  # what was asked for must work; later it may fail without harm
        label, problem = next(iter(observers.silenced.items()))
        raise ConfigError(f"{label} failed at the start, in {problem}; mend its options or leave it out", "observers")
    return Engine(
        loop, max_queue=config.server.max_queue, watchdog_s=config.server.watchdog_s,
        on_stop=lambda: observers.notify("hotswap_engine_stopped", time=clock.now()),
    )


def _open(config: Config, progress: bool) -> "Checkpoint":
    from hotswap.core.modeling.checkpoint import open_checkpoint

    source = config.model.source
    if config.model.path is not None:
        path = Path(source).expanduser().absolute()  # whole, so that it is taken for no hub id and no model's name
        if not path.exists():
            raise ConfigError(
                f"there is no file or directory {source!r}; a hub id or a catalogue name is model.name", "model.path")
        source = str(path)
    return open_checkpoint(source, revision=config.model.revision, progress=progress)


def _build_model(config: Config, registry: Registry, checkpoint: "Checkpoint") -> Model:
    """The component that the config names, or the one registered under the checkpoint's architecture."""
    use = config.model.use or checkpoint.architecture
    known = registry.names("model")
    if config.model.use is None and use not in known:
        raise ConfigError(
            f"the checkpoint's architecture is {use!r}, and no installed component is registered for it; there are "
            f"{', '.join(known)}. Install a model component for it, or name one with model.use", "model")
    model: Model = registry.build("model", ComponentRef(use=use, **config.model.options), "model")
    return model


def _odd_model(config: Config, checkpoint: "Checkpoint") -> list[str]:
    if config.model.use in (None, checkpoint.architecture):
        return []
    return [f"model.use is {config.model.use!r}, but the checkpoint was made for {checkpoint.architecture!r}"]


def _context_length(config: Config, facts: ModelFacts) -> int:
    wanted = config.max_model_len
    if wanted is None:
        return facts.max_position
    if wanted > facts.max_position:
        raise ConfigError(
            f"{wanted} tokens were given, but the model was made for {facts.max_position}; lower it, or choose a model "
            "with a longer context", "max_model_len")
    return wanted


def _allocate(config: Config, parts: Components, info: WorkerInfo, max_model_len: int) -> CachePlan:
    try:
        plan = _divide_memory(config, parts, info, max_model_len)
        parts.executor.allocate(plan)
    except (MemoryError, RuntimeError) as error:  # numpy's and torch's word for it
        raise ConfigError(
            f"there is not enough memory for the cache ({error}); lower kvcache.memory or kvcache.num_blocks, or "
            "scheduler.max_running and max_model_len", "kvcache") from error
    return plan


def _divide_memory(config: Config, parts: Components, info: WorkerInfo, max_model_len: int) -> CachePlan:
    """Pages for what the config says; else for all that could ever be held at once, or what the device has left."""
    section, running = config.kvcache, config.scheduler.max_running
    num_bytes = section.memory
    if num_bytes is None:
        tokens = (running + 1) * (max_model_len + 256)  # whole pages, and the dummy page
        most = sum(spec.bytes_per_token for spec in info.cache_specs) * tokens
        num_bytes = min(info.free_bytes, most)
    plan: CachePlan = parts.kvcache.configure(info.cache_specs, num_bytes, CacheConstraints(
        max_model_len, running, section.block_size, info.page_sizes, section.num_blocks))
    return plan


def versions() -> dict[str, str]:
    """Of hotswap and of what its numbers depend on."""
    found = {}
    for name in ("hotswap", "torch", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
