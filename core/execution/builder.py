"""Workers from parts: built and loaded where they will run, here or in another process."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import ConfigError
from hotswap.core.execution.lane import Lane, WorkerInLane
from hotswap.core.execution.placed import check_support
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.kv_transfer import KVTransfer
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.parallel import RankPlan, Worker, WorkerRecipe
from hotswap.core.interfaces.quantization import Quantization
from hotswap.core.interfaces.speculator import Speculator
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh

if TYPE_CHECKING:
    from hotswap.core.modeling.checkpoint import Checkpoint


class LoadOnce:
    """Of the workers that run one model in one process, the first builds and loads it, and the others wait for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._built = False
        self._weight_bytes: int | None = None

    def build(self, build: Callable[[], None]) -> None:
        with self._lock:
            if not self._built:
                build()
                self._built = True

    def load(self, load: Callable[[], int]) -> int:
        """``load`` returns the bytes of the weights; so does this, every time."""
        with self._lock:
            if self._weight_bytes is None:
                self._weight_bytes = load()
            return self._weight_bytes


class SharedModels:
    """The models of a process, each built and loaded once for all engines that can share it. ``engines``: how many will
    run beside one another; each gets that part of the memory. ``in_turn``: of these, one at a time has work, so that
    they can compute on one thread."""

    def __init__(self, engines: int = 1, in_turn: bool = False) -> None:
        self.engines = engines
        self._in_turn, self._lanes = in_turn, defaultdict[int, Lane](Lane)
        self._lock, self._first = threading.Lock(), dict[tuple[str, ...], tuple[Model, LoadOnce]]()

    def lane(self, index: int) -> Lane | None:
        """For the engines with this ``index`` in their deployments: those beside it compute at the same time."""
        with self._lock:
            return self._lanes[index] if self._in_turn else None

    def join(self, builder: "WorkerBuilder") -> "WorkerBuilder":
        """``builder`` with the model of the first one that was alike in all that a loaded model depends on."""
        checkpoint, settings = builder.checkpoint, builder.settings
        quantization = "" if builder.quantization is None else builder.quantization.ref.model_dump_json()
        key = (str(checkpoint.path), checkpoint.revision, builder.model.ref.model_dump_json(), settings.device,
               settings.dtype, quantization)
        with self._lock:
            model, loading = self._first.setdefault(key, (builder.model, builder.loading))
        return replace(builder, model=model, loading=loading)


@dataclass(frozen=True)
class WorkerBuilder:
    """A :class:`WorkerFactory`: it builds and loads the worker where it is called. ``loading`` is that of every builder
    with the same ``model``. ``lane``: where the worker computes in this process; by default on the calling thread."""

    checkpoint: "Checkpoint"
    model: Model
    attention: AttentionBackend
    speculator: Speculator
    processors: Sequence[LogitsProcessor]
    settings: WorkerSettings
    clock: Callable[[], float] | None = None
    loading: LoadOnce = field(default_factory=LoadOnce)
    transfer: KVTransfer | None = None
    lane: Lane | None = None
    quantization: Quantization | None = None

    def __call__(self, plan: RankPlan, rank: int, mesh: Mesh | None = None) -> Worker:
        if self.lane is None:
            return self._worker(plan, rank, mesh)
        return WorkerInLane(self.lane, self.settings.num_threads, lambda: self._worker(plan, rank, mesh))

    def _worker(self, plan: RankPlan, rank: int, mesh: Mesh | None) -> ModelWorker:
        mesh, model = mesh or LOCAL_MESH, self.model
        settings = replace(self.settings, device=mesh.place(self.settings.device))
        if plan.world_size != 1 and mesh.alone:
            raise ConfigError(
                f"the strategies ask for {plan.world_size} ranks, but the executor gives one; choose an executor that "
                "starts processes, or leave the list empty", "parallel")
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)  # a property of the calling thread
        self.loading.build(lambda: self._build(mesh, settings))
        check_support(self.attention, model.attention_shapes({}), settings.device, settings.dtype)
        worker = ModelWorker(  # before the weights, since a speculator may refuse the target
            model, model.facts(self.checkpoint.config), self.attention, self.speculator, self.processors, settings,
            self.clock or SystemClock().now, mesh, rank, self.checkpoint,
            self.transfer.worker() if self.transfer is not None else None)
        worker.loaded(self.loading.load(self._load))
        return worker

    def _build(self, mesh: Mesh, settings: WorkerSettings) -> None:
        self.model.build(self.checkpoint.config, mesh, getattr(torch, settings.dtype), settings.device)

    def _load(self) -> int:
        with self.checkpoint.weights() as weights:
            weights.quantization = self.quantization
            self.model.load(weights)
        return weights.num_bytes(getattr(torch, self.settings.dtype))

    def recipe(self) -> WorkerRecipe:
        parts: dict[str, Component | Sequence[Component]] = {
            "model": self.model, "attention": self.attention, "speculator": self.speculator,
            "processors": self.processors, "transfer": [self.transfer] if self.transfer is not None else [],
            "quantization": [self.quantization] if self.quantization is not None else []}
        refs = {
            name: [item.ref.model_dump() for item in part] if isinstance(part, Sequence) else part.ref.model_dump()
            for name, part in parts.items()}
        return WorkerRecipe(f"{__name__}:builder_from", {
            "checkpoint": str(self.checkpoint.path), "parts": refs, "settings": asdict(self.settings)},
            self.settings.device)


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
        [build("logits_processor", ref) for ref in parts["processors"]], WorkerSettings(**arguments["settings"]),
        transfer=next((build("kv_transfer", ref) for ref in parts["transfer"]), None),
        quantization=next((build("quantization", ref) for ref in parts["quantization"]), None))
