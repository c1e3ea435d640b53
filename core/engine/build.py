"""From a config to running engines: the one place where the parts meet.

Cheap checks come before expensive work: components are built and their demands solved, then the checkpoint's config is
read, then weights are loaded, then pages are divided. What one engine is made of is in ``assembly``.
"""

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.config import Config, ResolvedConfig
from hotswap.core.config.check import check_config
from hotswap.core.config.limits import AUTO, AttentionNeeds
from hotswap.core.engine.assembly import Assembly, BuiltEngine, build_model, nobody_for
from hotswap.core.engine.clock import Clock, SystemClock
from hotswap.core.engine.exchange import Exchanger, Report
from hotswap.core.errors import ConfigError, EngineStoppedError, LoopTimeoutError
from hotswap.core.interfaces.component import RequestOptions
from hotswap.core.interfaces.deployment import EngineClient
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.live import LiveComponents, LiveRequestOptions
from hotswap.core.registry import Registry

if TYPE_CHECKING:
    from hotswap.core.execution.builder import SharedModels
    from hotswap.core.modeling.checkpoint import Checkpoint

RANKS_TIMEOUT_S = 5.0


@dataclass
class Built:
    """What runs, and what a front needs to talk to it. ``engine`` is the face of it all; ``engines`` are the loops
    behind it, one where the config names no deployment; ``fronts`` holds the deployments and their parts."""

    engine: EngineClient
    engines: list[BuiltEngine]
    resolved: ResolvedConfig
    checkpoint: "Checkpoint"
    facts: ModelFacts
    max_model_len: int
    registry: Registry
    needs: AttentionNeeds
    """Of the model, by which ``attention: auto`` chooses."""
    honoured: frozenset[str]
    """The sampling fields that the configured logits processors carry out."""
    fronts: LiveComponents = field(default_factory=LiveComponents)
    notes: list[str] = field(default_factory=list)
    """What was chosen where the config leaves a choice, and why."""
    warnings: list[str] = field(default_factory=list)
    """What the operator should look at: deprecated keys, a checkpoint with something missing."""

    def __post_init__(self) -> None:
        self._exchanger = Exchanger(self.engines, self.registry, self.needs, self.max_model_len)

    @property
    def components(self) -> LiveComponents:
        """Those of the first engine."""
        return self.engines[0].components

    @property
    def cache_plan(self) -> CachePlan:
        """That of the first engine."""
        return self.engines[0].cache_plan

    @property
    def request_options(self) -> Mapping[str, type[RequestOptions]]:
        """Per live component that reads a part of a request's ``extra``: the model of that part. What an exchange
        changes shows in it at once."""
        return LiveRequestOptions((self.components, self.fronts))

    def listing(self) -> list[dict[str, Any]]:
        """Every live component, as :meth:`LiveComponents.listing` tells of it; with several engines, with the
        ``replica`` that it belongs to, None for a deployment and its parts."""
        if len(self.engines) == 1 and not list(self.fronts):
            return self.components.listing()
        return [
            {**entry, "replica": name}
            for name, live in [(None, self.fronts), *((built.replica.name, built.components) for built in self.engines)]
            for entry in live.listing()
        ]

    def exchange(self, sets: Iterable[str], replica: str | None = None) -> list[Report]:
        """Exchange parts while serving, see :meth:`Exchanger.exchange`."""
        return self._exchanger.exchange(sets, replica)

    def effective(self) -> dict[str, Any]:
        """The config that holds now, as :meth:`ResolvedConfig.effective` gives it: the first engine's."""
        return self.engines[0].made.resolved.effective()

    def deviations(self) -> dict[str, dict[str, Any]]:
        """By replica: the effective config of an engine whose parts are others than the first one's."""
        first = self.effective()
        return {built.replica.name: own for built in self.engines if (own := built.made.resolved.effective()) != first}

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank of each engine holds and has done, as JSON; nothing of engines that have ended, or do not
        answer within a few seconds. Waits for the steps in flight: not from an engine's loop."""
        found: list[dict[str, Any]] = []
        for built in self.engines:
            with contextlib.suppress(EngineStoppedError, LoopTimeoutError):
                for report in built.engine.call(built.engine.loop.parts.executor.report, RANKS_TIMEOUT_S):
                    calls = {name: count._asdict() for name, count in report.collectives.items()}
                    found.append({"replica": built.replica.name, **asdict(report), "collectives": calls})
        return found

    def install_routes(self, app: Any) -> None:
        """Let every observer of every engine add its routes to the HTTP application."""
        for built in self.engines:
            built.components.observers.notify("hotswap_server_routes", app=app)


