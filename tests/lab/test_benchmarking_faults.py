"""What benchmark tools have got wrong: each fault with a stub server whose right numbers are known."""

import contextlib
import functools
import math
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotswap.lab.load import ClosedLoop, OpenLoop
from hotswap.lab.metrics import (
    METRICS,
    Slo,
    error_counts,
    failed,
    peak_throughput,
    percentile,
    slip,
    spec_of,
    succeeded,
    summary,
    throughput,
    values_of,
)
from hotswap.lab.records import BlockRecord, Outcome, Pair, RequestRecord
from hotswap.lab.statistics import Settings, analyse

NO_SLO = Slo({})


quick = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def undisturbed(test):
    """Measured times are right on a machine that has time for them: the best of four attempts counts. What is computed
    wrongly is wrong in all of them."""
    @functools.wraps(test)
    def attempts(*args, **kwargs):
        for _ in range(3):
            with contextlib.suppress(AssertionError):
                return test(*args, **kwargs)
        return test(*args, **kwargs)
    return attempts


def about(expected, slack):
    return pytest.approx(expected, abs=slack)


@undisturbed
def test_a_chunk_of_four_tokens_is_not_a_token(stub, measure):
    def script(reply):
        reply.begin()
        begin = time.perf_counter()
        for chunk in range(10):
            time.sleep(max(0, begin + 0.02 * chunk - time.perf_counter()))
            reply.say(4)
        reply.end()

    stub.script = script
    block = measure(1, ClosedLoop(1))
    values = values_of(block, NO_SLO)
    assert block.requests[0].output_tokens == 40
    assert values["tpot_p50"] == about(0.180 / 39, 0.001)
    assert values["inter_chunk_p50"] == about(0.020, 0.004)
    assert values["itl_p50"] == about(0.005, 0.001)


def test_text_without_a_token_gives_its_time_to_the_next_token():
    """A server may hold text back, and send it without a token; or cut a token's text in two."""
    chunks = ((1.0, 1), (1.1, 0), (1.4, 2), (1.5, 0))
    block = BlockRecord("base", 0, 0, 2.0, (RequestRecord(0, 0.0, 0.0, chunks, 1.5, 4, 3),))
    values = values_of(block, NO_SLO)
    assert values["itl_p50"] == values["itl_p99"] == pytest.approx(0.2)
    assert values["tpot_p50"] == pytest.approx(0.25)


def test_more_deliveries_than_tokens_are_measured(stub, measure):
    def script(reply):
        reply.begin()
        for _ in range(4):
            reply.say(0, text="x")
        reply.tokens = 2
        reply.end()

    stub.script = script
    block = measure(2, ClosedLoop(1))
    assert [record.output_tokens for record in block.requests] == [2, 2]
    assert values_of(block, NO_SLO)["itl_mean"] >= 0


@undisturbed
def test_an_open_loop_counts_from_the_planned_start_and_reports_the_slip(stub, measure):
    slot = threading.Lock()

    def script(reply):
        with slot:
            time.sleep(0.05)
        reply.begin()
        reply.say()
        reply.end()

    stub.script = script
    one_at_a_time = OpenLoop(rate=40, arrivals="constant", limit=1)
    for load, late in ((OpenLoop(rate=40, arrivals="constant"), 0.0), (one_at_a_time, 0.475)):
        block = measure(20, load)
        assert summary("e2e", block.requests).mean == about(0.2875, 0.15)  # request k, from 0, waits k times 25 ms
        assert slip(block)[-1] == about(late, 0.25)


@undisturbed
def test_reasoning_counts_for_the_first_delivery_and_not_for_the_first_of_the_answer(stub, measure):
    def script(reply):
        reply.begin()
        reply.say(0, delta={"role": "assistant", "content": ""})
        time.sleep(0.1)
        reply.say(1, delta={"reasoning_content": "hm"})
        time.sleep(0.3)
        reply.say(1, delta={"content": "yes"})
        reply.end("stop")

    stub.script = script
    block = measure(1, ClosedLoop(1), chat=True, decode=lambda ids: "why?")
    values = values_of(block, NO_SLO)
    assert values["ttft_p50"] == about(0.1, 0.05)
    assert values["ttft_answer_p50"] == about(0.4, 0.1)
    assert block.requests[0].output_tokens == 2
    assert stub.bodies[0]["messages"] == [{"role": "user", "content": "why?"}]


