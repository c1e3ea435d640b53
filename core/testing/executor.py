"""What every executor must do. The whole test file of an executor::

    class TestMine(ExecutorSuite):
        def make_executor(self):
            return MyExecutor()

Its workers are toys that fail as they are told (:mod:`hotswap.core.testing.ranks`), in this process or in others.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.interfaces.kvcache import CachePlan, GroupPlan
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.parallel import Executor, MeshDim, RankPlan
from hotswap.core.interfaces.scheduler import Row
from hotswap.core.testing.ranks import FACTS, ToyFactory

STEP_S = 0.3
"""What a slow step takes."""


def step(number: int) -> StepMessage:
    return StepMessage(number, [Row(f"r{number}", 1)])


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


class ExecutorSuite:
    """Subclass it and provide ``make_executor``."""

    stop_bound_s = 20.0
    """``stop`` must be over by then, whatever runs."""

    def make_executor(self) -> Executor:
        raise NotImplementedError("return a new instance of the executor under test")

    @property
    def plan(self) -> RankPlan:
        """Two ranks for an executor that offers them."""
        several = "ranks" in self.make_executor().describe().offers
        return RankPlan((MeshDim("tensor", 2, ("heads",)),)) if several else RankPlan()

    @contextmanager
    def launched(self, **faults: Any) -> Iterator[Executor]:
        """An executor whose workers have room for pages; ``faults``: see ``hotswap.core.testing.ranks``."""
        executor = self.make_executor()
        try:
            assert executor.launch(ToyFactory(faults), self.plan).facts == FACTS
            executor.allocate(CachePlan({"full": GroupPlan(9, 4)}))
            yield executor
        finally:
            executor.stop()

    def test_each_verdict_belongs_to_its_step_in_the_order_of_submission(self) -> None:
        with self.launched() as executor:
            tickets = [executor.submit(step(number)) for number in (1, 2, 3)]
            verdicts = [executor.collect(ticket) for ticket in tickets]
            assert [(verdict.step_id, verdict.rows[0].request, verdict.rows[0].kept) for verdict in verdicts] == [
                (number, f"r{number}", [number]) for number in (1, 2, 3)]
            assert executor.health() is None

    def test_submit_returns_before_the_step_has_run(self) -> None:
        with self.launched(seconds=STEP_S) as executor:
            began = time.monotonic()
            tickets = [executor.submit(step(number)) for number in (1, 2)]
            assert time.monotonic() - began < STEP_S, "submit has waited for the step"
            assert not executor.done(tickets[1]), "a step that cannot have run is said to be done"
            assert [executor.collect(ticket).step_id for ticket in tickets] == [1, 2]

    def test_a_step_that_is_done_is_collected_at_once(self) -> None:
        with self.launched(seconds=STEP_S) as executor:
            ticket = executor.submit(step(1))
            until(lambda: executor.done(ticket))
            began = time.monotonic()
            executor.collect(ticket)
            assert time.monotonic() - began < STEP_S / 2, "collect has waited although the step was done"

    def test_a_step_that_raises_ends_with_an_error_or_ends_the_engine_by_name(self) -> None:
        """One rank fails its step and goes on. What fails on one of several ends them, since they are not in step any
        more."""
        with self.launched(**{"raise": 1}) as executor:
            try:
                first = executor.collect(executor.submit(step(1)))
            except EngineStoppedError as error:
                assert "planted in a step" in str(error)
                assert executor.health() is not None
                return
            assert first.error is not None and "planted in a step" in first.error
            assert executor.collect(executor.submit(step(2))).error is None, "a failed step must not end the next one"
            assert executor.health() is None

    def test_a_worker_that_dies_is_told_by_collect_by_submit_and_by_health(self) -> None:
        with self.launched(die=2) as executor:
            assert executor.collect(executor.submit(step(1))).error is None
            ticket = executor.submit(step(2))
            with pytest.raises(EngineStoppedError):
                _collect(executor, ticket)
            assert executor.health(), "health() says nothing of a worker that has died"
            with pytest.raises(EngineStoppedError):
                executor.collect(executor.submit(step(3)))

    def test_a_worker_that_refuses_to_start_refuses_the_config(self) -> None:
        executor = self.make_executor()
        try:
            with pytest.raises(ConfigError, match="the weights are green"):
                executor.launch(ToyFactory({"refuse": "the weights are green"}), self.plan)
        finally:
            executor.stop()

    def test_every_rank_reports(self) -> None:
        with self.launched() as executor:
            reports = executor.report()
            assert [report.rank for report in reports] == list(range(self.plan.world_size))
            assert {report.kv_bytes for report in reports} == {9}, "allocate has not reached every rank"

    def test_stop_closes_the_workers_within_its_bound_and_may_come_twice(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        with self.launched(closed=str(tmp_path / "closed")) as executor:
            executor.collect(executor.submit(step(1)))
            began = time.monotonic()
            executor.stop()
            executor.stop()
            assert time.monotonic() - began < self.stop_bound_s
            assert (tmp_path / "closed").exists(), "the worker was not closed"
            assert executor.health(), "a stopped executor is not well"
            with pytest.raises(EngineStoppedError):
                executor.collect(executor.submit(step(2)))
        until(lambda: not set(threading.enumerate()) - before)

    def test_ranks_that_it_cannot_run_are_refused(self) -> None:
        executor = self.make_executor()
        if "ranks" in executor.describe().offers:
            return
        try:
            with pytest.raises(ConfigError):
                executor.launch(ToyFactory({}), RankPlan((MeshDim("tensor", 2, ("heads",)),)))
        finally:
            executor.stop()


def _collect(executor: Executor, ticket: int) -> Verdict:
    """A verdict that waits for ever would hang the test."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(executor.collect(ticket))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert found, "collect waits for a worker that is dead"
    if isinstance(found[0], BaseException):
        raise found[0]
    verdict: Verdict = found[0]
    return verdict
