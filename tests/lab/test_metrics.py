"""Every metric of one small block, computed by hand."""

from dataclasses import replace

import pytest

from hotswap.lab.metrics import METRICS, Slo, slip, summary, values_of
from hotswap.lab.records import BlockRecord, RequestRecord

LATE = RequestRecord(
    0, planned=1.0, sent=1.5, chunks=((2.0, 1), (2.5, 2), (4.0, 2)), ended=4.25, prompt_tokens=10, output_tokens=5,
    cached_tokens=4, queued=0.25, preemptions=1, answered=2.5)
PROMPT = RequestRecord(
    1, planned=3.0, sent=3.0, chunks=((3.5, 1), (5.5, 1)), ended=5.5, prompt_tokens=30, output_tokens=2,
    cached_tokens=6, queued=0.75, preemptions=0, answered=3.5)
ENGINE = {"steps": 4, "rows": 10, "step_seconds": 3.0, "drafted_rows": 8, "accepted_drafts": 12,
          "kv_peak_bytes": 4096.0, "kv_slots": 80, "kv_empty_slots": 20, "rss_peak_bytes": 1e6}
BLOCK = BlockRecord("arm", 0, 0, 8.0, (LATE, PROMPT), cpu=6.0, engine=ENGINE)
BY_HAND = {
    "ttft": (1.0, 0.5), "ttft_answer": (1.5, 0.5), "tpot": (2.0 / 4, 2.0 / 1), "e2e": (3.25, 2.5),
    "queue": (0.25, 0.75), "itl": (0.25, 0.25, 0.75, 0.75, 2.0), "inter_chunk": (0.5, 1.5, 2.0)}
OF_THE_BLOCK = {
    "throughput": 7 / 8, "throughput_peak": 3.0, "requests": 2 / 8, "goodput": 1 / 8, "errors": 0.0,
    "hit_rate": 10 / 40, "preemptions": 1 / 2, "acceptance_length": 1 + 12 / 8, "step_time": 3.0 / 4,
    "batch_size": 10 / 4, "cpu": 6.0, "kv_peak": 4096.0, "kv_waste": 20 / 80, "rss_peak": 1e6}


def between(values, share):
    """The percentile of ``values``, between neighbours by distance."""
    values = sorted(values)
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def test_every_metric_is_what_its_formula_says():
    told = values_of(BLOCK, Slo({"ttft": 0.75}))
    expected = dict(OF_THE_BLOCK)
    for name, values in BY_HAND.items():
        expected |= {f"{name}_mean": sum(values) / len(values), **{
            f"{name}_{label}": between(values, share) for label, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))}}
    assert told == pytest.approx(expected)
    assert told.keys() == {spec.name for spec in METRICS}, "each has been computed"


def test_what_a_request_waited_for_at_the_client_is_in_its_latency_and_in_the_slip():
    prompt = replace(LATE, planned=1.5)
    for name in ("ttft", "ttft_answer", "e2e"):
        late, sent_at_once = (summary(name, [one]).mean for one in (LATE, prompt))
        assert late == sent_at_once + 0.5
    assert slip(BLOCK) == [0.0, 0.5]


def test_percentiles_of_a_hundred_and_one_values_are_their_numbers():
    requests = [replace(PROMPT, index=n, planned=0.0, sent=0.0, ended=float(n)) for n in range(101)]
    assert summary("e2e", requests).percentiles == pytest.approx({"p50": 50, "p90": 90, "p99": 99})


def test_a_server_tells_of_waits_and_suspensions_of_all_requests_together():
    silent = tuple(replace(record, queued=None, preemptions=None) for record in BLOCK.requests)
    block = replace(BLOCK, requests=silent, engine={"queue_seconds": 3.0, "queued_requests": 4, "preemptions": 5})
    told = values_of(block, Slo({}), ("queue_mean", "queue_p50", "preemptions"))
    assert told == {"queue_mean": 0.75, "preemptions": 5 / 2}
