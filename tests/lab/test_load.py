"""When requests are sent: arrival processes, limits, sessions, a target that dies."""

import itertools
import statistics
import threading

import pytest

from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab import load, requests
from hotswap.lab.load import ClosedLoop, OpenLoop, run_load
from hotswap.lab.requests import check_workload, endless, foreign_context
from hotswap.lab.targets.target import Activity, Ending

NOW = SystemClock().now


class Echo:
    """Answers each request with one token, ``delay`` seconds after it was sent."""

    can_reset = False

    def __init__(self, delay=0.01, dies_after=None, hangs=False):
        self.delay, self.dies_after, self.hangs = delay, dies_after, hangs
        self.sent, self.live, self.most = [], set(), 0
        self.lock = threading.Lock()

    def send(self, request, hearer):
        with self.lock:
            self.sent.append((NOW(), request))
            self.live.add(request.id)
            self.most = max(self.most, len(self.live))
        if self.hangs:
            return
        if self.problem() is not None:
            hearer.ended(Ending(NOW(), error="it is dead"))
            return
        threading.Timer(self.delay, self.answer, (request, hearer)).start()

    def answer(self, request, hearer):
        with self.lock:
            self.live.discard(request.id)
        hearer.arrived(NOW(), 1, [7])
        hearer.ended(Ending(NOW(), "length", None, len(request.prompt), 1))

    def abort(self, id):
        self.live.discard(id)

    def problem(self):
        return "it is dead" if self.dies_after is not None and len(self.sent) >= self.dies_after else None

    def finish(self):
        return Activity()


def numbered(*items):
    return list(enumerate(items))


def plain(count, **fields):
    return numbered(*[WorkItem((1, 2), 1, **fields) for _ in range(count)])


