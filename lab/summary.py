"""What an arm did over all its blocks, for people who read tables."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hotswap.lab.metrics import (
    GAPS,
    LATENCIES,
    Slo,
    error_counts,
    failed,
    slip,
    spec_of,
    succeeded,
    summary,
    values_of,
)
from hotswap.lab.processes import BUSY_CORES
from hotswap.lab.records import BlockRecord, RequestRecord

PEAKS = frozenset({"kv_peak_bytes", "rss_peak_bytes"})
"""What engines count that is not added up."""
_RATES = (
    "throughput", "throughput_peak", "requests", "goodput", "hit_rate", "preemptions", "acceptance_length",
    "batch_size", "step_time", "cpu", "kv_peak", "kv_waste", "rss_peak")


def pooled(blocks: Sequence[BlockRecord]) -> BlockRecord:
    """Blocks of one arm as if they had followed upon one another."""
    requests: list[RequestRecord] = []
    engine: dict[str, float] = {}
    begin = 0.0
    for block in blocks:
        requests += (_later(record, begin) for record in block.requests)
        begin += block.wall
        for name, value in block.engine.items():
            known = engine.get(name, 0.0)
            engine[name] = max(known, value) if name in PEAKS else known + value
    cpu = [block.cpu for block in blocks if block.cpu is not None]
    return BlockRecord(blocks[0].arm, 0, 0, begin, tuple(requests), math.fsum(cpu) if cpu else None, engine)


def _later(record: RequestRecord, seconds: float) -> RequestRecord:
    answered = None if record.answered is None else record.answered + seconds
    return replace(
        record, planned=record.planned + seconds, sent=record.sent + seconds, ended=record.ended + seconds,
        answered=answered, chunks=tuple((time + seconds, tokens) for time, tokens in record.chunks))


def describe(blocks: Sequence[BlockRecord], slo: Slo) -> str:
    """A table of latencies, failures beside them, and a list of the rest."""
    whole = pooled(blocks)
    return "\n".join([*_latencies(whole), "", *_rest(whole, slo), *_remarks(blocks, whole)])


def _latencies(whole: BlockRecord) -> Iterator[str]:
    heads = ["min", "mean", "p50", "p90", "p99", "max", "p99 with failures", "failed", "samples"]
    yield f"{'ms':<12}" + "".join(f"{head:>{max(9, len(head) + 2)}}" for head in heads)
    for name in (*LATENCIES, *GAPS):
        found = summary(name, whole.requests)
        if found is None:
            continue
        times = [found.low, found.mean, *found.percentiles.values(), found.high, found.adjusted["p99"]]
        cells = [*map(milliseconds, times), f"{found.error_share:.1%}", str(found.count)]
        yield f"{name:<12}" + "".join(
            f"{cell:>{max(9, len(head) + 2)}}" for head, cell in zip(heads, cells, strict=True))


def _rest(whole: BlockRecord, slo: Slo) -> Iterator[str]:
    values = values_of(whole, slo, _RATES)
    for name, value in values.items():
        yield f"{name:<18} {value:>14,.4g} {spec_of(name).unit}"


def _remarks(blocks: Sequence[BlockRecord], whole: BlockRecord) -> Iterator[str]:
    good, bad = succeeded(whole.requests), failed(whole.requests)
    cut = sum(record.incomplete for record in whole.requests)
    yield f"{'ended well':<18} {len(good):>14,}"
    yield f"{'failed':<18} {len(bad):>14,}" + "".join(
        f"  {status} x {count}" for status, count in error_counts(whole.requests).most_common())
    if cut:
        yield f"{'cut by the window':<18} {cut:>14,}  their tokens inside it count for throughput, and nothing else"
    late = slip(whole)
    if late:
        yield f"{'sent late, most':<18} {late[-1] * 1000:>14,.1f} ms"
    marked = sum((block.disturbed or 0) > BUSY_CORES for block in blocks)
    if marked:
        yield f"{'disturbed blocks':<18} {marked:>14,} of {len(blocks)}: other processes used over {BUSY_CORES} cores"


def milliseconds(seconds: float) -> str:
    return "unbounded" if math.isinf(seconds) else f"{seconds * 1000:,.2f}"
