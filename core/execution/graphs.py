"""Graphs: a step of the model recorded once per batch size and replayed with one call.

On a GPU a small decoding step is bound by the launches of its kernels, some ten a layer; a replay launches them all.
What is captured is the model's forward with attention, for R rows of m queries each: m is 1 for decoding, and 1 + the
speculator's lookahead for verification. Planning, the head, sampling and whatever differs between steps stay outside.
A step that no graph fits runs eagerly, and is counted with the reason. Where recording is as cheap as a step, all of
this is another matter: see :mod:`.records`.

A graph remembers addresses. Its inputs are those of :class:`StaticBatch`, its outputs are copied to tensors of ours
within the graph and from there before the step goes on, so that nothing outside points into memory that the next
replay writes.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.device import free_bytes
from hotswap.core.execution.events import EventCounts
from hotswap.core.execution.layout import IntArray
from hotswap.core.execution.records import MOST_RECORDS
from hotswap.core.execution.static import GraphKey, StaticBatch
from hotswap.core.interfaces.attention import AttentionBackend, GraphLevel
from hotswap.core.interfaces.graphs import GraphDevice, Replay
from hotswap.core.interfaces.model import ModelFacts

if TYPE_CHECKING:
    from hotswap.core.config import Config

logger = logging.getLogger(__name__)

Forward = Callable[[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]
"""(token ids [T], positions [T]) -> tensors [T, ...], the hidden states first."""

_NOBODY = (np.zeros(0, np.int64),) * 3
"""Slots, lengths and past of a step of padding alone."""

_MIB = 1 << 20


class CudaGraphs(GraphDevice):
    """torch's CUDA graphs on a stream of their own, with one private pool for all. Of several engines in one process
    one captures at a time: a capture waits for the whole device before it begins, which nobody may while it lasts."""

    bytes_per_layer = 320 << 10
    """What the driver keeps; an estimate on the high side, checked after the capture."""
    _one_at_a_time = threading.Lock()

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Replay:
        with self._one_at_a_time, torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()  # kernels are compiled and tuned, libraries make their workspaces: none of it can be captured
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile, for what has nothing to do with the capture.
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                run()
        return graph.replay


DEVICES: dict[str, Callable[[str], GraphDevice]] = {"cuda": CudaGraphs}
"""By torch's name of the kind of device: those for attention backends that bring none along."""


def capturing_device(device: str, attention: AttentionBackend) -> GraphDevice | None:
    """What records steps with ``attention`` on ``device``, None where nothing does."""
    made = attention.graph_device(device)
    if made is None and (make := DEVICES.get(device.partition(":")[0])) is not None:
        made = make(device)
    return made