def test_a_tool_call_counts_as_the_answer(stub, measure):
    def script(reply):
        reply.begin()
        reply.say(1, delta={"reasoning": "hm"})
        time.sleep(0.05)
        reply.say(3, delta={"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]})
        reply.end("tool_calls")

    stub.script = script
    [record] = measure(1, ClosedLoop(1), chat=True, decode=lambda ids: "why?").requests
    assert record.error is None and record.finish_reason == "tool_calls" and record.output_tokens == 4
    assert [time for time, _ in record.chunks][1] == record.answered >= record.chunks[0][0] + 0.05


def test_a_503_is_a_failure_with_its_status_and_never_a_fast_success(stub, measure):
    def script(reply):
        if len(stub.bodies) % 2:
            reply.refuse(503)
        else:
            reply.begin()
            reply.say()
            time.sleep(0.05)
            reply.say()
            reply.end()

    stub.script = script
    block = measure(20, ClosedLoop(1))
    values = values_of(block, Slo({"ttft": 10.0}))
    assert values["errors"] == 0.5
    assert error_counts(block.requests) == {"HTTP 503": 10}
    assert values["throughput"] == pytest.approx(20 / block.wall)
    assert values["goodput"] == values["requests"] == pytest.approx(10 / block.wall)
    assert summary("e2e", block.requests).low >= 0.05


@pytest.mark.parametrize("ending", ["cut", "error", "empty", "no end"])
def test_a_stream_that_breaks_off_is_a_failure(stub, measure, ending):
    def script(reply):
        reply.begin()
        if ending == "empty":
            return reply.end("stop")
        reply.say()
        if ending == "error":
            reply.event({"error": {"message": "out of memory"}})
        elif ending == "no end":
            reply.event("[DONE]")
        return reply.cut()

    stub.script = script
    block = measure(2, ClosedLoop(1))
    assert len(failed(block.requests)) == 2
    assert throughput(block) == 0
    assert summary("ttft", block.requests) is None
    if ending == "error":
        assert block.requests[0].error == "error event: out of memory"


def test_nothing_is_sent_that_was_not_asked_for(stub, measure):
    def script(reply):
        reply.begin()
        reply.say()
        reply.end()

    stub.script = script
    measure(1, ClosedLoop(1))
    assert stub.bodies[0].keys() == {"prompt", "max_tokens", "stream", "stream_options"}
    measure(1, ClosedLoop(1), model="stub", fields={"temperature": 0.5}, token_ids=True)
    assert stub.bodies[1] == {
        "model": "stub", "prompt": [1, 2, 3, 4], "max_tokens": 8, "stream": True,
        "stream_options": {"include_usage": True}, "temperature": 0.5, "return_token_ids": True}


@undisturbed
def test_at_a_constant_rate_the_peak_is_the_mean(stub, measure, monkeypatch):
    monkeypatch.setattr("hotswap.lab.metrics.PEAK_S", 0.1)  # five parts
    stub.script = metronome(0.005, 100)
    block = measure(1, ClosedLoop(1))
    assert throughput(block) <= peak_throughput(block) <= 1.1 * throughput(block)
    late = replace(block, wall=2 * block.wall)
    assert peak_throughput(late) > 1.5 * throughput(late), "half of the time nothing came"


def metronome(period, count):
    """``count`` tokens, one every ``period`` seconds by the clock."""
    def script(reply):
        reply.begin()
        begin = time.perf_counter()
        for token in range(count):
            time.sleep(max(0, begin + period * (token + 1) - time.perf_counter()))
            reply.say()
        reply.end()
    return script


@undisturbed
def test_a_window_counts_what_was_delivered_inside_it(stub, measure):
    stub.script = metronome(0.005, 75)  # 0.375 s, of which the window of a second has 2 2/3
    block = measure(1000, ClosedLoop(1), window=1.0)
    assert block.wall == 1.0
    assert throughput(block) == pytest.approx(200, rel=0.06)
    done, cut = succeeded(block.requests), [record for record in block.requests if record.incomplete]
    assert (len(done), len(cut)) == (2, 1), "those that the window cut off are listed apart"
    assert not failed(block.requests)
    assert 0 < cut[0].output_tokens < 75
    assert all(time <= 1.0 for time, _ in cut[0].chunks)
    assert summary("e2e", block.requests).count == 2


def test_what_a_window_kept_from_being_sent_is_recorded(stub, measure):
    stub.script = metronome(0.01, 100)
    block = measure(1000, OpenLoop(rate=20, arrivals="constant", limit=1), window=0.8)
    waiting = [record for record in block.requests if record.incomplete and not record.chunks]
    assert len(block.requests) == 16, "a request each 50 ms"
    assert len(waiting) == 15, "due, and never sent: a report without them would look as if there had been no queue"


def test_failures_make_the_adjusted_percentile_endless_and_stand_beside_it(stub, measure):
    def script(reply):
        if len(stub.bodies) % 20 == 0:
            reply.refuse(500)
        else:
            reply.begin()
            reply.say()
            reply.end()

    stub.script = script
    found = summary("e2e", measure(100, ClosedLoop(2)).requests)
    assert found.error_share == 0.05
    assert found.adjusted["p99"] == math.inf
    assert found.percentiles["p99"] < 10
    assert found.adjusted["p50"] < 10


def latencies(arm, pair, dropped=0):
    """A block of a hundred requests of about 0.1 to 1 s, whose ``dropped`` slowest failed."""
    records = tuple(
        RequestRecord(
            index, 0.0, 0.0, () if index >= 100 - dropped else ((0.01 * index + 0.1, 1), (0.01 * index + 0.2, 1)),
            0.01 * index + 0.2, 4, 2, error="HTTP 503: busy" if index >= 100 - dropped else None, queued=0.001 * index)
        for index in range(100))
    return BlockRecord(arm, pair, pair, 2.0, records)


def test_an_arm_that_drops_its_slow_requests_is_better_in_no_latency():
    pairs = [
        Pair(values_of(latencies("base", pair), NO_SLO), values_of(latencies("arm", pair, 5), NO_SLO), pair % 2 == 0)
        for pair in range(40)]
    assert {name for name in pairs[0].arm if name.startswith("queue_")} == set(), "a difference would say nothing"
    specs = [spec_of(name) for name in ("ttft_p50", "ttft_mean", "ttft_p99", "e2e_p90", "e2e_p99", "queue_mean")]
    outcomes = {found.metric: found.outcome for found in analyse({"arm": pairs}, specs, Settings(flips=999))}
    assert outcomes == {
        "ttft_p50": Outcome.NO_DIFFERENCE, "e2e_p90": Outcome.NO_DIFFERENCE, "queue_mean": Outcome.NOT_ENOUGH_DATA,
        "ttft_mean": Outcome.WORSE, "ttft_p99": Outcome.WORSE, "e2e_p99": Outcome.WORSE}


def test_goodput_counts_those_that_succeed_within_every_objective():
    """Six requests in two seconds: within both, late to begin, slow afterwards, both, of one token, and failed."""
    def request(index, first, gap, tokens=3, error=None):
        chunks = tuple((first + place * gap, 1) for place in range(tokens))
        return RequestRecord(index, 0.0, 0.0, chunks, chunks[-1][0], 4, tokens, error=error)

    requests = (request(0, 0.4, 0.1), request(1, 0.6, 0.1), request(2, 0.4, 0.3), request(3, 0.6, 0.3),
                request(4, 0.4, 0.0, tokens=1), request(5, 0.1, 0.01, error="HTTP 503: busy"))
    block = BlockRecord("base", 0, 0, 2.0, requests)
    for limits, good in (({"ttft": 0.5}, 3), ({"tpot": 0.2}, 3), ({"ttft": 0.5, "tpot": 0.2}, 2), ({"e2e": 9.0}, 5)):
        assert values_of(block, Slo(limits))["goodput"] == good / 2.0, limits
    assert values_of(block, NO_SLO)["requests"] == 5 / 2.0
    assert "goodput" not in values_of(block, NO_SLO), "without an objective there is none"


TIMES = st.floats(0, 100, allow_nan=False)


@quick
@given(st.lists(TIMES, min_size=1), st.integers(0, 5))
def test_min_median_and_max_are_in_order(values, endless):
    values = sorted([*values, *[math.inf] * endless])
    marks = [percentile(values, share) for share in (0, 0.5, 0.9, 0.99, 1)]
    assert marks == sorted(marks)
    assert (marks[0], marks[-1]) == (values[0], values[-1])


@quick
@given(st.lists(st.lists(st.tuples(TIMES, st.integers(0, 5)), max_size=5).map(sorted), min_size=1), TIMES)
def test_the_peak_is_never_below_the_mean(deliveries, extra):
    records = [
        RequestRecord(index, 0.0, 0.0, tuple(chunks), 100.0, 3, sum(tokens for _, tokens in chunks))
        for index, chunks in enumerate(deliveries)]
    block = BlockRecord("base", 0, 0, 0.5 + extra, tuple(records))
    assert peak_throughput(block) >= throughput(block)
    found = summary("e2e", block.requests)
    assert found.low <= found.percentiles["p50"] <= found.high
    assert found.low <= found.mean <= found.high


def test_each_metric_has_its_formula_and_unit():
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    assert all(spec.formula and spec.unit for spec in METRICS)
