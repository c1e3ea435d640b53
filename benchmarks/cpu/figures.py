"""From what came back to figures, and from the figures of many rounds to medians and ratios."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hotswap.lab.metrics import Slo, values_of
from hotswap.lab.processes import BUSY_CORES
from hotswap.lab.records import Better, BlockRecord, RequestRecord

LATENCIES = ("ttft_p50", "ttft_p99", "tpot_p50", "itl_p50", "itl_p99")
"""Told in milliseconds; their formulas are those of ``lab/metrics.py``."""


class Figure(NamedTuple):
    title: str
    better: Better


FIGURES: Mapping[str, Figure] = {
    "ready_s": Figure("start to ready, s", Better.LOWER),
    "wall_s": Figure("time, s", Better.LOWER),
    "out_tok_s": Figure("output tok/s", Better.HIGHER),
    "total_tok_s": Figure("all tok/s", Better.HIGHER),
    "decode_tok_s": Figure("decode tok/s", Better.HIGHER),
    "req_s": Figure("requests/s", Better.HIGHER),
    "ttft_p50_ms": Figure("TTFT p50, ms", Better.LOWER),
    "ttft_p99_ms": Figure("TTFT p99, ms", Better.LOWER),
    "tpot_p50_ms": Figure("TPOT p50, ms", Better.LOWER),
    "itl_p50_ms": Figure("ITL p50, ms", Better.LOWER),
    "itl_p99_ms": Figure("ITL p99, ms", Better.LOWER),
    "cpu_us_tok": Figure("CPU µs/token", Better.LOWER),
    "client_us_tok": Figure("client's CPU µs/token", Better.LOWER),
    "idle_percent": Figure("idle CPU, %", Better.LOWER),
    "memory_mib": Figure("peak MiB", Better.LOWER),
}

HEADLINES = {
    "start": "ready_s", "start-http": "ready_s", "single": "tpot_p50_ms", "batch8": "decode_tok_s",
    "mixed": "out_tok_s", "prefix": "wall_s", "offline16": "out_tok_s", "http": "out_tok_s", "idle": "idle_percent",
}
"""What engines are compared by, per load."""


@dataclass(frozen=True)
class Run:
    """One load on one engine, once. ``face``: offline or http. ``others``: cores that other processes used meanwhile;
    None where the machine does not tell."""

    engine: str
    face: str
    load: str
    round: int
    figures: Mapping[str, float] = field(default_factory=dict)
    others: float | None = None
    error: str | None = None

    @property
    def disturbed(self) -> bool:
        return self.others is not None and self.others > BUSY_CORES

    @property
    def counts(self) -> bool:
        return self.error is None and not self.disturbed


class Spread(NamedTuple):
    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None where there are none."""
        return cls(statistics.median(values), min(values), max(values), len(values)) if values else None


def figures_of(block: BlockRecord) -> dict[str, float]:
    """Of a load all of whose requests succeeded."""
    requests, wall = block.requests, block.wall
    prompt, output = sum(r.prompt_tokens for r in requests), sum(r.output_tokens for r in requests)
    found = {
        "wall_s": wall, "out_tok_s": output / wall, "total_tok_s": (prompt + output) / wall,
        "req_s": len(requests) / wall}
    if span := _decoding(requests):
        found["decode_tok_s"] = (output - len(requests)) / span
    latencies = values_of(block, Slo({}), LATENCIES)
    return found | {f"{name}_ms": 1e3 * value for name, value in latencies.items()}


def _decoding(requests: Sequence[RequestRecord]) -> float:
    """Seconds from the first token of all to the last; later prompts lie between them."""
    return max(r.chunks[-1][0] for r in requests) - min(r.chunks[0][0] for r in requests)


def spread_of(runs: Iterable[Run], engine: str, load: str, figure: str) -> Spread | None:
    """Over the runs that count."""
    return Spread.of([
        run.figures[figure] for run in runs
        if (run.engine, run.load) == (engine, load) and run.counts and figure in run.figures])


def share_of_offline(runs: Iterable[Run], engine: str) -> Spread | None:
    """Output tokens/s through the engine's server, as a part of what it gives to the same requests without: round by
    round."""
    by_load: dict[str, dict[int, float]] = {"http": {}, "offline16": {}}
    for run in runs:
        if run.engine == engine and run.load in by_load and run.counts:
            by_load[run.load][run.round] = run.figures["out_tok_s"]
    http, offline = by_load["http"], by_load["offline16"]
    return Spread.of([http[number] / offline[number] for number in sorted(http.keys() & offline.keys())])


def ratio_of(runs: Iterable[Run], first: str, second: str, load: str, figure: str) -> Spread | None:
    """How many times as good ``first`` is as ``second``: round by round, where the runs of both count."""
    by_round: dict[str, dict[int, float]] = {first: {}, second: {}}
    for run in runs:
        if run.load == load and run.engine in by_round and run.counts and figure in run.figures:
            by_round[run.engine][run.round] = run.figures[figure]
    ours, theirs = by_round[first], by_round[second]
    ratios = [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]
    if FIGURES[figure].better is Better.LOWER:
        ratios = [1 / ratio for ratio in ratios]
    return Spread.of(ratios)
