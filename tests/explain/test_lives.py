"""Where a request's time went: phases that add up to its latency, and agree with what the engine itself noted."""

import pytest

from hotswap.lab.decisions.lives import Phase, journeys, lives
from hotswap.lab.decisions.overview import overview


def of_engine(state):
    """What the engine noted of a request that has ended."""
    return state.first_scheduled_at, state.first_token_at, state.finished_at


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("scheduler", ["chunked", "continuous", "prefill_first", "static"])
def test_the_phases_of_each_request_add_up_to_its_latency(record, scheduler, depth):
    recording = record(scheduler=scheduler, depth=depth, lookahead=2).traffic()
    found = list(lives(recording.stop()))
    assert {life.id for life in found} == recording.witness.ended.keys()
    assert len({life.reason for life in found}) == 3
    for life in found:
        state = recording.witness.ended[life.id]
        latency = state.finished_at - state.arrival
        assert life.latency == pytest.approx(latency, rel=1e-9)
        assert sum(life.seconds().values()) == pytest.approx(latency, rel=0.01, abs=1e-9)
        assert [before.end for before in life.spans[:-1]] == [after.begin for after in life.spans[1:]]


@pytest.mark.parametrize("depth", [1, 2])
def test_queue_ends_and_decode_begins_when_the_engine_says(record, depth):
    recording = record(depth=depth).traffic()
    never_suspended = 0
    for life in lives(recording.stop()):
        started, first_token, _ = of_engine(recording.witness.ended[life.id])
        seconds = life.seconds()
        if started is not None:
            assert seconds[Phase.QUEUE] == pytest.approx(started - life.arrived, abs=1e-9)
        if first_token is not None and not life.preemptions:
            never_suspended += 1
            assert life.arrived + seconds[Phase.QUEUE] + seconds[Phase.PREFILL] == pytest.approx(first_token, abs=1e-9)
        assert life.first_token == pytest.approx(first_token)
    assert never_suspended > 5


def test_time_between_a_suspension_and_the_next_token_counts_as_preempted(record):
    recording = record("one.jsonl", num_pages=1 + 33).traffic()
    found = list(lives(recording.stop()))
    suspended = [life for life in found if life.preemptions]
    assert suspended
    for life in suspended:
        assert life.preemptions == recording.witness.ended[life.id].preemptions
        assert life.seconds()[Phase.PREEMPTED] > 0
    assert all(not life.seconds()[Phase.PREEMPTED] for life in found if not life.preemptions)


def test_a_request_that_never_starts_has_only_queued(record):
    recording = record()
    recording.rig.add("r", [1, 2, 3], 5)
    recording.rig.clock.advance(0.25)
    recording.rig.loop.abort("r")
    [life] = lives(recording.stop())
    assert life.seconds() == {**dict.fromkeys(Phase, 0.0), Phase.QUEUE: 0.25}
    assert (life.reason, life.first_token) == ("abort", None)


def test_waiting_for_pages_from_elsewhere_is_transfer():
    """Two engines of a disaggregated pair, as their logs tell it: 2 s of prefill, 1 s on the way, 3 s of decoding."""
    from hotswap.lab.decisions.lives import Lives

    def arrival(n, t, continued):
        return {"n": n, "t": t, "event": "arrival", "id": "r", "prompt_length": 9, "max_new": 8, "continued": continued}

    def step(t, rows=(), resumes=(), holds=()):
        return {"t": t, "event": "step", "step": 1, "rows": rows, "resumes": resumes, "holds": holds,
                "suspensions": (), "duration": 0.0}

    def verdict(t, kept):
        return {"t": t, "event": "verdict", "rows": [("r", kept, 0, 0, 9 + kept, None, 0)]}

    def finish(t, reason, output):
        return {"t": t, "event": "finish", "id": "r", "reason": reason, "output_length": output, "preemptions": 0,
                "cached_tokens": 0}

    prefill, decode, found = Lives("prefill0"), Lives("decode0"), []
    for event in (arrival(1, 10.0, 0), step(10.5, [("r", 9, 0)], [("r", 0)]), finish(12.5, "handoff", 1)):
        found.append(prefill.take(event))
    held = [("r", "its pages are on their way")]
    for event in (arrival(1, 12.75, 1), step(13.0, resumes=[("r", 9)], holds=held), step(13.75, [("r", 1, 0)]),
                  verdict(14.0, 1), finish(16.75, "length", 8)):
        found.append(decode.take(event))
    [journey] = journeys(filter(None, found))
    assert journey.replica == "prefill0 > decode0"
    assert journey.latency == 6.75
    assert journey.seconds() == {
        Phase.QUEUE: 0.5 + 0.25, Phase.PREFILL: 2.0 + 0.25, Phase.DECODE: 2.75, Phase.PREEMPTED: 0.0,
        Phase.TRANSFER: 0.25 + 0.75}
    assert sum(journey.seconds().values()) == journey.latency


def test_pages_that_come_beside_the_steps_are_waited_for_as_transfer(record):
    """A host tier that copies late: of the requests whose prefix it has, some wait for it."""
    import random

    from hotswap.core.testing.kv_transfer_traffic import LateWorker
    from hotswap.core.testing.rig import build
    from hotswap.plugins.kv_transfer.copies import HostTierWorker, InOrder

    rng = random.Random(4)
    recording = record(
        depth=2, transfer=build("kv_transfer", "host", memory=8192, swap_overhead=20, overlap=True),
        wrap_transfer=lambda worker: LateWorker(HostTierWorker(True, InOrder()), rng))
    recording.traffic(few_prompts=True)
    assert recording.rig.loop.transfers.counters()["hits"]
    found = list(lives(recording.stop()))
    assert any(life.seconds()[Phase.TRANSFER] for life in found)
    for life in found:
        assert sum(life.seconds().values()) == pytest.approx(life.latency, rel=0.01, abs=1e-9)


def test_the_overview_counts_what_the_engine_did(record):
    recording = record(depth=2, lookahead=2).traffic()
    loop, found = recording.rig.loop, overview(recording.stop())
    assert found.steps == loop.steps
    assert len(found.lives) == len(recording.witness.ended)
    assert sum(found.suspensions.values()) == sum(state.preemptions for state in recording.witness.ended.values())
    drafts = loop.drafts.report()
    assert (found.drafted, found.accepted) == (drafts["drafted"], drafts["accepted"])
    assert 0 < found.busy <= found.seconds
    assert found.held
