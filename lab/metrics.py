"""From a block's records to its metrics. Each has its formula, which the report prints.

A failure is no latency, and yet no good news either. What arms are compared by takes it for one without end, so that
nobody looks fast by dropping what is slow. In tables of one arm percentiles of successes stand beside those, with the
share of failures.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hotswap.lab.records import Better, BlockRecord, MetricSpec, RequestRecord

PEAK_S = 1.0
"""Peak throughput is that of the best second."""
LOWER, HIGHER = Better.LOWER, Better.HIGHER


def percentile(values: Sequence[float], share: float) -> float:
    """Of ``values`` in rising order, between neighbours by distance; never outside of them, infinity included."""
    place = share * (len(values) - 1)
    low = math.floor(place)
    below, above = values[low], values[min(low + 1, len(values) - 1)]
    if below == above or place == low:
        return below
    return min(above, below + (above - below) * (place - low))


def succeeded(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [record for record in requests if record.error is None and not record.incomplete]


def failed(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [record for record in requests if record.error is not None]


# of one request, in seconds; None where it has none


def ttft(record: RequestRecord) -> float | None:
    return record.chunks[0][0] - record.planned if record.chunks else None


def ttft_answer(record: RequestRecord) -> float | None:
    return None if record.answered is None else record.answered - record.planned


def tpot(record: RequestRecord) -> float | None:
    if record.output_tokens < 2 or len(record.chunks) < 2:
        return None
    return (record.chunks[-1][0] - record.chunks[0][0]) / (record.output_tokens - 1)


def e2e(record: RequestRecord) -> float | None:
    return record.ended - record.planned


def queue_time(record: RequestRecord) -> float | None:
    return record.queued


def inter_chunk(record: RequestRecord) -> Iterator[float]:
    times = [time for time, _ in record.chunks]
    return (after - before for before, after in zip(times, times[1:], strict=False))


def inter_token(record: RequestRecord) -> Iterator[float]:
    """Tokens that came together share the time since the delivery before. A delivery without a token, such as text that
    was held back, gives its time to the next one that has some."""
    since = 0.0
    for gap, (_, tokens) in zip(inter_chunk(record), record.chunks[1:], strict=True):
        since += gap
        if tokens:
            yield from [since / tokens] * tokens
            since = 0.0


Latency = Callable[[RequestRecord], float | None]
LATENCIES: Mapping[str, tuple[Latency, str]] = {
    "ttft": (ttft, "first delivery (answer, reasoning or tool call) - planned start"),
    "ttft_answer": (ttft_answer, "first delivery of the answer itself - planned start"),
    "tpot": (tpot, "(last delivery - first) / (output tokens - 1), by usage"),
    "e2e": (e2e, "end - planned start"),
    "queue": (queue_time, "first step - arrival at the engine"),
}
GAPS: Mapping[str, tuple[Callable[[RequestRecord], Iterator[float]], str]] = {
    "itl": (inter_token, "time between tokens; those of one delivery share the time since the one before"),
    "inter_chunk": (inter_chunk, "time between deliveries, however many tokens they have"),
}
ADDITIVE = "queue"
"""It may be next to nothing, of which no percentage makes sense."""
STATISTICS: Mapping[str, float] = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True)
class Slo:
    """Most seconds that a good request may take, by latency's name."""

    limits: Mapping[str, float]

    def met(self, record: RequestRecord) -> bool:
        """A limit on what a request does not have, such as TPOT of one token, is kept."""
        found = ((LATENCIES[name][0](record), most) for name, most in self.limits.items())
        return all(value is None or value <= most for value, most in found)


@dataclass(frozen=True)
class Summary:
    """Of one latency. ``adjusted``: the percentiles with failures as infinitely slow."""

    count: int
    low: float
    mean: float
    high: float
    percentiles: Mapping[str, float]
    adjusted: Mapping[str, float]
    error_share: float


