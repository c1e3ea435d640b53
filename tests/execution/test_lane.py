"""Engines that never compute at the same time, on one thread."""

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hotswap.core.execution.builder import SharedModels
from hotswap.core.execution.lane import Lane, WorkerInLane
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.parallel import Worker


class Recording:
    """A worker that notes who calls, and with how many threads for operators."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.note("build")

    def note(self, name: str) -> None:
        self.calls.append((name, threading.get_ident(), torch.get_num_threads()))

    def execute(self, message: StepMessage) -> Verdict:
        self.note("execute")
        return Verdict(message.step_id)

    def prepare(self, parts: Any) -> Any:
        self.note("prepare")
        return None

    def close(self) -> None:
        self.note("close")


def in_lane(lane: Lane, num_threads: int | None = None) -> tuple[WorkerInLane, Recording]:
    made: list[Recording] = []

    def build() -> Worker:
        made.append(Recording())
        return cast(Worker, made[0])

    return WorkerInLane(lane, num_threads, build), made[0]


MESSAGE = cast(StepMessage, SimpleNamespace(step_id=7))


def test_workers_of_a_lane_are_built_and_compute_on_one_thread_that_is_not_the_callers() -> None:
    lane = Lane()
    (first, of_first), (second, of_second) = in_lane(lane), in_lane(lane)
    assert first.execute(MESSAGE).step_id == second.execute(MESSAGE).step_id == 7
    first.close()
    threads = {thread for _, thread, _ in of_first.calls + of_second.calls}
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_each_worker_keeps_its_own_number_of_threads_for_operators() -> None:
    lane, default = Lane(), torch.get_num_threads()
    (one, of_one), (any_number, of_any) = in_lane(lane, 1), in_lane(lane)
    for _ in range(2):
        one.execute(MESSAGE)
        any_number.execute(MESSAGE)
    assert [count for _, _, count in of_one.calls] == [1, 1, 1]
    assert [count for _, _, count in of_any.calls] == [default] * 3


def test_parts_are_prepared_beside_the_steps() -> None:
    worker, recorded = in_lane(Lane())
    worker.prepare({})
    assert recorded.calls[-1][:2] == ("prepare", threading.get_ident())


def test_what_a_worker_raises_reaches_its_caller_and_the_lane_goes_on() -> None:
    lane = Lane()
    with pytest.raises(ZeroDivisionError):
        WorkerInLane(lane, None, lambda: cast(Worker, 1 // 0))
    worker, _ = in_lane(lane)
    assert worker.execute(MESSAGE).step_id == 7


def lanes() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "hotswap-lane"}


def test_a_lane_keeps_no_process_from_ending_and_ends_with_the_last_one_who_holds_it() -> None:
    before = lanes()
    worker, _ = in_lane(Lane())
    [thread] = lanes() - before
    assert thread.daemon, "a step that hangs would be waited for at the end of the process"
    worker.execute(MESSAGE)
    assert thread.is_alive()
    del worker
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.parametrize("raises", [False, True])
def test_a_lane_that_waits_holds_nothing_of_its_last_turn(raises: bool) -> None:
    class Message(SimpleNamespace):
        pass

    lane, message = Lane(), Message(step_id=7)
    known = weakref.ref(message)

    def turn(given: Message) -> int:
        return 1 // (0 if raises else given.step_id)

    gc.disable()
    try:
        try:
            lane.run(None, turn, message)
        except ZeroDivisionError:
            assert raises
        del message
        lane.run(None, int)  # by now it has gone on
        assert known() is None
    finally:
        gc.enable()


def test_models_hand_out_a_lane_for_each_place_in_a_deployment_and_none_unless_engines_take_turns() -> None:
    """Engines of one deployment compute at the same time: on one lane each would wait for the others."""
    assert SharedModels(2).lane(0) is None
    shared = SharedModels(2, in_turn=True)
    assert shared.lane(0) is shared.lane(0) is not shared.lane(1)
