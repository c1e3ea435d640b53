"""Where the time of a decoding step goes: linear layers, attention, the model's other operators, sampling, what else
the worker does, the control plane as far as it is not hidden behind the worker, and the server.

The engine is that of the config, and runs in this process. Parts are told apart by wrapping them: the calls of the
linear layers and of the attention backend are timed from outside, about 0.3 µs each. What passes no such call, because
it is compiled into one, counts as the model's other operators.
"""

import queue
import random
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.cpu.ceilings import Shapes, gemm_peak, read_bandwidth
from benchmarks.cpu.engine import Setup
from benchmarks.cpu.peers import ADAPTERS, OURS, ROOT, cores, environment
from benchmarks.cpu.subject import RunError, Server, started
from benchmarks.workloads import Item
from hotswap.core.config import load_config
from hotswap.core.engine.build import Built, build_engine
from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import ConfigError
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.deployment import EngineClient
from hotswap.core.interfaces.messages import Verdict
from hotswap.core.interfaces.model import Model
from hotswap.core.modeling import layers
from hotswap.core.request import Request, RequestOutput, SamplingParams
from hotswap.lab.commands.assignments import assignments
from hotswap.lab.metrics import percentile, samples

LINEAR = (layers.ColumnLinear, layers.RowLinear, layers.VocabHead)
STEPS, QUICK_STEPS = 64, 4
EDGE = 2
"""Steps at either end that are left out: there requests begin or end."""
PARTS = ("linear layers", "attention", "other operators", "sampling", "worker, else", "control plane, not hidden")
now = SystemClock().now