def summary(name: str, requests: Sequence[RequestRecord]) -> Summary | None:
    """None where no request that succeeded has such a latency."""
    values = samples(name, requests)
    if not values:
        return None
    good, bad = succeeded(requests), failed(requests)
    share = len(bad) / (len(good) + len(bad))
    endless = round(len(values) * len(bad) / len(good))  # a request may have many gaps: a failure counts as any other
    return Summary(
        len(values), values[0], min(max(math.fsum(values) / len(values), values[0]), values[-1]), values[-1],
        {label: percentile(values, q) for label, q in STATISTICS.items()},
        {label: percentile([*values, *[math.inf] * endless], q) for label, q in STATISTICS.items()}, share)


def samples(name: str, requests: Iterable[RequestRecord]) -> list[float]:
    """All values of a latency among the requests that succeeded, in rising order."""
    good = succeeded(requests)
    if name in GAPS:
        return sorted(gap for record in good for gap in GAPS[name][0](record))
    values = (LATENCIES[name][0](record) for record in good)
    return sorted(value for value in values if value is not None)


# of a block


def delivered(block: BlockRecord) -> Iterator[tuple[float, int]]:
    """(time, tokens) of what came inside the block, from requests that did not fail; those that were under way when it
    closed included."""
    for record in block.requests:
        if record.error is None:
            yield from (chunk for chunk in record.chunks if chunk[0] <= block.wall)


def throughput(block: BlockRecord) -> float:
    return sum(tokens for _, tokens in delivered(block)) / block.wall if block.wall else 0.0


def peak_throughput(block: BlockRecord) -> float:
    """The block in equal parts of about a second: the best of them is no worse than their mean, which is all of it."""
    if not block.wall:
        return 0.0
    parts = max(1, round(block.wall / PEAK_S))
    bins = [0] * parts
    for time, tokens in delivered(block):
        bins[min(parts - 1, max(0, int(time / block.wall * parts)))] += tokens
    return max(throughput(block), max(bins) / (block.wall / parts))


def slip(block: BlockRecord) -> list[float]:
    """Seconds by which requests left later than planned, in rising order."""
    return sorted(record.sent - record.planned for record in block.requests)


def error_counts(requests: Iterable[RequestRecord]) -> Counter[str]:
    """Failures by status, "HTTP 503" and the like."""
    return Counter((record.error or "").partition(":")[0] for record in failed(requests))


def hit_rate(requests: Iterable[RequestRecord]) -> float | None:
    """None where the target does not tell."""
    known = [record for record in succeeded(requests) if record.cached_tokens is not None]
    prompt = sum(record.prompt_tokens for record in known)
    return sum(record.cached_tokens or 0 for record in known) / prompt if prompt else None


def _preemptions(block: BlockRecord, slo: Slo) -> float | None:
    good = succeeded(block.requests)
    if good and "preemptions" in block.engine:  # a server tells of all of them together
        return block.engine["preemptions"] / len(good)
    known = [record.preemptions for record in good if record.preemptions is not None]
    return sum(known) / len(known) if known else None


def _acceptance(block: BlockRecord, slo: Slo) -> float | None:
    rows = block.engine.get("drafted_rows", 0)
    return 1 + block.engine.get("accepted_drafts", 0) / rows if rows else None


def _told_queue(block: BlockRecord) -> float | None:
    """Of a server that tells of all requests together."""
    count = block.engine.get("queued_requests")
    return block.engine["queue_seconds"] / count if count else None


def _ratio(part: str, whole: str) -> Callable[[BlockRecord, Slo], float | None]:
    def value(block: BlockRecord, slo: Slo) -> float | None:
        return block.engine.get(part, 0.0) / block.engine[whole] if block.engine.get(whole) else None
    return value


def _errors(block: BlockRecord, slo: Slo) -> float | None:
    good, bad = len(succeeded(block.requests)), len(failed(block.requests))
    return bad / (good + bad) if good + bad else None


def _goodput(block: BlockRecord, slo: Slo) -> float | None:
    good = sum(slo.met(record) for record in succeeded(block.requests))
    return good / block.wall if slo.limits and block.wall else None