@dataclass(frozen=True)
class Opened:
    """What is known of a config's model before its weights are loaded."""

    checkpoint: "Checkpoint"
    facts: ModelFacts
    max_model_len: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def open_model(config: Config, registry: Registry, *, progress: bool = True) -> Opened:
    """Read the checkpoint's config, not its weights. ConfigError for what no engine could be built of."""
    checkpoint = _open(config, progress)
    model = build_model(config, registry, checkpoint)
    facts, notes = _facts(config, registry, model, checkpoint)
    warnings = (*checkpoint.warnings, *_odd_model(config, model, checkpoint))
    return Opened(checkpoint, facts, _context_length(config, facts), tuple(notes), warnings)


def build_engine(
    resolved: ResolvedConfig, *, progress: bool = True, clock: Clock | None = None,
    models: "SharedModels | None" = None,
) -> Built:
    """Load everything and start the loops. ConfigError (ModelLoadError among them) for whatever does not fit.

    ``models``: what engines of this process have loaded already. One that can share their weights does so.
    """
    from hotswap.core.execution.builder import SharedModels

    config, registry = resolved.config, Registry()
    parts = check_config(config, registry)
    opened = open_model(config, registry, progress=progress)
    chosen = list[str]()
    needs = _attention_needs(config, opened, chosen)
    if config.attention.use == AUTO:  # chosen before by what the config says
        parts = check_config(config, registry, needs=needs)
    assembly = Assembly(
        resolved, registry, parts, opened.checkpoint, opened.facts, needs, opened.max_model_len,
        clock or SystemClock(), models or SharedModels())
    engine = assembly.start()
    honoured = frozenset(field for processor in parts.listed("logits_processors") for field in processor.honours)
    return Built(
        engine, assembly.in_order(), resolved, opened.checkpoint, opened.facts, opened.max_model_len, registry,
        needs, honoured, assembly.fronts, [*parts.notes, *opened.notes, *chosen, *assembly.notes],
        [*resolved.warnings, *opened.warnings])


def _attention_needs(config: Config, opened: Opened, notes: list[str]) -> AttentionNeeds:
    """With the device and the dtype of all engines; ``notes`` gets each choice with its reason. ConfigError where the
    device is not there."""
    from hotswap.core.execution.device import choose_device, choose_dtype

    device = choose_device(config.device, notes)
    return AttentionNeeds(
        device, choose_dtype(config.dtype, opened.checkpoint.config, device, notes), shapes=opened.facts.attention)


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


def _facts(
    config: Config, registry: Registry, model: Model, checkpoint: "Checkpoint",
) -> tuple[ModelFacts, list[str]]:
    """The facts, and a note where the fallback stands in for a component that there is not."""
    if config.model.use is not None or model.name == checkpoint.architecture:
        return model.facts(checkpoint.config), []
    nobody = nobody_for(checkpoint.architecture, registry)
    try:
        facts = model.facts(checkpoint.config)
    except ConfigError as error:
        raise ConfigError(f"{nobody}, and the fallback {model.name!r} refuses it: {error.message}", "model") from error
    return facts, [f"{nobody}: the fallback {model.name!r} runs it, slower than one of its own would"]


def _odd_model(config: Config, model: Model, checkpoint: "Checkpoint") -> list[str]:
    if config.model.use in (None, checkpoint.architecture) or "any_architecture" in model.describe().offers:
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
