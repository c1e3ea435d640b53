"""One rank: a loaded model, its cache and its runner, behind the Worker protocol."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import ConfigError
from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.choosing import TokenChooser
from hotswap.core.execution.device import choose_device, choose_dtype, free_bytes
from hotswap.core.execution.runner import ModelRunner
from hotswap.core.interfaces.attention import AttentionBackend, BatchLimits, GroupShape
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.interfaces.parallel import RankPlan, RankReport, WorkerInfo, WorkerRecipe
from hotswap.core.interfaces.speculator import Speculator, SpeculatorServices
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh

if TYPE_CHECKING:
    from hotswap.core.config import Config
    from hotswap.core.modeling.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """``dtype`` and ``device`` are torch's names. ``num_threads``: None leaves torch's choice. ``memory_fraction``: how
    much of the memory that is free once weights are loaded may go to cache and activations."""

    dtype: str
    device: str
    max_model_len: int
    max_batch_tokens: int
    max_running: int
    num_threads: int | None = None
    memory_fraction: float = 0.85

    @classmethod
    def choose(
        cls, config: "Config", checkpoint: "Checkpoint", max_model_len: int, notes: list[str],
    ) -> "WorkerSettings":
        """Resolve what the config leaves to us; ``notes`` gets each choice with its reason. ConfigError."""
        device = choose_device(config.device, notes)
        dtype = choose_dtype(config.dtype, checkpoint.config, device, notes)
        scheduler, threads = config.scheduler, config.execution.num_threads
        return cls(dtype, device, max_model_len, scheduler.max_batch_tokens, scheduler.max_running, threads)


class LoadOnce:
    """Of the workers that run one model in one process, the first loads it, and the others wait for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._weight_bytes: int | None = None

    def ensure(self, load: Callable[[], int]) -> int:
        """``load`` returns the bytes of the weights; so does this, every time."""
        with self._lock:
            if self._weight_bytes is None:
                self._weight_bytes = load()
            return self._weight_bytes


@dataclass(frozen=True)
class WorkerBuilder:
    """A :class:`WorkerFactory`: it builds and loads the worker where it is called. ``loading`` is that of every builder
    with the same ``model``."""

    checkpoint: "Checkpoint"
    model: Model
    attention: AttentionBackend
    speculator: Speculator
    processors: Sequence[LogitsProcessor]
    settings: WorkerSettings
    clock: Callable[[], float] | None = None
    loading: LoadOnce = field(default_factory=LoadOnce)

    def __call__(self, plan: RankPlan, rank: int, mesh: Mesh | None = None) -> "ModelWorker":
        mesh, settings, model = mesh or LOCAL_MESH, self.settings, self.model
        if plan.world_size != 1 and mesh.alone:
            raise ConfigError(
                f"the strategies ask for {plan.world_size} ranks, but the executor gives one; choose an executor that "
                "starts processes, or leave the list empty", "parallel")
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)  # a property of the calling thread
        weight_bytes = self.loading.ensure(lambda: self._load(mesh))
        return ModelWorker(
            model, model.facts(self.checkpoint.config), self.attention, self.speculator, self.processors, settings,
            self.clock or SystemClock().now, mesh, rank, weight_bytes)

    def _load(self, mesh: Mesh) -> int:
        dtype = getattr(torch, self.settings.dtype)
        self.model.build(self.checkpoint.config, mesh, dtype, self.settings.device)
        check_support(self.attention, self.model.attention_shapes({}), self.settings)
        with self.checkpoint.weights() as weights:
            self.model.load(weights)
        return int(weights.taken * dtype.itemsize)

    def recipe(self) -> WorkerRecipe:
        parts: dict[str, Component | Sequence[Component]] = {
            "model": self.model, "attention": self.attention, "speculator": self.speculator,
            "processors": self.processors}
        refs = {
            name: [item.ref.model_dump() for item in part] if isinstance(part, Sequence) else part.ref.model_dump()
            for name, part in parts.items()}
        return WorkerRecipe(f"{__name__}:builder_from", {
            "checkpoint": str(self.checkpoint.path), "parts": refs, "settings": asdict(self.settings)})


def builder_from(arguments: Mapping[str, Any]) -> WorkerBuilder:
    """The other end of :meth:`WorkerBuilder.recipe`. ConfigError where this process finds less than the other did."""
    from hotswap.core.modeling.checkpoint import open_checkpoint
    from hotswap.core.registry import Registry

    registry, parts = Registry(), arguments["parts"]

    def build(kind: str, ref: Mapping[str, Any]) -> Any:
        return registry.build(kind, ComponentRef(**ref), kind)

    return WorkerBuilder(
        open_checkpoint(arguments["checkpoint"], progress=False), build("model", parts["model"]),
        build("attention", parts["attention"]), build("speculator", parts["speculator"]),
        [build("logits_processor", ref) for ref in parts["processors"]], WorkerSettings(**arguments["settings"]))