Value = Callable[[BlockRecord, Slo], float | None]
_OTHERS: Sequence[tuple[MetricSpec, Value]] = [
    (MetricSpec("throughput", "tokens/s", HIGHER, "output tokens delivered in the block, by requests that did not fail "
                "/ its wall time"), lambda block, slo: throughput(block)),
    (MetricSpec("throughput_peak", "tokens/s", HIGHER, "the same of the best of the block's parts of about 1 s"),
     lambda block, slo: peak_throughput(block)),
    (MetricSpec("requests", "requests/s", HIGHER, "requests that succeeded / wall time"),
     lambda block, slo: len(succeeded(block.requests)) / block.wall if block.wall else None),
    (MetricSpec("goodput", "requests/s", HIGHER, "requests that succeeded within every SLO / wall time", additive=True),
     _goodput),
    (MetricSpec("errors", "share", LOWER, "failed and cut requests / those that ended", additive=True), _errors),
    (MetricSpec("hit_rate", "share", HIGHER, "prompt tokens found in the cache / prompt tokens", additive=True),
     lambda block, slo: hit_rate(block.requests)),
    (MetricSpec("preemptions", "a request", LOWER, "suspensions of running requests / requests that succeeded",
                additive=True), _preemptions),
    (MetricSpec("acceptance_length", "tokens", HIGHER, "1 + accepted drafts / rows that had drafts"), _acceptance),
    (MetricSpec("step_time", "s", LOWER, "the worker's time in steps / steps"), _ratio("step_seconds", "steps")),
    (MetricSpec("batch_size", "rows", HIGHER, "rows / steps"), _ratio("rows", "steps")),
    (MetricSpec("cpu", "s", LOWER, "CPU time of the processes of engine and load generator, or of the server's where "
                "it has its own, in the block"), lambda block, slo: block.cpu),
    (MetricSpec("kv_peak", "bytes", LOWER, "most bytes of cache pages that requests held; of a server, since its start",
                additive=True), lambda block, slo: block.engine.get("kv_peak_bytes")),
    (MetricSpec("kv_waste", "share", LOWER, "places for tokens in running requests' pages that hold none / all of them",
                additive=True), _ratio("kv_empty_slots", "kv_slots")),
    (MetricSpec("rss_peak", "bytes", LOWER, "most memory of the server's processes, since its start"),
     lambda block, slo: block.engine.get("rss_peak_bytes")),
]


def _latency_specs() -> Iterator[tuple[MetricSpec, Value]]:
    formulas = {name: formula for name, (_, formula) in [*LATENCIES.items(), *GAPS.items()]}
    for name, formula in formulas.items():
        additive = name == ADDITIVE
        for label in ("mean", *STATISTICS):
            failures = "none in a block with failures" if additive else "a failure is without end"
            spec = MetricSpec(f"{name}_{label}", "s", LOWER, f"{label} of: {formula}; {failures}", additive)
            yield spec, _latency_value(name, label)


def _latency_value(name: str, label: str) -> Value:
    """Differences of what is without end say nothing: additive ones are withheld where requests failed."""
    def value(block: BlockRecord, slo: Slo) -> float | None:
        if name == ADDITIVE and failed(block.requests):
            return None
        found = summary(name, block.requests)
        if found is None:
            return _told_queue(block) if (name, label) == (ADDITIVE, "mean") else None
        if label == "mean":
            return math.inf if found.error_share else found.mean
        return found.adjusted[label]
    return value


_ALL: Mapping[str, tuple[MetricSpec, Value]] = {
    spec.name: (spec, value) for spec, value in [*_latency_specs(), *_OTHERS]}

METRICS: Sequence[MetricSpec] = [spec for spec, _ in _ALL.values()]
"""All that a block can tell."""

COMPARED = (
    "ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_mean", "tpot_p50", "tpot_p90", "tpot_p99", "itl_p50",
    "itl_p99", "e2e_mean", "e2e_p50", "e2e_p90", "e2e_p99", "queue_mean", "throughput", "requests", "goodput",
    "hit_rate", "preemptions", "acceptance_length", "step_time", "cpu", "kv_peak", "rss_peak", "errors",
)
"""What an experiment compares unless it says otherwise: each more costs all of them some certainty."""


def spec_of(name: str) -> MetricSpec:
    return _ALL[name][0]


def values_of(block: BlockRecord, slo: Slo, names: Iterable[str] = tuple(_ALL)) -> dict[str, float]:
    """The metrics that the block can give, by name."""
    found = ((name, _ALL[name][1](block, slo)) for name in names)
    return {name: value for name, value in found if value is not None}