@pytest.mark.parametrize("arrivals, spread", [("constant", 0.0), ("poisson", 1.0), ("bursty", 2.0)])
def test_arrivals_have_the_rate_and_the_burstiness_that_was_asked_for(arrivals, spread):
    times = list(itertools.islice(OpenLoop(rate=5, arrivals=arrivals, burstiness=0.25).starts(seed=3), 20_000))
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = statistics.mean(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert statistics.pstdev(gaps) / mean == pytest.approx(spread, rel=0.05, abs=1e-6)


def test_the_same_seed_gives_the_same_arrivals():
    first, same, other = (list(itertools.islice(OpenLoop(rate=5).starts(seed), 50)) for seed in (1, 1, 2))
    assert first == same != other


def test_a_closed_loop_keeps_its_number_in_flight_and_no_more():
    target = Echo()
    stretch = run_load(target, plain(20), ClosedLoop(3), NOW, name="x")
    assert target.most == 3
    assert [record.index for record in stretch.records] == list(range(20))
    assert all(record.planned == record.sent for record in stretch.records)
    assert all(record.tokens == (7,) for record in stretch.records)


def test_a_turn_waits_for_the_turn_before_and_then_its_pause():
    items = numbered(WorkItem((1,), 1), WorkItem((1, 2), 1, after=0, pause=0.1), WorkItem((5,), 1))
    for loop in (ClosedLoop(3), OpenLoop(rate=1000, arrivals="constant")):
        first, second, other = run_load(Echo(0.05), items, loop, NOW, name="x").records
        assert second.planned >= first.ended + 0.1 - 1e-3
        assert second.sent >= second.planned - 1e-3
        assert other.sent < first.ended


def test_a_turn_whose_predecessor_is_not_of_this_stretch_waits_for_nobody():
    records = run_load(Echo(), [(8, WorkItem((1,), 1, after=3))], ClosedLoop(1), NOW, name="x").records
    assert [record.index for record in records] == [8]


def test_sessions_and_new_requests_take_turns_in_an_endless_closed_loop():
    def endless():
        for index in itertools.count():
            yield index, WorkItem((1,), 1, after=index - 1 if index % 2 else None)

    records = run_load(Echo(0.005), endless(), ClosedLoop(2), NOW, name="x", window=0.5).records
    done = {record.index for record in records if not record.incomplete}
    assert sum(index % 2 for index in done) > len(done) / 4


def test_items_with_times_of_their_own_keep_their_distances():
    items = numbered(*[WorkItem((1,), 1, at=100 + 0.1 * place) for place in range(4)])
    records = run_load(Echo(), items, OpenLoop(arrivals="workload"), NOW, name="x").records
    assert [record.planned for record in records] == pytest.approx([0, 0.1, 0.2, 0.3])


def test_a_target_that_dies_ends_the_stretch_and_keeps_what_was_measured():
    records = run_load(Echo(dies_after=5), plain(10_000), ClosedLoop(2), NOW, name="x").records
    assert len(records) < 20
    assert sum(record.error is None for record in records) >= 3
    assert {record.error for record in records} == {None, "it is dead"}


def test_what_was_due_and_never_sent_when_the_target_died_is_recorded(monkeypatch):
    monkeypatch.setattr(load, "LOOK_S", 0.05)
    load_ = OpenLoop(rate=1000, arrivals="constant", limit=1)
    records = run_load(Echo(hangs=True, dies_after=1), plain(20), load_, NOW, name="x").records
    assert records[0].error == "it is dead"
    assert len(records) == 20 and all(record.incomplete for record in records[1:])


def test_a_workload_that_breaks_off_ends_the_stretch_and_keeps_what_was_measured():
    def items():
        yield from plain(6)
        raise ConfigError("trace.csv:7: is no line")

    stretch = run_load(Echo(), items(), ClosedLoop(2), NOW, name="x")
    assert stretch.broken == "the workload has ended: trace.csv:7: is no line"
    assert len(stretch.records) == 6
    assert sum(record.error is None and not record.incomplete for record in stretch.records) >= 4


def test_a_trace_that_begins_again_goes_on_behind_its_end():
    class Trace:
        def items(self, context):
            for at in (0.0, 0.5, 1.0, 3.0):
                yield WorkItem((context.seed,), 1, at=at)
            yield WorkItem((context.seed,), 1, after=3)

    again = list(itertools.islice(endless(Trace(), foreign_context(5, 100)), 12))
    assert [item.at for item in again] == [0, 0.5, 1, 3, None, 3.75, 4.25, 4.75, 6.75, None, 7.5, 8.0]
    assert [item.after for item in again] == [None] * 4 + [3] + [None] * 4 + [8] + [None] * 2
    assert [item.prompt[0] for item in again] == [5] * 5 + [6] * 5 + [7] * 2, "and is not the same again"


@pytest.mark.timeout(30)
def test_requests_that_fall_due_faster_than_they_can_be_sent_do_not_keep_a_window_open(monkeypatch):
    monkeypatch.setattr(load, "ABORT_S", 0.05)
    stretch = run_load(
        Echo(hangs=True), ((index, WorkItem((1,), 1)) for index in itertools.count()),
        OpenLoop(rate=1e6, arrivals="constant"), NOW, name="x", window=0.05)
    assert stretch.wall == 0.05
    assert all(record.incomplete for record in stretch.records)


def trace(*items):
    """A workload of these requests: (at, after, pause)."""
    class Trace:
        def items(self, context):
            return (WorkItem((1,), 1, *item) for item in items)

    return Trace()


def fill(workload):
    """Refused where it cannot fill a window at its own times."""
    check_workload(workload, foreign_context(5, 100), OpenLoop(arrivals="workload"), filling=True)


@pytest.mark.parametrize("items", [
    [(0.0,)], [(3.0,), (3.0,), (None, 0)], [(1.0,)] * (requests.CHECKED_ITEMS + 1),
], ids=["one request", "all at once", "more than are checked"])
def test_a_trace_without_extent_begins_again_at_once_and_so_fills_no_window(items):
    again = list(itertools.islice(endless(trace(*items), foreign_context(5, 100)), 3 * len(items)))
    assert [item.at for item in again] == [at for at, *_ in items] * 3
    with pytest.raises(ConfigError, match="workload: its requests are all due at once"):
        fill(trace(*items))
    fill(trace(*items, (items[0][0] + 1,)))


def test_a_trace_that_never_gets_on_is_not_read_for_ever(monkeypatch):
    monkeypatch.setattr(requests, "AT_ONCE", 10)
    with pytest.raises(ConfigError, match="workload: its requests are all due at once"):
        fill(trace(*[(0.0,)] * 11, (1.0,)))


def test_turns_behind_pauses_have_an_extent_though_their_sessions_begin_at_once():
    sessions = trace((2.0,), (None, 0, 1.5), (None, 1, 0.5), (2.0,), (2.0,))
    fill(sessions)
    again = list(itertools.islice(endless(sessions, foreign_context(5, 100)), 10))
    assert [item.at for item in again] == [2, None, None, 2, 2, 4.5, None, None, 4.5, 4.5]
    assert [item.after for item in again] == [None, 0, 1, None, None, None, 5, 6, None, None]


def test_a_target_that_falls_silent_and_is_dead_does_not_hold_the_run_up(monkeypatch):
    monkeypatch.setattr(load, "LOOK_S", 0.05)
    records = run_load(Echo(hangs=True, dies_after=2), plain(4), ClosedLoop(2), NOW, name="x").records
    assert [record.error for record in records] == ["it is dead"] * 2


def test_who_interrupts_keeps_what_came_until_then():
    def impatient(count):
        if count == 5:
            raise KeyboardInterrupt

    stretch = run_load(Echo(0.02), plain(100), ClosedLoop(2), NOW, name="x", on_ended=impatient)
    assert stretch.broken == "it was interrupted"
    assert 5 <= sum(not record.incomplete for record in stretch.records) <= 6
    assert len(stretch.records) <= 7


def test_an_end_that_an_interruption_kept_from_being_noted_is_not_waited_for(monkeypatch):
    land = load._Run._land

    def interrupted(run, flight):
        if len(run._done) == 3:
            raise KeyboardInterrupt
        land(run, flight)

    monkeypatch.setattr(load._Run, "_land", interrupted)
    begin = NOW()
    stretch = run_load(Echo(), plain(10), ClosedLoop(1), NOW, name="x")
    assert NOW() - begin < load.ABORT_S / 2
    assert [record.incomplete for record in stretch.records] == [False] * 4