def choose_keys(
    config: "Config", device: str, dtype: str, attention: AttentionBackend, facts: ModelFacts, lookahead: int,
    ranks: int, notes: list[str],
) -> tuple[GraphKey, ...]:
    """Which steps will be captured; empty where graphs are off. ``notes`` gets what "auto" chose and why. ConfigError
    where the config asks for what cannot be."""
    mode, sizes = config.execution.graphs, config.execution.batch_sizes
    running, tokens = config.scheduler.max_running, config.scheduler.max_batch_tokens
    made = attention.graph_device(device)
    recorded = made is not None and made.on_demand
    if sizes is not None and max(sizes) > (tokens if recorded else min(running, tokens)):
        what = "tokens" if recorded else "rows"
        raise ConfigError(
            f"no step has {max(sizes)} {what}, with scheduler.max_running {running} and scheduler.max_batch_tokens "
            f"{tokens}; leave the size out", "execution.batch_sizes")
    if mode == "off":
        return ()
    level = attention.support().graph_level
    obstacle = obstacle_of(attention, device) or _obstacle_of_model(dtype, facts, ranks)
    if obstacle is not None:
        if mode == "full":
            raise ConfigError(not_full(obstacle), "execution.graphs")
        notes.append(f"graphs: off (auto: {obstacle})")
        return ()
    allowed = f"({mode}: {attention.label} and {facts.architecture} allow it)"
    if recorded:
        most = max(sizes or [tokens])
        notes.append(f"graphs: steps of up to {most} tokens are recorded when as many come again {allowed}")
        return (GraphKey(most, 1),)
    wanted = [1, 1 + lookahead] if lookahead and level >= GraphLevel.UNIFORM else [1]
    keys = tuple(
        GraphKey(rows, m) for m in wanted for rows in sizes or default_sizes(min(running, tokens // m))
        if rows * m <= tokens)
    widths = " or ".join(map(str, wanted))
    notes.append(
        f"graphs: {len(keys)} steps of up to {max(key.rows for key in keys)} rows of {widths} "
        f"token{'s' * (wanted != [1])} are captured {allowed}")
    return keys


def not_full(obstacle: str) -> str:
    return f"'full' was asked for, but {obstacle}; choose 'auto' or 'off'"


def obstacle_of(attention: AttentionBackend, device: str) -> str | None:
    """Why no step with ``attention`` can be captured or recorded on ``device``, None where some can, for all that is
    known without the model."""
    kind = device.partition(":")[0]
    if attention.graph_device(device) is None and kind not in DEVICES:
        return (
            f"the device is {kind}, and graphs need {' or '.join(DEVICES)} or an attention backend that records steps "
            f"itself, as {attention.label} does not")
    if attention.support().graph_level == GraphLevel.NEVER:
        return f"{attention.label} does not say that its steps may be captured"
    return None


def _obstacle_of_model(dtype: str, facts: ModelFacts, ranks: int) -> str | None:
    if dtype not in facts.capturable:
        return f"the component of {facts.architecture} does not say that its steps may be captured in {dtype}"
    if ranks > 1:
        return f"the strategies ask for {ranks} ranks, whose collectives are not captured"
    return None


def default_sizes(most: int) -> list[int]:
    """1, 2, 4, 8, 16 and then in steps of a half and a third (24, 32, 48, 64, 96 …), up to ``most``: from 16 on a third
    of the rows at most is padding."""
    sizes, size = [], 1
    while size < most:
        sizes += [size] if size < 16 or size * 3 // 2 >= most else [size, size * 3 // 2]
        size *= 2
    return [*sizes, *([most] if most else [])]


def reserve_bytes(
    device: GraphDevice | None, keys: Sequence[GraphKey], num_layers: int, bytes_per_token: int,
) -> int:
    """What the graphs will take beside the cache, estimated before pages are divided: the activations of the largest
    one, in memory that eager steps do not share, and what the device keeps."""
    if device is None or not keys:
        return 0
    largest = max(key.rows * key.queries for key in keys)
    graphs = MOST_RECORDS if device.on_demand else len(keys)
    return largest * bytes_per_token + graphs * num_layers * device.bytes_per_layer


class StepGraphs:
    """The captured steps of one rank. ``windows``: of each cache group the sliding window, None where it has none.

    ``counts`` tells what happened since the start: ``graph_captures``, ``graph_replays``, and eager steps by
    reason: ``eager_long_rows`` (more tokens in a row than any graph has), ``eager_many_rows`` (more rows),
    ``eager_short_texts`` (a text of fewer tokens than the graph's rows), ``eager_lost_pages`` (a row would be filled up
    with tokens whose window has left the cache); each behind ``prefix``.
    """

    def __init__(
        self, keys: Sequence[GraphKey], device: GraphDevice, table: RequestTable, cache: PagedCache,
        windows: Mapping[str, int | None], forward: Forward, torch_device: str, prefix: str = "",
    ) -> None:
        self.counts = EventCounts(prefix)
        self._keys = sorted(keys, key=lambda key: (key.queries, key.rows))
        self._device, self._torch_device = device, torch_device
        self._table, self._cache, self._forward = table, cache, forward
        self._windows = {group: window for group, window in windows.items() if window is not None}
        self._batch = StaticBatch(table, tuple(windows), keys, torch_device)
        self._outputs: list[torch.Tensor] = []
        self._replays: dict[GraphKey, Replay] = {}

    def capture(self, progress: bool, reserved: int) -> None:
        """Record every step, the largest first, so that the others fit into its memory. ConfigError where memory ends,
        CaptureError where the device cannot record a step."""
        from tqdm import tqdm

        before = free_bytes(self._torch_device)
        keys = sorted(self._keys, key=lambda key: key.rows * key.queries, reverse=True)
        try:
            self.prepare(keys[0], *_NOBODY)
            self._make_outputs(keys[0])
            for key in tqdm(keys, "graphs", unit="graph", disable=None if progress and len(keys) > 4 else True):
                self.prepare(key, *_NOBODY)
                self._replays[key] = self._device.capture(partial(self._run, key))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"memory ended after {len(self._replays)} of {len(keys)} graphs: {before // _MIB} MiB were free, "
                f"{reserved // _MIB} MiB of them set aside for graphs; lower kvcache.memory or kvcache.num_blocks, "
                "give fewer sizes, or set execution.graphs to off", "execution.batch_sizes") from error
        self.counts.add("graph_captures", len(keys))
        used = before - free_bytes(self._torch_device)
        logger.log(
            logging.WARNING if used > reserved else logging.INFO,
            "captured %d graphs in %d MiB; %d MiB were set aside for them", len(keys), used // _MIB, reserved // _MIB)

    def find(self, slots: IntArray, lengths: IntArray, past: IntArray) -> GraphKey | None:
        """The smallest captured step that holds these rows [n]; None, and counted, where there is none."""
        n, longest = len(slots), int(lengths.max())
        fitting = [key for key in self._keys if key.queries >= longest]
        key = next((key for key in fitting if key.rows >= n), None)
        if key is None:
            self.counts.add("eager_many_rows" if fitting else "eager_long_rows")
        elif int((past + lengths).min()) < key.queries:
            self.counts.add("eager_short_texts")
        elif self._lost_pages(slots, past + lengths - key.queries):
            self.counts.add("eager_lost_pages")
        else:
            return key
        return None

    def prepare(self, key: GraphKey, slots: IntArray, lengths: IntArray, past: IntArray) -> None:
        """Fill the static tensors and let the attention backend plan, outside the graph."""
        self._batch.fill(key, slots, lengths, past)
        self._cache.plan(self._batch.layout(key))

    def replay(self, key: GraphKey, lengths: IntArray) -> list[torch.Tensor]:
        """Of the rows' new tokens, what the forward gives: copies [T, ...]."""
        self._replays[key]()
        self.counts.add("graph_replays")
        rows = np.arange(len(lengths))
        ends = np.repeat((rows + 1) * key.queries, lengths)
        within = np.arange(len(ends)) - np.repeat(np.cumsum(lengths), lengths)
        index = torch.from_numpy(ends + within).to(self._torch_device)
        return [output.index_select(0, index) for output in self._outputs]

    def _run(self, key: GraphKey) -> None:
        """What is captured."""
        for output, result in zip(self._outputs, self._eagerly(key), strict=True):
            output[: len(result)].copy_(result)

    def _make_outputs(self, key: GraphKey) -> None:
        """Run a step once, to see what comes out."""
        most = max(key.rows * key.queries for key in self._keys)
        self._outputs = [result.new_empty(most, *result.shape[1:]) for result in self._eagerly(key)]

    def _eagerly(self, key: GraphKey) -> Sequence[torch.Tensor]:
        tokens = key.rows * key.queries
        return self._forward(self._batch.inputs[:tokens], self._batch.positions[:tokens])

    def _lost_pages(self, slots: IntArray, firsts: IntArray) -> bool:
        """Whether a row's first query, at ``firsts`` [n], would see pages that its window has given back."""
        for group, window in self._windows.items():
            table = self._table.tables[group]
            oldest = np.maximum(firsts - window + 1, 0) // table.page_size
            if (table.pages[slots, oldest] == table.dummy_page).any():
                return True
        return False
