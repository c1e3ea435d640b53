"""One rank: a loaded model, its cache and its runner, behind the Worker protocol."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast
from weakref import WeakMethod

import torch

from hotswap.core.errors import ConfigError
from hotswap.core.execution.accord import Accord
from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.choosing import TokenChooser
from hotswap.core.execution.device import free_bytes, memory_errors
from hotswap.core.execution.graphs import StepGraphs, capturing_device, not_full, reserve_bytes
from hotswap.core.execution.placed import Placed, check_needs, check_support, keys_for, rehearse
from hotswap.core.execution.records import RecordedForward, padding_layout
from hotswap.core.execution.runner import ModelRunner
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.speculation import Speculation, SpeculatorCache
from hotswap.core.execution.static import GraphKey
from hotswap.core.interfaces.attention import AttentionBackend, BatchLimits, GroupShape
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.graphs import CaptureError, GraphDevice
from hotswap.core.interfaces.kv_transfer import AxisShard, TransferWorker
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.interfaces.parallel import RankReport, Take, WorkerInfo
from hotswap.core.interfaces.speculator import DraftRow, Draw, Drawn, Speculator, SpeculatorServices
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh

if TYPE_CHECKING:
    from hotswap.core.modeling.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class ModelWorker:
    """Serves step messages with a model that is built, and loaded before the first of them. See ``Worker``."""

    def __init__(
        self, model: Model, facts: ModelFacts, attention: AttentionBackend, speculator: Speculator,
        processors: Sequence[LogitsProcessor], settings: WorkerSettings, clock: Callable[[], float],
        mesh: Mesh = LOCAL_MESH, rank: int = 0, checkpoint: "Checkpoint | None" = None,
        transfer: TransferWorker | None = None,
    ) -> None:
        self._model, self._facts, self._checkpoint = model, facts, checkpoint
        self._settings, self._clock, self._transfer = settings, clock, transfer
        self._mesh, self._rank, self._weight_bytes = mesh, rank, 0
        self._keys = self._keys_to_capture()
        device = capturing_device(settings.device, attention) if self._keys else None
        self._on_demand = device is not None and device.on_demand
        self._verified: set[type[AttentionBackend]] = set()
        self._chooser = TokenChooser(
            processors if mesh.is_last and mesh.leads else (), facts.vocab_size, settings.device)
        self._placed = self._place(attention, speculator, self._keys, device)
        self._prepared: Placed | None = None
        self._former: Placed | None = None
        self._cache: PagedCache | None = None
        self._table: RequestTable | None = None
        self._runner: ModelRunner | None = None

    def _place(
        self, attention: AttentionBackend, speculator: Speculator, keys: tuple[GraphKey, ...],
        device: GraphDevice | None,
    ) -> Placed:
        """Bind both to the model, which need not be loaded. ConfigError for what does not fit."""
        settings, mesh, own_cache = self._settings, self._mesh, SpeculatorCache(self._settings.device)
        if mesh.is_first:
            speculator.bind(SpeculatorServices(
                self._facts.vocab_size, settings.device, settings.dtype, settings.max_model_len, self._model,
                self._facts, self._checkpoint, partial(model_for, fallback=settings.fallback), own_cache,
                _weakly(self._draw), first_layer=self._facts.num_layers,
                capture=device.capture if device is not None and not device.on_demand else None))
        needs = speculator.needs()
        check_needs(speculator, needs, self._model, mesh)
        check_support(attention, needs.shapes, settings.device, settings.dtype)
        return Placed(attention, speculator, needs, own_cache, keys, device)

    def loaded(self, weight_bytes: int) -> None:
        """The model has its weights; the speculator takes its own."""
        self._weight_bytes = weight_bytes
        if self._mesh.is_first:
            self._placed = replace(self._placed, speculator_bytes=self._placed.speculator.load())

    def info(self) -> WorkerInfo:
        return self._info(self._placed)

    def _info(self, placed: Placed) -> WorkerInfo:
        needs = placed.needs
        return WorkerInfo(
            facts=self._facts, cache_specs=(*self._model.cache_specs(), *needs.cache_specs),
            page_sizes=placed.attention.support().page_sizes, lookahead=needs.lookahead,
            reuse_tail=needs.reuse_tail, free_bytes=self._free_bytes(placed),
            max_model_len=self._settings.max_model_len,
        )

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        """Beside the steps, on another thread: nothing that these use is changed."""
        self._prepared, now = None, self._placed
        if not parts:
            return self._info(now)
        attention = cast(AttentionBackend, parts.get(AttentionBackend.kind, now.attention))
        speculator = cast(Speculator, parts.get(Speculator.kind, now.speculator))
        keys, device = self._graphs_for(attention, speculator.needs().lookahead)
        shapes = self._model.attention_shapes({})
        check_support(attention, shapes, self._settings.device, self._settings.dtype)
        if speculator is now.speculator:
            check_support(attention, now.needs.shapes, self._settings.device, self._settings.dtype)
            prepared = replace(now, attention=attention, keys=keys, device=device)
        else:
            prepared = self._place(attention, speculator, keys, device)
            if self._mesh.is_first:
                prepared = replace(prepared, speculator_bytes=speculator.load())
        if attention is not now.attention:
            self._rehearse(prepared)
        self._prepared = prepared
        return self._info(prepared)

    def _graphs_for(
        self, attention: AttentionBackend, lookahead: int,
    ) -> tuple[tuple[GraphKey, ...], GraphDevice | None]:
        """What is captured with other parts, and by what. A backend that brings along another kind of device than the
        one at the start had runs eagerly: the steps were chosen for that kind."""
        keys = keys_for(self._keys, attention, lookahead, self._settings.max_batch_tokens)
        if attention is self._placed.attention:
            device = self._placed.device
        else:
            device = capturing_device(self._settings.device, attention) if keys else None
        if device is not None and device.on_demand == self._on_demand:
            return keys, device
        if self._keys:
            self._without_graphs(f"{attention.label} brings nothing along that captures the steps chosen at the start")
        return (), None

    def _rehearse(self, placed: Placed) -> None:
        """With the page sizes that there are, where the backend takes them."""
        allowed, needs = placed.attention.support().page_sizes, placed.needs
        sizes = {
            group: share.page_size if allowed is None or share.page_size in allowed else allowed[0]
            for group, share in self._plan.groups.items()}
        size = next(iter(sizes.values()))
        shapes = self._model.attention_shapes(sizes) | {
            group: replace(shape, page_size=size) for group, shape in needs.shapes.items()}
        rehearse(placed.attention, shapes, self._settings.device, self._settings.dtype)

    @memory_errors()
    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        leaving, target = self._placed, self._placed
        if take is Take.FORMER:
            target = self._former or leaving  # none: the exchange that is undone has not come here
        elif take is Take.PREPARED:
            if self._prepared is None:
                raise RuntimeError("no parts were prepared for this exchange")
            target, self._prepared = self._prepared, None
        self._placed, self._former = target, leaving  # at once, so that it can be undone wherever it fails
        self._forget_all(leaving)
        kept = self._cache if keeps_pages else None
        if kept is None:
            self._cache = None  # before there is another, so that there is room for it
        self._assemble(plan, kept)

    def settle(self) -> None:
        self._former = None

    def _forget_all(self, leaving: Placed) -> None:
        """All requests: they come again as new. A part that is exchanged back finds none of what it knew of them."""
        residents, runner = list(self._table or ()), self._runner
        self._runner = self._table = None
        leaving.own_cache.detach()
        if runner is not None:
            runner.forget_graphs()
        for request in residents:
            self._chooser.end(request)
        try:
            leaving.speculator.forget(residents)
        except Exception:
            logger.exception("%s raised in forget; it is exchanged, so nobody is told", leaving.speculator.label)

    @memory_errors()
    def allocate(self, plan: CachePlan) -> None:
        self._assemble(plan, None)

    def _assemble(self, plan: CachePlan, kept: PagedCache | None) -> None:
        """Make a runner of the parts that are in place. ``kept``: the tensors that hold the pages of ``plan`` already.
        """
        settings, needs = self._settings, self._placed.needs
        max_tokens = settings.max_model_len + needs.lookahead + 1  # drafts, and the token after the last
        page_sizes = {group: share.page_size for group, share in plan.groups.items()}
        shapes = self._model.attention_shapes(page_sizes) | {
            group: replace(shape, page_size=page_sizes[group]) for group, shape in needs.shapes.items()}
        # A speculator that catches up computes a step's tokens and those that it is behind.
        behind = settings.max_running * (needs.lookahead + 1) if needs.cache_specs else 0
        limits = BatchLimits(
            settings.max_batch_tokens + behind, settings.max_running, max_pages_per_row=0, device=settings.device,
            dtype=settings.dtype)
        specs, own = [*self._model.cache_specs(), *needs.cache_specs], [spec.group for spec in needs.cache_specs]
        cache = PagedCache(self._placed.attention, specs, shapes, plan, limits, max_tokens, kept)
        if self._transfer is not None:
            if kept is None:
                pages = cache.pages({spec.group: self._kv_heads(spec) for spec in specs})
                self._transfer.register(pages, plan.transfer)
            if self._transfer.layerwise:
                cache.watch_layers(self._transfer)
        self._cache, self._plan = cache, plan
        self._table = table = RequestTable(plan, settings.max_running, max_tokens, lagging=own)
        self._placed.own_cache.attach(own, table, cache)
        self._accord = Accord(self._mesh, settings.device, needs.lookahead, meets=bool(needs.taps))
        speculation = Speculation(self._placed.speculator, self._facts.vocab_size, self._mesh.is_first)
        self._runner = ModelRunner(
            self._model, cache, table, speculation, self._chooser, settings.device, self._clock, self._accord,
            self._mesh, (self._facts.hidden_size, getattr(torch, settings.dtype)), self._transfer)
        if self._placed.device is not None and self._placed.keys:
            capture = self._record if self._placed.device.on_demand else self._capture
            capture(self._runner, self._placed.device, table, cache, shapes)

    def _keys_to_capture(self) -> tuple[GraphKey, ...]:
        """As the settings say, unless the transfer speaks against it, which is known only here."""
        keys, why = self._settings.graphs, "the KV transfer works between the layers of a step"
        if self._mesh.in_step:
            why = "ranks exchange tokens in numbers that differ from step to step"
        elif not (keys and self._transfer is not None and self._transfer.layerwise):
            return keys
        if keys:
            self._without_graphs(why)
        return ()

    def _without_graphs(self, why: str, cause: Exception | None = None) -> None:
        if self._settings.needs_graphs:
            raise ConfigError(not_full(why), "execution.graphs") from cause
        logger.warning("graphs: off after all, since %s", why)

    def _capture(
        self, runner: ModelRunner, device: GraphDevice, table: RequestTable, cache: PagedCache,
        shapes: dict[str, GroupShape],
    ) -> None:
        settings, placed = self._settings, self._placed
        step = placed.needs.step
        windows = {group: shape.window for group, shape in shapes.items()}
        own = {spec.group: windows.pop(spec.group) for spec in placed.needs.cache_specs}
        runner.graphs = StepGraphs(placed.keys, device, table, cache, windows, runner.forward, settings.device)
        with torch.inference_mode():
            runner.graphs.capture(settings.progress, self._graph_bytes(placed))
            if step is not None:
                keys = [key for key in placed.keys if key.queries == 1]
                placed.own_cache.capture(step, keys, device, own, settings.progress, self._draft_graph_bytes(placed))
                runner.draft_events = placed.own_cache.events

    def _record(
        self, runner: ModelRunner, device: GraphDevice, table: RequestTable, cache: PagedCache,
        shapes: dict[str, GroupShape],
    ) -> None:
        """Steps are recorded as they come; here it is found out whether they can be."""
        placed, most = self._placed, max(key.rows for key in self._placed.keys)
        records = RecordedForward(device, runner.forward, most)
        zero = torch.zeros(1, dtype=torch.int64, device=self._settings.device)
        one = zero + 1
        try:
            with torch.inference_mode():
                cache.plan(padding_layout(table, list(shapes), self._settings.device))
                if type(placed.attention) not in self._verified:  # once, since in an exchange requests wait
                    records.verify((zero, zero, None), (one, one, None))
                    if self._mesh.is_last and not placed.needs.taps:
                        records.verify((zero, zero, zero), (one, one, zero))  # of the wanted token alone
                    self._verified.add(type(placed.attention))
                if placed.needs.step is not None:
                    placed.own_cache.record(placed.needs.step, device, most)
        except CaptureError as error:
            self._without_graphs(str(error), error)
        else:
            runner.records, runner.draft_events = records, placed.own_cache.events

    def execute(self, message: StepMessage) -> Verdict:
        assert self._runner is not None, "execute before allocate"
        with torch.inference_mode():
            return self._runner.execute(message)

    def _draw(self, logits: torch.Tensor, rows: Sequence[DraftRow]) -> Drawn:
        """See ``Draw``. The rank that leads the stage draws, since it alone knows how."""
        return self._accord.draw(len(rows), lambda: self._chooser.draw(logits, rows))

    def join(self) -> None:
        assert self._runner is not None, "join before allocate"
        with torch.inference_mode():
            self._runner.join()

    def report(self) -> RankReport:
        return RankReport(
            self._rank, self._settings.device, self._weight_bytes, self._kv_bytes, self._mesh.counts(),
            {name: values.flatten().tolist() for name, values in self._model.statistics().items()},
            self._runner.graph_totals() if self._runner else {}, self._placed.speculator_bytes)

    def close(self) -> None:
        """Nothing is called any more. What knows the runner is let go: a ring would keep the weights."""
        self._placed.own_cache.detach()
        if self._runner is not None:
            self._runner.forget_graphs()
        self._runner = self._cache = self._table = self._prepared = self._former = None
        if self._transfer is not None:
            self._transfer.close()

    def _kv_heads(self, spec: CacheSpec) -> AxisShard:
        """Which of a group's heads are here; of a group that is not sharded, all."""
        total = self._facts.axes.get("kv_heads", spec.kv_heads)
        shard = self._mesh.shard("kv_heads", total)
        if shard.count != spec.kv_heads:
            return AxisShard(0, spec.kv_heads, spec.kv_heads)
        return AxisShard(shard.start, shard.count, total)

    @property
    def _kv_bytes(self) -> int:
        return self._cache.num_bytes if self._cache is not None else 0

    def _free_bytes(self, placed: Placed) -> int:
        """What is left for pages: a share of the memory that is free but for them, less what a step's activations and
        logits take."""
        settings, facts = self._settings, self._facts
        logits = 3 * settings.max_running * (placed.needs.lookahead + 1) * facts.vocab_size * 4
        graphs = self._graph_bytes(placed) + self._draft_graph_bytes(placed)
        reserve = settings.max_batch_tokens * self._bytes_per_token() + logits + graphs
        return max(0, int((free_bytes(settings.device) + self._kv_bytes) * settings.memory_fraction) - reserve)

    def _bytes_per_token(self) -> int:
        """Of a step's activations, about."""
        facts = self._facts
        itemsize: int = getattr(torch, self._settings.dtype).itemsize
        return (8 * facts.hidden_size + (facts.mlp_width or 12 * facts.hidden_size)) * itemsize

    def _graph_bytes(self, placed: Placed) -> int:
        return reserve_bytes(placed.device, placed.keys, self._facts.num_layers, self._bytes_per_token())

    def _draft_graph_bytes(self, placed: Placed) -> int:
        """A draft model's activations are taken to be as wide as the target's."""
        if placed.needs.step is None:
            return 0
        layers = sum(len(spec.layers) for spec in placed.needs.cache_specs)
        keys = [key for key in placed.keys if key.queries == 1]
        return reserve_bytes(placed.device, keys, layers, self._bytes_per_token())


def _weakly(draw: Draw) -> Draw:
    """For a speculator, which lives no longer than its worker: a ring of the two would keep the weights."""
    known = WeakMethod(draw)

    def drawn(logits: torch.Tensor, rows: Sequence[DraftRow]) -> Drawn:
        method = known()
        assert method is not None, "drawn without a worker"
        return method(logits, rows)

    return drawn


def model_for(checkpoint: "Checkpoint", fallback: str | None = None) -> Model:
    """The component registered under the architecture of a checkpoint that is not the config's own model, or
    ``fallback``."""
    from hotswap.core.registry import Registry

    registry, architecture = Registry(), checkpoint.architecture
    known = registry.names("model")
    use = architecture if architecture in known else fallback
    if use is None:
        raise ConfigError(
            f"the architecture of {checkpoint.path} is {architecture!r}, and no installed component is registered for "
            f"it; there are {', '.join(known)}", "speculator")
    model: Model = registry.build("model", ComponentRef(use=use), "speculator")
    return model
