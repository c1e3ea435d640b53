"""The engine behind its thread: bounded queue, aborts, failing parts, health, draining."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hotswap.core.engine.client import Engine
from hotswap.core.errors import EngineStoppedError, QueueFullError
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.scheduler import PlanContext, StepPlan
from hotswap.core.live import LiveComponents
from hotswap.core.request import FinishReason, Request, RequestOutput, SamplingParams, TextDelta
from hotswap.core.testing.fakes import FakeWorker, continuation
from hotswap.core.testing.rig import Rig, build, make_rig
from hotswap.plugins.kvcache.eviction import LeastRecentlyUsed
from hotswap.plugins.schedulers.policies import FirstComeFirstServed


class Box:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.final: RequestOutput | None = None
        self.ended = threading.Event()
        self.finals = 0

    def sink(self, output: RequestOutput) -> None:
        self.tokens += output.token_ids
        if output.finish_reason:
            self.final = output
            self.finals += 1
            self.ended.set()

    def reason(self, timeout: float = 10.0) -> FinishReason | None:
        assert self.ended.wait(timeout), "the request did not end"
        assert self.final is not None
        return self.final.finish_reason


def request(id: str, prompt: list[int] | None = None, max_tokens: int = 5) -> Request:
    return Request(id, prompt or [1, 2, 3], SamplingParams(temperature=0, max_tokens=max_tokens))


class SlowWorker(FakeWorker):
    """Takes some real time for each step."""

    step_s = 0.005

    def execute(self, message: StepMessage) -> Verdict:
        time.sleep(self.step_s)
        return super().execute(message)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    started: list[Engine] = []
    yield started
    for engine in started:
        engine.stop()


def start(engines: list[Engine], rig: Rig, **settings: Any) -> Engine:
    engine = Engine(rig.loop, **settings)
    engines.append(engine)
    return engine


def slow(worker: FakeWorker) -> FakeWorker:
    return SlowWorker(worker.windows, max_model_len=worker.max_model_len)


def test_requests_from_many_threads_get_their_own_tokens(engines: list[Engine]) -> None:
    engine = start(engines, make_rig(max_running=4))
    boxes = {i: Box() for i in range(20)}
    threads = [threading.Thread(target=engine.add, args=(request(f"r{i}", [i % 13, 2]), box.sink))
               for i, box in boxes.items()]
    for thread in threads:
        thread.start()
    for i, box in boxes.items():
        assert box.reason() is FinishReason.LENGTH
        assert box.tokens == continuation([i % 13, 2], 5)


def test_an_idle_engine_uses_no_processor(engines: list[Engine], processor_share: Callable[[float], float]) -> None:
    engine, box = start(engines, make_rig()), Box()
    engine.add(request("r"), box.sink)
    assert box.reason() is FinishReason.LENGTH
    assert processor_share(0.02) < 0.02


def test_above_the_queue_limit_requests_are_refused_at_once_and_the_others_run_on(engines: list[Engine]) -> None:
    engine = start(engines, make_rig(max_running=1, wrap_worker=slow), max_queue=4)
    boxes, refused = [], 0
    for i in range(20):
        box = Box()
        try:
            engine.add(request(f"r{i}", max_tokens=20), box.sink)
            boxes.append(box)
        except QueueFullError as error:
            assert error.retry_after_s > 0
            refused += 1
    assert (len(boxes), refused) == (5, 15)
    assert all(box.reason() is FinishReason.LENGTH for box in boxes)


def test_an_abort_ends_a_request_once_whatever_its_state(engines: list[Engine]) -> None:
    engine = start(engines, make_rig(max_running=1, wrap_worker=slow))
    running, waiting = Box(), Box()
    engine.add(request("running", max_tokens=100), running.sink)
    engine.add(request("waiting", max_tokens=100), waiting.sink)
    for name in ("waiting", "running", "running", "never seen"):
        engine.abort(name)
    assert (running.reason(), waiting.reason()) == (FinishReason.ABORT, FinishReason.ABORT)
    assert (running.finals, waiting.finals) == (1, 1)


def test_a_failing_step_ends_its_requests_and_nothing_else(engines: list[Engine]) -> None:
    class Failing(FakeWorker):
        def execute(self, message: StepMessage) -> Verdict:
            if any(row.request == "bad" for row in message.rows):
                return Verdict(message.step_id, error="ValueError: planted")
            return super().execute(message)

    rig = make_rig(wrap_worker=lambda worker: Failing(worker.windows, max_model_len=worker.max_model_len))
    engine = start(engines, rig)
    bad, good = Box(), Box()
    engine.add(request("bad"), bad.sink)
    assert bad.reason() is FinishReason.ERROR
    assert bad.final is not None
    assert "planted" in str(bad.final.error)
    engine.add(request("good"), good.sink)
    assert good.reason() is FinishReason.LENGTH
    assert rig.loop.parts.kv.usage().held == 0


def test_a_detokeniser_that_raises_ends_its_own_request_and_no_other(engines: list[Engine]) -> None:
    class Torn:
        def push(self, token_ids: list[int], search_stops_after: int = 0) -> TextDelta:
            raise UnicodeError("planted")

        def finish(self) -> str:
            return ""

    rig = make_rig()
    engine = start(engines, rig)
    bad, good = Box(), Box()
    engine.add(replace(request("bad"), detokenizer=Torn()), bad.sink)
    engine.add(request("good", max_tokens=20), good.sink)
    assert bad.reason() is FinishReason.ERROR
    assert "planted" in str(bad.final and bad.final.error)
    assert good.reason() is FinishReason.LENGTH
    engine.call(rig.loop.parts.kv.check)
    assert rig.loop.parts.kv.usage().held == 0


def test_a_scheduler_that_raises_is_named_and_no_page_is_lost(engines: list[Engine]) -> None:
    scheduler = build("scheduler", "chunked")
    broken = threading.Event()
    plan = scheduler.plan

    def raising(ctx: PlanContext) -> StepPlan:
        result = plan(ctx)
        if broken.is_set():
            raise ValueError("planted")
        return result

    scheduler.plan = raising
    rig = make_rig(scheduler)
    engine = start(engines, rig)
    broken.set()
    box = Box()
    engine.add(request("unlucky"), box.sink)
    assert box.reason() is FinishReason.ERROR
    assert box.final is not None
    assert "scheduler 'chunked' raised in plan" in str(box.final.error)
    assert "planted" in str(engine.health())
    engine.call(rig.loop.parts.kv.check)
    assert rig.loop.parts.kv.usage().held == 0
    broken.clear()
    box = Box()
    engine.add(request("lucky"), box.sink)
    assert box.reason() is FinishReason.LENGTH
    assert engine.health() is None


def test_of_a_plan_that_stays_invalid_only_the_request_of_the_wrong_row_ends(engines: list[Engine]) -> None:
    scheduler = build("scheduler", "chunked")
    plan = scheduler.plan

    def greedy(ctx: PlanContext) -> StepPlan:
        planned = plan(ctx)
        return StepPlan([row._replace(n_tokens=99) if row.request == "culprit" else row for row in planned.rows])

    scheduler.plan = greedy
    rig = make_rig(scheduler, wrap_worker=slow)
    engine = start(engines, rig)
    before, culprit, beside = Box(), Box(), Box()
    engine.add(request("before", max_tokens=20), before.sink)
    engine.add(request("culprit", [4, 5, 6]), culprit.sink)
    engine.add(request("beside", [7, 8, 9]), beside.sink)
    assert culprit.reason() is FinishReason.ERROR
    assert culprit.final is not None
    assert "made an invalid plan: row ('culprit', 99 tokens" in str(culprit.final.error)
    assert (before.reason(), beside.reason()) == (FinishReason.LENGTH, FinishReason.LENGTH)
    assert engine.health() is None
    engine.call(rig.loop.parts.kv.check)
    assert rig.loop.parts.kv.usage().held == 0


def test_a_request_that_its_queue_policy_cannot_order_ends_and_the_policy_is_named(engines: list[Engine]) -> None:
    class Picky(FirstComeFirstServed):
        def key(self, view: Any, now: float) -> Any:
            if view.id == "odd":
                raise ValueError("planted")
            return super().key(view, now)

    scheduler = build("scheduler", "chunked")
    rig = make_rig(type(scheduler)(scheduler.options, {"policy": Picky()}))
    engine = start(engines, rig)
    odd, even = Box(), Box()
    engine.add(request("odd"), odd.sink)
    engine.add(request("even"), even.sink)
    assert (odd.reason(), even.reason()) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert odd.final is not None
    assert "queue_policy 'Picky' raised in key: ValueError: planted" in str(odd.final.error)


def test_an_eviction_policy_that_breaks_the_books_ends_the_engine_with_its_name(engines: list[Engine]) -> None:
    class Broken(LeastRecentlyUsed):
        def on_insert(self, page: Any) -> None:
            raise ValueError("planted")

        def clone(self) -> "Broken":
            return Broken()

    kv = build("kvcache", "prefix")
    engine = start(engines, make_rig(kv=type(kv)(kv.options, {"eviction": Broken()})))
    box = Box()
    engine.add(request("r", [1] * 20), box.sink)
    assert box.reason() is FinishReason.ERROR
    assert "eviction_policy 'Broken' raised in on_insert: ValueError: planted" in str(engine.health())
    assert engine.failure == engine.health()


def test_health_turns_red_when_no_progress_is_made_and_green_again(engines: list[Engine]) -> None:
    scheduler = build("scheduler", "chunked")
    closed = threading.Event()
    closed.set()
    plan = scheduler.plan
    scheduler.plan = lambda ctx: StepPlan() if closed.is_set() else plan(ctx)
    scheduler.next_wakeup = lambda: 0.0 if not closed.is_set() else None
    rig = make_rig(scheduler)

    class Real:
        now = staticmethod(time.perf_counter)
        wall = staticmethod(time.time)

    rig.loop.clock = Real()
    engine = start(engines, rig, watchdog_s=0.1)
    box = Box()
    engine.add(request("stuck"), box.sink)
    deadline = time.perf_counter() + 5
    while engine.health() is None and time.perf_counter() < deadline:
        time.sleep(0.02)
    assert "no step was finished" in str(engine.health())
    closed.clear()
    assert box.reason() is FinishReason.LENGTH
    assert engine.health() is None


def test_drain_finishes_what_runs_and_takes_nothing_new(engines: list[Engine]) -> None:
    engine = start(engines, make_rig(wrap_worker=slow))
    box = Box()
    engine.add(request("last", max_tokens=30), box.sink)
    engine.drain(10)
    assert box.reason(0.1) is FinishReason.LENGTH
    with pytest.raises(EngineStoppedError):
        engine.add(request("late"), Box().sink)


def test_drain_ends_what_takes_too_long(engines: list[Engine]) -> None:
    engine = start(engines, make_rig(wrap_worker=slow))
    box = Box()
    engine.add(request("endless", max_tokens=120), box.sink)
    engine.drain(0.05)
    assert box.reason(5) is FinishReason.ABORT


def test_stop_returns_in_bounded_time_with_a_final_output_for_all() -> None:
    engine = Engine(make_rig(wrap_worker=slow).loop)
    boxes = [Box() for _ in range(5)]
    for i, box in enumerate(boxes):
        engine.add(request(f"r{i}", max_tokens=100), box.sink)
    begun = time.perf_counter()
    engine.stop()
    engine.stop()
    assert time.perf_counter() - begun < 5
    assert all(box.reason(0.1) is FinishReason.ABORT for box in boxes)
    assert not any(thread.name == "hotswap-loop" for thread in threading.enumerate())


def test_a_loop_that_dies_says_so_and_ends_every_request(engines: list[Engine]) -> None:
    rig = make_rig()

    def explode(ticket: int) -> Verdict:
        raise EngineStoppedError("the worker is gone")

    rig.executor.collect = explode  # type: ignore[method-assign]
    engine = start(engines, rig)
    box = Box()
    engine.add(request("r"), box.sink)
    assert box.reason() is FinishReason.ERROR
    assert "the worker is gone" in str(engine.health())
    with pytest.raises(EngineStoppedError, match="the worker is gone"):
        engine.add(request("later"), Box().sink)


def test_an_idle_engine_ends_when_its_workers_are_gone(engines: list[Engine]) -> None:
    rig = make_rig()
    engine = start(engines, rig)
    box = Box()
    engine.add(request("r", max_tokens=2), box.sink)
    assert box.reason() is FinishReason.LENGTH
    rig.executor.health = lambda: "rank 1 was killed"  # type: ignore[method-assign]
    deadline = time.perf_counter() + 5
    while engine.failure is None:
        assert time.perf_counter() < deadline
        time.sleep(0.01)
    assert "rank 1 was killed" in engine.failure


def test_nobody_waits_for_a_loop_that_has_died(engines: list[Engine]) -> None:
    rig = make_rig()
    engine = start(engines, rig)

    def explode() -> bool:
        raise SystemExit("planted")

    rig.loop.turn = explode  # type: ignore[method-assign]
    engine.abort("nothing")  # wakes the loop
    engine._thread.join(5)
    begun = time.perf_counter()
    with pytest.raises(EngineStoppedError, match="planted"):
        engine.reset()
    assert time.perf_counter() - begun < 1
    assert "planted" in str(engine.health())


def test_when_the_loop_dies_a_cache_that_cannot_give_back_costs_nobody_the_last_output(engines: list[Engine]) -> None:
    rig = make_rig()

    def explode(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    rig.executor.collect = explode  # type: ignore[method-assign]
    rig.loop.parts.kv.release = explode  # type: ignore[method-assign]
    engine = start(engines, rig)
    boxes = [Box(), Box()]
    engine.call(lambda: [rig.loop.add(request(f"r{i}"), box.sink) for i, box in enumerate(boxes)])
    assert [box.reason() for box in boxes] == [FinishReason.ERROR] * 2


def test_a_second_request_of_the_same_name_is_refused_and_the_first_goes_on(engines: list[Engine]) -> None:
    engine = start(engines, make_rig(wrap_worker=slow))
    first, second = Box(), Box()
    engine.add(request("twin", max_tokens=20), first.sink)
    engine.add(request("twin"), second.sink)
    assert second.reason() is FinishReason.ERROR
    assert "twin" in str(second.final and second.final.error)
    assert first.reason() is FinishReason.LENGTH
    assert first.tokens == continuation([1, 2, 3], 20)


def test_a_leaked_page_is_given_back_with_a_log_line_and_a_metric(
    engines: list[Engine], caplog: pytest.LogCaptureFixture,
) -> None:
    live = LiveComponents()
    metrics = build("observer", "metrics")
    live.add(metrics)
    rig = make_rig(observers=live.observers)
    engine = start(engines, rig)
    kv = rig.loop.parts.kv
    engine.call(lambda: kv.reserve("forgotten", 9, kv.match([1] * 9, CacheKey(), 8), CacheKey(), [1] * 9))
    box = Box()
    engine.add(request("honest"), box.sink)
    assert box.reason() is FinishReason.LENGTH
    engine.drain(5)
    engine.call(kv.check)
    assert kv.usage().held == 0
    assert "forgotten" in caplog.text
    counted = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples}
    assert counted["hotswap:leaked_pages_total"] == 3


def test_reset_drops_the_reusable_cache_and_only_that(engines: list[Engine]) -> None:
    rig = make_rig("chunked", "prefix")
    engine = start(engines, rig)
    prompt = [i % 13 for i in range(40)]
    for expected_hit in (0, 36):
        box = Box()
        engine.add(request(f"hit{expected_hit}", prompt), box.sink)
        box.reason()
        assert box.final is not None
        assert box.final.cached_tokens == expected_hit
    assert engine.reset() > 0
    box = Box()
    engine.add(request("again", prompt), box.sink)
    box.reason()
    assert box.final is not None
    assert box.final.cached_tokens == 0