class Stopwatch:
    """Seconds by name, a record for each step of the model while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self.steps: list[dict[str, float]] = []
        self.linear = set[Any]()
        """The layers that were called."""
        self._open: dict[str, float] = defaultdict(float)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            try:
                return call(*args, **kwargs)
            finally:
                self._open[name] += now() - begun
        return timed

    def noted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A linear layer's call, which notes the layer."""
        def noted(layer: Any, x: torch.Tensor) -> Any:
            self.linear.add(layer)
            return call(layer, x)
        return noted

    def closes(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` is the last of a step that is timed."""
        def closing(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            finally:
                if self.on:
                    self.steps.append(dict(self._open))
                self._open.clear()
        return closing


class Loop(Observer):
    """What the loop tells of each step while this is ``on``: the worker's durations, and when it was collected."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False
        self.durations: list[dict[str, float]] = []
        self.times: list[float] = []

    @hookimpl
    def hotswap_step_finished(self, verdict: Verdict, time: float) -> None:
        if self.on and verdict.durations:
            self.durations.append(dict(verdict.durations))
            self.times.append(time)


def profiled(
    config: Path, sets: Sequence[str], rows: Sequence[int], context: int, server: bool, quick: bool,
) -> dict[str, Any]:
    """By number of rows: milliseconds of a step by part, and the floor. ConfigError where that cannot be."""
    steps = QUICK_STEPS if quick else STEPS
    built = build_engine(load_config(config, sets), progress=False)
    try:
        loads = {count: _requests(built, count, context, steps) for count in rows}
        floor = Floor.measured(built, quick)
        found: dict[int, dict[str, Any]] = {}
        for count, items in loads.items():
            parts, weight_bytes = _decode(built, items)
            found[count] = {"parts_ms": parts, **floor.at(count, context, weight_bytes)}
    finally:
        built.engine.stop()
    if server:
        for count, step in _served(config, sets, loads, quick).items():
            found[count] |= {"server_ms": step - sum(found[count]["parts_ms"].values())}
    return {"config": built.effective(), "context": context, "read_gb_s": floor.read_gb_s,
            "gemm_gflop_s": floor.gemm_gflop_s, "rows": {str(count): one for count, one in found.items()}}


def _requests(built: Built, rows: int, context: int, steps: int) -> list[Item]:
    """As many, with about ``context`` tokens in the middle of ``steps`` steps in which all of them decode. ConfigError
    where they would not run at once."""
    section = built.resolved.config.scheduler
    if rows > section.max_running:
        raise ConfigError(f"{rows} requests are to decode together, but at most {section.max_running} run", "--rows")
    prompt = max(1, context - steps // 2)
    filling = 1 + rows * prompt // max(1, section.max_batch_tokens - rows)  # steps until the last one's first token
    tokens = steps + 2 * EDGE + 2 * filling
    if prompt + tokens > built.max_model_len:
        raise ConfigError(
            f"requests of {prompt + tokens} tokens are needed, and the context is {built.max_model_len}", "--context")
    draw, vocabulary = random.Random(rows), range(built.facts.vocab_size)
    return [Item(draw.choices(vocabulary, k=prompt), tokens) for _ in range(rows)]


def _decode(built: Built, items: Sequence[Item]) -> tuple[dict[str, float], int]:
    """Milliseconds by part of :data:`PARTS`: medians of the steps in which all of ``items`` decode; and the bytes of
    the weights that such a step multiplies with."""
    watch, loop = Stopwatch(), Loop()

    def switch(on: bool) -> None:
        watch.on = loop.on = on

    with _watched(built, watch, loop):
        _generate(built.engine, items, switch)
    parts = split(loop.durations[EDGE:-EDGE], watch.steps[EDGE:-EDGE], loop.times[EDGE:-EDGE])
    return parts, sum(map(_weight_bytes, watch.linear))


def _weight_bytes(layer: Any) -> int:
    """A head that shares the embedding's table has none of its own."""
    return int(layer.linear.nbytes or layer.tied.weight.nbytes)


def split(
    durations: Sequence[Mapping[str, float]], timed: Sequence[Mapping[str, float]], times: Sequence[float],
) -> dict[str, float]:
    """Milliseconds by part, which add up to the median time between two steps. ``durations``: what the worker tells of
    each step; ``timed``: what the stopwatch does; ``times``: when it was collected. Seconds."""
    told = {name: _median(durations, name) for name in ("prepare", "propose", "forward", "sample", "observe")}
    linear, head, attention, plan = (_median(timed, name) for name in ("linear", "head", "attention", "plan"))
    step = statistics.median(after - before for before, after in pairwise(times))
    values = (
        linear + head, attention + plan, told["forward"] - linear - attention, told["sample"] - head,
        told["prepare"] + told["propose"] + told["observe"] - plan, step - sum(told.values()))
    return {name: 1e3 * value for name, value in zip(PARTS, values, strict=True)}


def _median(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(step.get(name, 0.0) for step in steps)


@contextmanager
def _watched(built: Built, watch: Stopwatch, loop: Loop) -> Iterator[None]:
    """The stopwatch around the worker's parts, and the observer at the loop. ConfigError where there are several."""
    if len(built.engines) > 1 or len(built.ranks()) > 1:
        raise ConfigError("a step is looked into where one engine of one rank runs it, in this process", "parallel")
    one = built.engines[0]
    parts: dict[str, Any] = {component.kind: component for component in one.components}
    model, attention = parts["model"], one.made.parts.attention
    with ExitStack() as stack:
        for kind in LINEAR:
            name = "head" if kind is layers.VocabHead else "linear"
            stack.enter_context(mock.patch.object(kind, "__call__", watch.noted(watch.timed(name, kind.__call__))))
        for name, method in (("attention", "run"), ("plan", "plan")):
            stack.enter_context(mock.patch.object(attention, method, watch.timed(name, getattr(attention, method))))
        stack.enter_context(mock.patch.object(model, "head", watch.closes(model.head)))
        one.engine.call(lambda: one.components.add(loop))
        try:
            yield
        finally:
            one.engine.call(lambda: one.components.remove(loop))


def _generate(engine: EngineClient, items: Sequence[Item], switch: Callable[[bool], None]) -> None:
    """``switch`` hears when all have a token, and when the first has its last."""
    begun, ended = set[str](), queue.SimpleQueue[RequestOutput]()

    def hear(output: RequestOutput) -> None:
        if output.token_ids and output.request_id not in begun:
            begun.add(output.request_id)
            switch(len(begun) == len(items))
        if output.finish_reason is not None:
            switch(False)
            ended.put(output)

    for index, item in enumerate(items):
        sampling = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
        engine.add(Request(f"profile-{len(items)}-{index}", item.prompt, sampling), hear)
    for _ in items:
        if (error := ended.get().error) is not None:
            raise RunError(f"a request failed: {error}")


@dataclass(frozen=True)
class Floor:
    """What a step takes at least: the weights and the cached tokens are read, or the products are computed."""

    token_bytes: int
    parameters: int
    read_gb_s: float
    gemm_gflop_s: float

    @classmethod
    def measured(cls, built: Built, quick: bool) -> "Floor":
        model = next(component for component in built.components if isinstance(component, Model))
        dtype = getattr(model, "dtype", torch.float32)
        return cls(
            sum(spec.bytes_per_token for spec in model.cache_specs()),
            Shapes.of(built.checkpoint.config).parameters, read_bandwidth(quick), gemm_peak(dtype, quick))

    def at(self, rows: int, context: int, weight_bytes: int) -> dict[str, float]:
        """Milliseconds of a step that reads so many bytes of weights."""
        weights, cache = (1e3 * size / (1e9 * self.read_gb_s) for size in (
            weight_bytes, self.token_bytes * rows * context))
        compute = 1e3 * 2 * rows * self.parameters / (1e9 * self.gemm_gflop_s)
        return {"weights_ms": weights, "cache_ms": cache, "compute_ms": compute,
                "floor_ms": max(weights + cache, compute)}


def _served(
    config: Path, sets: Sequence[str], loads: Mapping[int, Sequence[Item]], quick: bool,
) -> dict[int, float]:
    """By number of streams: the median time between two tokens of one, in milliseconds, over HTTP."""
    setup = Setup(str(config), cores(), assignments("--set", sets))
    with tempfile.TemporaryDirectory(prefix="hotswap-profile-") as folder, started(
        "http", f"{ADAPTERS}.{OURS}", setup, sys.executable, environment(ROOT), Path(folder) / "log",
    ) as server:
        assert isinstance(server, Server)
        server.measure("warm-up", 0, quick)
        found = {}
        for count, items in loads.items():
            block = server.drive(f"profile-{count}", items, count)
            found[count] = 1e3 * percentile(samples("itl", block.requests), 0.5)
        return found


def told(found: Mapping[str, Any]) -> str:
    rows: Mapping[str, Any] = found["rows"]
    head = ["ms a step", *(f"{count} rows" for count in rows)]
    lines = [[part, *(f"{one['parts_ms'][part]:.2f}" for one in rows.values())] for part in PARTS]
    steps = [sum(one["parts_ms"].values()) for one in rows.values()]
    lines += [
        ["**a step**", *(f"**{step:.2f}**" for step in steps)],
        ["server, besides", *(f"{one['server_ms']:.2f}" if "server_ms" in one else "–" for one in rows.values())],
        ["floor: weights", *(f"{one['weights_ms']:.2f}" for one in rows.values())],
        ["floor: cached tokens", *(f"{one['cache_ms']:.2f}" for one in rows.values())],
        ["floor: products", *(f"{one['compute_ms']:.2f}" for one in rows.values())],
        ["a step / floor", *(f"{step / one['floor_ms']:.2f}" for step, one in zip(steps, rows.values(), strict=True))],
    ]
    return "\n".join([
        f"{found['context']} tokens of context; memory is read at {found['read_gb_s']:.1f} GB/s, products run at "
        f"{found['gemm_gflop_s']:.0f} GFLOP/s", "",
        *(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))])
