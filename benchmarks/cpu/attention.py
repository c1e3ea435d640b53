"""Attention of one step on the CPU, backend against backend in turns, beside the floor that memory sets.

    python benchmarks/cpu/attention.py [--quick] [--dtype bfloat16] [--backends torch,cpu] [--out FILE]

Each case is a step of a model of SmolLM2-135M's shape: 30 layers with pages of their own, in random order. Milliseconds
of all layers, plan included; medians over rounds in which every backend has its turn, in an order that changes. The
floor is the bytes of keys and values that a step must read, over the bandwidth that the same run measures; for prompts
it is not the memory that binds, and none is given.
"""

import argparse
import json
import random
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ceilings import read_bandwidth
from tqdm import tqdm

from hotswap.core.engine.clock import SystemClock
from hotswap.core.execution.layout import batch_layout
from hotswap.core.interfaces.attention import AttentionBackend, BatchLimits, GroupShape
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry

HEADS, KV_HEADS, HEAD_DIM, LAYERS, PAGE = 9, 3, 64, 30, 16
now = SystemClock().now


@dataclass(frozen=True)
class Case:
    """``rows``: (queries, tokens before them) each."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def decodes(self) -> bool:
        return all(queries == 1 for queries, _ in self.rows)

    def kv_bytes(self, itemsize: int) -> int:
        tokens = sum(queries + past for queries, past in self.rows)
        return 2 * KV_HEADS * HEAD_DIM * LAYERS * itemsize * tokens


def cases(quick: bool) -> list[Case]:
    mixed = random.Random(0)
    uneven = tuple((1, mixed.randrange(32, 418)) for _ in range(64))  # 225 on average
    if quick:
        return [Case("2 decodes at 40", ((1, 39),) * 2), Case("a prompt of 40", ((40, 0),))]
    return [
        *(Case(f"{rows} decodes at {length}", ((1, length - 1),) * rows)
          for rows, length in ((1, 225), (8, 200), (8, 4000), (64, 225), (32, 1088))),
        Case("64 decodes at 32 to 418", uneven),
        Case("8 verifications of 4 at 225", ((4, 221),) * 8),
        Case("a prompt of 128", ((128, 0),)), Case("a prompt of 512", ((512, 0),)),
        Case("a chunk of 512 behind 3500", ((512, 3500),)),
        Case("a chunk of 256 beside 32 decodes at 225", ((256, 256), *((1, 224),) * 32)),
        Case("a chunk of 64 beside 64 decodes at 300", ((64, 256), *((1, 299),) * 64)),
    ]


class Bench:
    """One case's tensors, the same for every backend, in pages as ``backend`` allocates them for an engine."""

    def __init__(self, case: Case, dtype: str, layers: int, backend: AttentionBackend) -> None:
        self.case, self.layers = case, layers
        queries, past = (np.array(column) for column in zip(*case.rows, strict=True))
        counts = -(-(queries + past) // PAGE)
        pages = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32) + 1
        table = np.zeros((len(counts), int(counts.max())), np.int32)
        for row, (begin, count) in enumerate(zip(np.cumsum(counts) - counts, counts, strict=True)):
            table[row, :count] = pages[begin : begin + count]
        self.layout = batch_layout(queries, past, {"group": (table, PAGE)}, "cpu")
        self.limits = BatchLimits(int(queries.sum()), len(queries), table.shape[1], "cpu", dtype)
        self.shape = GroupShape(HEADS, KV_HEADS, HEAD_DIM, PAGE, HEAD_DIM**-0.5)
        self.caches = [backend.allocate(self.shape, len(pages) + 1, self.limits) for _ in range(layers)]
        for tensor in (tensor for cache in self.caches for tensor in cache):
            tensor.normal_()
        qkv = torch.randn(int(queries.sum()), HEADS + 2 * KV_HEADS, HEAD_DIM).to(getattr(torch, dtype))
        self.q, self.k, self.v = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
        self.out = torch.empty_like(self.q, memory_format=torch.contiguous_format)

    def step(self, backend: AttentionBackend, state: Any) -> None:
        backend.plan(state, self.layout)
        for cache in self.caches:
            backend.run(state, self.q, self.k, self.v, cache, self.out)


def measure(case: Case, backends: dict[str, AttentionBackend], dtype: str, rounds: int, layers: int) -> dict[str, Any]:
    """By backend the milliseconds of each round, of all layers; and how far the results lie apart."""
    bench = Bench(case, dtype, layers, list(backends.values())[-1])
    states = {name: backend.bind("group", bench.shape, bench.limits) for name, backend in backends.items()}
    outputs: dict[str, torch.Tensor] = {}
    times: dict[str, list[float]] = {name: [] for name in backends}
    order = list(backends)
    with torch.inference_mode():
        for turn in range(rounds + 1):  # the first warms up
            random.Random(turn).shuffle(order)
            for name in order:
                began = now()
                bench.step(backends[name], states[name])
                if turn:
                    times[name].append((now() - began) * 1e3 * LAYERS / layers)
                outputs[name] = bench.out.float().clone()
    first, *others = outputs.values()
    apart = max([float((first - other).norm() / first.norm()) for other in others], default=0.0)
    return {"times_ms": times, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layer and small cases: does all of it run?")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--backends", default="torch,cpu", help="the first is what the others are compared with")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--out", type=Path, help="a JSON file")
    chosen = parser.parse_args()
    registry = Registry()
    backends: dict[str, Any] = {
        name: registry.build("attention", ComponentRef(use=name), "attention") for name in chosen.backends.split(",")}
    speed, itemsize = 1e9 * read_bandwidth(chosen.quick), getattr(torch, chosen.dtype).itemsize
    print(f"{torch.get_num_threads()} threads, {chosen.dtype}, memory read at {speed / 1e9:.1f} GB/s")
    names = list(backends)
    print(f"{'step':42}" + "".join(f"{name:>24}" for name in names) + f"{'ratio':>8}{'floor':>8}{'apart':>10}")
    results = []
    found = [case for case in cases(chosen.quick) if chosen.only in case.name]
    for case in tqdm(found, "cases", leave=False, disable=None):
        rounds, layers = (2, 1) if chosen.quick else (chosen.rounds, LAYERS)
        result = measure(case, backends, chosen.dtype, rounds, layers)
        floor = case.kv_bytes(itemsize) / speed * 1e3 if case.decodes else None
        results.append({**asdict(case), **result, "floor_ms": floor})
        tqdm.write(_line(case.name, result, floor))
    if chosen.out:
        chosen.out.write_text(json.dumps({"bytes_per_s": speed, "dtype": chosen.dtype, "cases": results}, indent=1))


def _line(name: str, result: dict[str, Any], floor: float | None) -> str:
    """Median (least–most) of each, the ratio of the first to the last, the floor, how far the results lie apart."""
    times = result["times_ms"]
    median: dict[str, float] = {backend: statistics.median(values) for backend, values in times.items()}
    shown = [f"{median[b]:8.2f} ({min(times[b]):.2f}–{max(times[b]):.2f})" for b in times]
    first, *_, last = median.values()
    return (
        f"{name:42}" + "".join(f"{text:>24}" for text in shown) + f"{first / last:8.1f}"
        + (f"{floor:8.2f}" if floor is not None else f"{'–':>8}") + f"{result['apart']:10.1e}")


if __name__ == "__main__":
    main()
