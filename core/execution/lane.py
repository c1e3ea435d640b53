"""Engines of one process that never compute at the same time can compute on one thread.

An OpenMP runtime gives every thread that calls torch's operators a team of its own. Where all teams together have more
threads than the machine has cores, idle teams included, waiting threads sleep at once instead of spinning for a while,
and each of a step's hundreds of operators pays for waking them: two engines on two cores, of which only one had work,
took a fifth longer for each step than one alone.
"""

import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.parallel import RankReport, Take, Worker, WorkerInfo

P = ParamSpec("P")
T = TypeVar("T")


class _Turn(NamedTuple):
    call: Callable[[], Any]
    done: Future[Any]


class Lane:
    """One thread; what is put on it runs in order. It ends when nobody holds the lane any more, and is a daemon: a step
    that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._turns: SimpleQueue[_Turn | None] = SimpleQueue()
        self._default = torch.get_num_threads()
        Thread(target=_serve, args=(self._turns,), name="hotswap-lane", daemon=True).start()
        weakref.finalize(self, self._turns.put, None).atexit = False

    def run(self, num_threads: int | None, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Wait for what ``call`` returns or raises. ``num_threads``: of its operators; None: torch's choice."""

        def turn() -> T:
            if torch.get_num_threads() != (wanted := num_threads or self._default):
                torch.set_num_threads(wanted)
            return call(*args, **kwargs)

        return self._put(turn).result()

    def _put(self, call: Callable[[], T]) -> Future[T]:
        done: Future[T] = Future()
        self._turns.put(_Turn(call, done))
        return done


def _serve(turns: SimpleQueue[_Turn | None]) -> None:
    """The thread. Between two turns it holds nothing of the last one, which may know a model."""
    while (turn := turns.get()) is not None:
        _carry_out(*turn)
        del turn


def _carry_out(call: Callable[[], Any], done: Future[Any]) -> None:
    try:
        done.set_result(call())
    except BaseException as error:
        done.set_exception(error)
        del done  # the error's traceback knows this frame: a ring


class WorkerInLane:
    """A :class:`Worker` that is built, and computes, on a lane."""

    def __init__(self, lane: Lane, num_threads: int | None, build: Callable[[], Worker]) -> None:
        self._lane, self._num_threads = lane, num_threads
        self._worker = lane.run(num_threads, build)

    def info(self) -> WorkerInfo:
        return self._worker.info()

    def allocate(self, plan: CachePlan) -> None:
        self._lane.run(self._num_threads, self._worker.allocate, plan)

    def execute(self, message: StepMessage) -> Verdict:
        return self._lane.run(self._num_threads, self._worker.execute, message)

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        return self._worker.prepare(parts)  # beside the steps

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        self._lane.run(self._num_threads, self._worker.exchange, plan, keeps_pages, take)

    def settle(self) -> None:
        self._lane.run(self._num_threads, self._worker.settle)

    def join(self) -> None:
        self._lane.run(self._num_threads, self._worker.join)

    def report(self) -> RankReport:
        return self._worker.report()

    def close(self) -> None:
        self._lane.run(self._num_threads, self._worker.close)
