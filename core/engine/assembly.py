"""The engines that a config asks for, each made of parts of its own; what they share is opened once.

Without a deployment that is one engine. A deployment leads the config's ``parallel`` list, says which engines it needs,
and gets a factory for each; a factory may start another deployment, since the rest of the list may begin with one.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, cast

from hotswap.core.config import Config, ResolvedConfig
from hotswap.core.config.check import check_config
from hotswap.core.config.components import Components
from hotswap.core.config.limits import AttentionNeeds
from hotswap.core.engine.client import Engine
from hotswap.core.engine.clock import Clock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.parts import Parts
from hotswap.core.engine.preparing import Preparing
from hotswap.core.engine.setup import CacheRoom, EngineSetup, references
from hotswap.core.engine.transfers import Transfers
from hotswap.core.errors import ConfigError
from hotswap.core.explain import join
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.deployment import Deployment, EngineClient, EngineFactory
from hotswap.core.interfaces.kv_transfer import KVTransfer, TransferLayout
from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.interfaces.parallel import Meeting, RankPlan, Replica, ShardStrategy, WorkerInfo
from hotswap.core.live import LiveComponents
from hotswap.core.registry import Registry

if TYPE_CHECKING:
    from hotswap.core.execution.builder import SharedModels, WorkerBuilder
    from hotswap.core.modeling.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Made:
    """What an engine is made of. ``config``: the resolved one, with only the strategies that are its own."""

    resolved: ResolvedConfig
    config: Config
    parts: Components
    info: WorkerInfo
    cache_plan: CachePlan


@dataclass
class BuiltEngine:
    """One engine loop. ``made`` is another one after an exchange. ``around``: the deployments that it is part of.
    ``spans``: it computes every step together with other engines. ``free_bytes``: for pages, when it started.
    ``preparing``: what its ranks prepare for exchanges. ``exchanging``: the loop has been given an exchange and is not
    through with it, though nobody may wait for that any more."""

    replica: Replica
    engine: Engine
    components: LiveComponents
    made: Made
    around: tuple[Component, ...] = ()
    spans: bool = False
    free_bytes: int = 0
    preparing: Preparing = field(init=False)
    exchanging: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.preparing = Preparing(self.made.parts.executor, self.prefix)

    @property
    def prefix(self) -> str:
        """What messages about it begin with: its name, where it has one."""
        return f"engine {self.replica.name}: " if self.replica.name else ""

    @property
    def cache_plan(self) -> CachePlan:
        return self.made.cache_plan


@dataclass(frozen=True)
class _Plan:
    """One engine before it is started. ``config``: with only the strategies that are its own."""

    config: Config
    parts: Components
    ranks: RankPlan
    around: tuple[Component, ...]


class Assembly:
    """Starts what the config asks for. Everything that can be refused without loading is refused by the constructor."""

    def __init__(
        self, resolved: ResolvedConfig, registry: Registry, parts: Components, checkpoint: "Checkpoint",
        facts: ModelFacts, needs: AttentionNeeds, max_model_len: int, clock: Clock, models: "SharedModels",
    ) -> None:
        self._resolved, self._registry, self._checkpoint = resolved, registry, checkpoint
        self._facts, self._needs, self._max_model_len = facts, needs, max_model_len
        self._clock, self._models = clock, models
        self.fronts = LiveComponents()
        self.notes: list[str] = []
        self._plans: dict[str, _Plan] = {}
        self._built: dict[str, BuiltEngine] = {}
        self._meeting = Meeting()
        self._start: Callable[[], EngineClient] | None = self._prepare(resolved.config, "", parts)
        check_span({name: plan.ranks for name, plan in self._plans.items()})

    def start(self) -> EngineClient:
        """Load everything and start the loops, once. ConfigError; then nothing runs any more."""
        start, self._start = self._start, None  # which knows the assembly: a ring would keep the weights
        assert start is not None, "start was called twice"
        return start()

    def in_order(self) -> list[BuiltEngine]:
        """Every engine that runs, in the order in which the deployments name them."""
        return [self._built[name] for name in self._plans]

    def _prepare(
        self, config: Config, name: str, parts: Components | None = None, around: Sequence[Component] = (),
    ) -> Callable[[], EngineClient]:
        parts = parts or check_config(config, self._registry, around, self._needs)
        strategies = parts.listed("parallel")
        if not (strategies and strategies[0].kind == Deployment.kind):
            self._plans[name] = _Plan(config, parts, rank_plan(parts, self._facts), tuple(around))
            return partial(self._engine, name)
        deployment: Deployment = strategies[0]
        self.fronts.add(deployment)
        factories, inside = [], (*around, deployment)
        for role in deployment.roles():
            own = config.parallel[1:] if role.parallel is None else list(role.parallel)
            inner = config.model_copy(update={"parallel": own})
            for number in range(role.replicas):
                label = ".".join(filter(None, (name, f"{role.name}{number}")))
                factories.append(EngineFactory(label, role.name, self._prepare(inner, label, around=inside)))
        return partial(deployment.start, factories, self._clock.now)

    def _engine(self, name: str) -> Engine:
        """Load and start one engine."""
        plan = self._plans[name]
        config, parts = plan.config, plan.parts
        names = list(self._plans)
        index = names.index(name)
        before = sum(self._plans[other].ranks.world_size for other in names[:index])
        replica = Replica(name, index, len(names), before)
        ranks = replace(plan.ranks, replica=replica)
        factory = self._worker_factory(plan, replica)
        live = LiveComponents()
        for component in (factory.model, *parts.built.values()):
            live.add(component)
        info = parts.executor.launch(factory, ranks, self._meeting)
        try:
            cache_plan = self._allocate(config, parts, info, ranks.world_size)
            engine = self._loop(config, parts, live, info, ranks, cache_plan)
        except BaseException:
            parts.executor.stop()
            if (transfer := _transfer(parts)) is not None:
                transfer.close()
            raise
        made = Made(self._resolved, config, parts, info, cache_plan)
        self._plans[name] = replace(plan, parts=Components({}))  # what is exchanged is to be let go
        self._built[name] = BuiltEngine(
            replica, engine, live, made, plan.around, ranks.across is not None, info.free_bytes)
        return engine

    def _allocate(self, config: Config, parts: Components, info: WorkerInfo, ranks: int) -> CachePlan:
        transfer = _transfer(parts)
        _warn_of_too_much(config, info)
        try:
            plan = divide_memory(config, parts, info, self._max_model_len)
            if transfer is not None:
                plan = replace(plan, transfer=transfer.configure(
                    TransferLayout(
                        info.cache_specs, plan, ranks, self._clock.now, self._checkpoint.revision)))
            parts.executor.allocate(plan)
        except MemoryError as error:
            elsewhere = "" if transfer is None else ", what kv_transfer takes"
            raise ConfigError(
                f"there is not enough memory for the cache ({error}); lower kvcache.memory or kvcache.num_blocks"
                f"{elsewhere}, or scheduler.max_running and max_model_len", "kvcache") from error
        return plan

    def _worker_factory(self, plan: _Plan, replica: Replica) -> "WorkerBuilder":
        """Where engines of one rank run in this process, and several threads may run one model at once, they share it:
        its weights are loaded once."""
        from hotswap.core.execution.builder import WorkerBuilder
        from hotswap.core.execution.device import place
        from hotswap.core.execution.graphs import choose_keys
        from hotswap.core.execution.settings import WorkerSettings
        from hotswap.core.modeling.packing import check_quantization

        config, parts = plan.config, plan.parts
        notes = self.notes if replica.index == 0 else []
        settings = WorkerSettings.of(
            config, self._checkpoint, self._needs.device, self._needs.dtype, self._max_model_len)
        alone = plan.ranks.world_size == 1 and plan.ranks.across is None
        device, sharers = place(settings.device, replica, alone)
        fraction = settings.memory_fraction / (sharers * self._models.engines)
        settings = replace(settings, device=device, memory_fraction=fraction)
        if note := parts.attention.support().note:
            notes.append(f"attention: {note}")
        model = build_model(config, self._registry, self._checkpoint)
        notes += check_quantization(
            parts.quantization, self._checkpoint, model, settings.device, settings.dtype)
        keys = choose_keys(
            config, settings.device, settings.dtype, parts.attention, self._facts, parts.speculator.needs().lookahead,
            plan.ranks.world_size, notes)
        builder = WorkerBuilder(
            self._checkpoint, model, parts.attention, parts.speculator, parts.listed("logits_processors"),
            replace(
                settings, graphs=keys, needs_graphs=config.execution.graphs == "full"),
            transfer=_transfer(parts), lane=self._models.lane(replica.index), quantization=parts.quantization)
        return self._models.join(builder) if self._facts.concurrent and alone else builder

    def _loop(
        self, config: Config, parts: Components, live: LiveComponents, info: WorkerInfo, ranks: RankPlan,
        cache_plan: CachePlan,
    ) -> Engine:
        observers, clock, replica = live.observers, self._clock, ranks.replica
        limits = Limits(
            config.scheduler.max_batch_tokens, config.scheduler.max_running, self._max_model_len, info.lookahead,
            info.reuse_tail)
        wanted, most = config.execution.depth, ranks.depth
        depth = wanted or 1 if most is None else min(wanted or most, most)
        loop = EngineLoop(
            Parts(parts.scheduler, parts.kvcache, parts.executor, observers), limits, clock, depth, ranks.chained,
            Transfers(_transfer(parts), ranks.world_size))
        setup = EngineSetup(
            references([parts.scheduler, parts.kvcache, _transfer(parts)]), limits, depth, ranks.chained,
            ranks.world_size, cache_room(config, info, self._max_model_len), cache_plan.groups,
            self._checkpoint.revision)
        observers.notify(
            "hotswap_engine_started", versions=versions(), config=self._resolved.effective(), replica=replica.name,
            setup=setup, time=clock.now())
        if observers.silenced:  # what was asked for must work; later it may fail without harm
            label, problem = next(iter(observers.silenced.items()))
            raise ConfigError(
                f"{label} failed at the start, in {problem}; mend its options or leave it out", "observers")
        return Engine(
            loop, max_queue=config.server.max_queue, watchdog_s=config.server.watchdog_s, name=replica.name,
            on_stop=lambda: observers.notify("hotswap_engine_stopped", time=clock.now()),
        )


def rank_plan(parts: Components, facts: ModelFacts) -> RankPlan:
    """The shard strategies folded, the innermost first. ConfigError with the config path of the one that refuses."""
    plan = RankPlan()
    for path, component in reversed([*parts.built.items()]):
        if component.kind == ShardStrategy.kind:
            try:
                plan = cast(ShardStrategy, component).layout(facts, plan)
            except ConfigError as error:
                raise ConfigError(error.message, join(path, error.path) if error.path else path) from error
    return plan


def check_span(plans: Mapping[str, RankPlan]) -> None:
    """A strategy that spans engines spans all of a process, of one rank each: those that take part in a step would wait
    for one that does not."""
    spanning = {name: plan.across for name, plan in plans.items() if plan.across is not None}
    if left := [name for name in plans if name not in spanning]:
        for name, across in spanning.items():
            raise ConfigError(
                f"{across.strategy} spreads engine {name!r} over all engines, but {', '.join(map(repr, left))} does "
                "without; name it for every role, or for none", "parallel")
    for name, across in spanning.items():
        if (size := plans[name].world_size) > 1:
            raise ConfigError(
                f"{across.strategy} spreads over engines of one rank each, but other strategies give engine {name!r} "
                f"{size}; leave those out, or name {across.strategy} before one whose ranks share a layer", "parallel")


def build_model(config: Config, registry: Registry, checkpoint: "Checkpoint") -> Model:
    """The component that the config names, or the one registered under the checkpoint's architecture, or the fallback.
    """
    section, architecture = config.model, checkpoint.architecture
    use = section.use or (architecture if architecture in registry.names("model") else section.fallback)
    if use is None:
        raise ConfigError(
            f"{nobody_for(architecture, registry)}; install one, or name one with model.use or model.fallback", "model")
    model: Model = registry.build("model", ComponentRef(use=use, **section.options), "model")
    return model


def nobody_for(architecture: str, registry: Registry) -> str:
    return (
        f"no component is registered for the checkpoint's architecture {architecture!r} (there are "
        f"{', '.join(registry.names('model'))})")


def _transfer(parts: Components) -> KVTransfer | None:
    """The KV transfer, where it offers to do anything."""
    return parts.kv_transfer if parts.kv_transfer.describe().offers else None


def _warn_of_too_much(config: Config, info: WorkerInfo) -> None:
    """A host gives out more memory than it has, and takes its toll when pages are first written."""
    asked = config.kvcache.memory
    if asked is not None and asked > info.free_bytes:
        logger.warning(
            "kvcache.memory: %.1f GiB were asked for, more than the %.1f GiB that are free for pages here; the process "
            "may be ended for want of memory as they fill", asked / 2**30, info.free_bytes / 2**30)


def divide_memory(config: Config, parts: Components, info: WorkerInfo, max_model_len: int) -> CachePlan:
    room = cache_room(config, info, max_model_len)
    plan: CachePlan = parts.kvcache.configure(room.specs, room.num_bytes, room.constraints)
    return plan


def cache_room(config: Config, info: WorkerInfo, max_model_len: int) -> CacheRoom:
    """Bytes for what the config says; else for all that could ever be held at once, or what the device has left."""
    section, running = config.kvcache, config.scheduler.max_running
    num_bytes = section.memory
    if num_bytes is None:
        tokens = (running + 1) * (max_model_len + 256)  # whole pages, and the dummy page
        most = sum(spec.bytes_per_token for spec in info.cache_specs) * tokens
        num_bytes = min(info.free_bytes, most)
    return CacheRoom(tuple(info.cache_specs), num_bytes, CacheConstraints(
        max_model_len, running, section.block_size, info.page_sizes, section.num_blocks))


def versions() -> dict[str, str]:
    """Of hotswap and of what its numbers depend on."""
    found = {}
    for name in ("hotswap", "torch", "transformers", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