class ModelWorker:
    """Serves step messages with a model that is loaded. See ``Worker``."""

    def __init__(
        self, model: Model, facts: ModelFacts, attention: AttentionBackend, speculator: Speculator,
        processors: Sequence[LogitsProcessor], settings: WorkerSettings, clock: Callable[[], float],
        mesh: Mesh = LOCAL_MESH, rank: int = 0, weight_bytes: int = 0,
    ) -> None:
        self._model, self._facts, self._attention = model, facts, attention
        self._speculator, self._needs = speculator, speculator.needs()
        self._settings, self._clock = settings, clock
        self._mesh, self._rank, self._weight_bytes, self._kv_bytes = mesh, rank, weight_bytes, 0
        if self._needs.cache_specs or self._needs.taps:
            raise ConfigError(
                f"{speculator.label} needs cache groups or hidden states of its own, which this worker does not give; "
                "choose a speculator that needs neither", "speculator")
        if mesh.is_first:
            speculator.bind(SpeculatorServices(facts.vocab_size, settings.device, settings.dtype))
        self._chooser = TokenChooser(
            processors if mesh.is_last and mesh.leads else (), facts.vocab_size, settings.device)
        self._runner: ModelRunner | None = None

    def info(self) -> WorkerInfo:
        return WorkerInfo(
            facts=self._facts, cache_specs=tuple(self._model.cache_specs()),
            page_sizes=self._attention.support().page_sizes, lookahead=self._needs.lookahead,
            reuse_tail=self._needs.reuse_tail, free_bytes=self._free_bytes(),
            max_model_len=self._settings.max_model_len,
        )

    def allocate(self, plan: CachePlan) -> None:
        settings = self._settings
        max_tokens = settings.max_model_len + self._needs.lookahead + 1  # drafts, and the token after the last
        shapes = self._model.attention_shapes({group: share.page_size for group, share in plan.groups.items()})
        limits = BatchLimits(
            settings.max_batch_tokens, settings.max_running, max_pages_per_row=0, device=settings.device,
            dtype=settings.dtype)
        cache = PagedCache(self._attention, self._model.cache_specs(), shapes, plan, limits, max_tokens)
        self._kv_bytes = cache.num_bytes
        table = RequestTable(plan, settings.max_running, max_tokens)
        self._runner = ModelRunner(
            self._model, self._facts.vocab_size, cache, table, self._speculator, self._chooser, settings.device,
            self._clock, self._mesh, (self._facts.hidden_size, getattr(torch, settings.dtype)))

    def execute(self, message: StepMessage) -> Verdict:
        assert self._runner is not None, "execute before allocate"
        with torch.inference_mode():
            return self._runner.execute(message)

    def report(self) -> RankReport:
        return RankReport(
            self._rank, self._settings.device, self._weight_bytes, self._kv_bytes, self._mesh.counts(),
            {name: values.flatten().tolist() for name, values in self._model.statistics().items()})

    def close(self) -> None:
        self._runner = None

    def _free_bytes(self) -> int:
        """What is left for pages: a share of the free memory, less what a step's activations and logits take."""
        settings, facts = self._settings, self._facts
        itemsize: int = getattr(torch, settings.dtype).itemsize
        width = 8 * facts.hidden_size + 3 * facts.axes.get("mlp", 4 * facts.hidden_size)
        logits = 3 * settings.max_running * (self._needs.lookahead + 1) * facts.vocab_size * 4
        reserve = settings.max_batch_tokens * width * itemsize + logits
        return max(0, int(free_bytes(settings.device) * settings.memory_fraction) - reserve)


def check_support(attention: AttentionBackend, shapes: dict[str, GroupShape], settings: WorkerSettings) -> None:
    """ConfigError that lists everything the model needs and ``attention`` does not do, before any request meets it."""
    support = attention.support()
    problems = []

    def need(what: str, value: object, allowed: Sequence[object] | None) -> None:
        if allowed is not None and value not in allowed:
            problems.append(f"{what} {value} (it takes {', '.join(map(str, allowed))})")

    need("device", settings.device.partition(":")[0], support.devices)
    need("dtype", settings.dtype, support.dtypes)
    for shape in shapes.values():
        need("head size", shape.head_dim, support.head_dims)
        if shape.window is not None and not support.windows:
            problems.append(f"a sliding window of {shape.window}")
        if shape.softcap is not None and not support.softcap:
            problems.append(f"a softcap of {shape.softcap}")
    if problems:
        raise ConfigError(
            f"{attention.label} does not support what this model needs: {'; '.join(dict.fromkeys(problems))}. "
            "Choose another backend", "attention")
