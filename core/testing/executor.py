"""What every executor must do. The whole test file of an executor::

    class TestMine(ExecutorSuite):
        def make_executor(self):
            return MyExecutor()

Its workers are toys that fail as they are told (:mod:`hotswap.core.testing.ranks`), in this process or in others.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CachePlan, GroupPlan
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.parallel import Executor, MeshDim, RankPlan, Take
from hotswap.core.interfaces.scheduler import Row
from hotswap.core.testing.ranks import BROKEN, BROKEN_LATER, FACTS, TOO_MANY, ToyFactory
from hotswap.core.testing.rig import build

STEP_S = 0.3
"""What a slow step takes."""

PREPARE_S = 1.0
"""What slow parts take to be prepared."""


def step(number: int) -> StepMessage:
    return StepMessage(number, [Row(f"r{number}", 1)])


def pages(count: int) -> CachePlan:
    return CachePlan({"full": GroupPlan(count, 4)})


def drafting(count: int) -> dict[str, Component]:
    """New parts for the workers, told apart by the number of their drafts."""
    return {"speculator": build("speculator", "ngram", max_draft=count)}


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


class ExecutorSuite:
    """Subclass it and provide ``make_executor``."""

    stop_bound_s = 20.0
    """``stop`` must be over by then, whatever runs."""
    _numbers = itertools.count(1000)
    """Of steps whose numbers mean nothing."""

    def make_executor(self) -> Executor:
        raise NotImplementedError("return a new instance of the executor under test")

    @property
    def plan(self) -> RankPlan:
        """Two ranks for an executor that offers them."""
        several = "ranks" in self.make_executor().describe().offers
        return RankPlan((MeshDim("tensor", 2, ("heads",)),)) if several else RankPlan()

    @contextmanager
    def launched(self, **faults: Any) -> Iterator[Executor]:
        """An executor whose workers have room for 9 pages; ``faults``: see ``hotswap.core.testing.ranks``."""
        executor = self.make_executor()
        try:
            assert executor.launch(ToyFactory(faults), self.plan).facts == FACTS
            executor.allocate(pages(9))
            yield executor
        finally:
            executor.stop()

    @property
    def last_rank(self) -> int:
        return self.plan.world_size - 1

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
                _collect(executor, executor.submit(step(3)))

    def test_a_worker_that_refuses_to_start_refuses_the_config(self) -> None:
        executor = self.make_executor()
        try:
            with pytest.raises(ConfigError, match="the weights are green"):
                executor.launch(ToyFactory({"refuse": "the weights are green"}), self.plan)
        finally:
            executor.stop()

    def test_a_rank_without_room_for_the_pages_is_a_memory_error(self) -> None:
        """By which the one who divides the memory knows that another division might fit."""
        with pytest.raises(MemoryError, match="no room for pages"), self.launched(short=self.last_rank):
            pass

    def test_every_rank_reports(self) -> None:
        with self.launched() as executor:
            reports = executor.report()
            assert [report.rank for report in reports] == list(range(self.plan.world_size))
            assert {report.kv_bytes for report in reports} == {9}, "allocate has not reached every rank"

    def test_stop_closes_the_workers_within_its_bound_and_may_come_twice(self, tmp_path: Path) -> None:
        """Whatever is still to be done: who waits for it gets a verdict, or is told."""
        before = set(threading.enumerate())
        with self.launched(closed=str(tmp_path / "closed"), seconds=STEP_S) as executor:
            waiting = [executor.submit(step(number)) for number in (1, 2)]
            began = time.monotonic()
            executor.stop()
            executor.stop()
            assert time.monotonic() - began < self.stop_bound_s
            for ticket in waiting:
                with suppress(EngineStoppedError):
                    _collect(executor, ticket)
            for rank in range(self.plan.world_size):
                assert (tmp_path / f"closed{rank}").exists(), f"the worker of rank {rank} was not closed"
            assert executor.health(), "a stopped executor is not well"
            with pytest.raises(EngineStoppedError):
                _collect(executor, executor.submit(step(3)))
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

    # ------------------------------------------------------------------ exchange

    @contextmanager
    def exchanging(self, **faults: Any) -> Iterator[Executor]:
        """As ``launched``, of an executor that exchanges parts of its workers."""
        if "exchange" not in self.make_executor().describe().offers:
            pytest.skip("it does not offer 'exchange'")
        with self.launched(**faults) as executor:
            yield executor

    def everywhere(self, executor: Executor, **expected: int | None) -> None:
        """Every rank says the same of its parts, and a step goes well."""
        for report in executor.report():
            found = {name: report.counts.get(name) for name in expected}
            assert found == expected, f"rank {report.rank} has {found}, it should have {expected}"
        number = next(self._numbers)
        assert _collect(executor, executor.submit(step(number))).step_id == number
        assert executor.health() is None

    def test_prepared_parts_wait_until_an_exchange_puts_them_in_place(self) -> None:
        with self.exchanging() as executor:
            info = executor.prepare(drafting(3))
            assert (info.facts, info.lookahead) == (FACTS, 3), "prepare() returns what launch() would have"
            self.everywhere(executor, placed=0, prepared=3)
            executor.exchange(pages(9), True, Take.PREPARED)
            self.everywhere(executor, placed=3, prepared=None, former=0, allocated=1)
            executor.exchange(pages(17), False, Take.SAME)
            self.everywhere(executor, placed=3, allocated=2)
            assert {report.kv_bytes for report in executor.report()} == {17}, "the new plan has not reached every rank"

    def test_steps_go_on_while_parts_are_prepared(self) -> None:
        with self.exchanging(prepare_s=PREPARE_S) as executor:
            preparing = threading.Thread(target=executor.prepare, args=(drafting(3),))
            preparing.start()
            time.sleep(PREPARE_S / 10)
            executor.collect(executor.submit(step(1)))
            beside = preparing.is_alive()
            preparing.join()
            assert beside, "a step has waited for parts that are being prepared"
            self.everywhere(executor, placed=0, prepared=3)

    def test_what_was_prepared_before_is_let_go(self) -> None:
        with self.exchanging() as executor:
            executor.prepare(drafting(3))
            assert executor.prepare(drafting(5)).lookahead == 5
            executor.exchange(pages(9), True, Take.PREPARED)
            self.everywhere(executor, placed=5, prepared=None)
            executor.prepare(drafting(7))
            assert executor.prepare({}).lookahead == 5, "without new parts, what is there needs what it needed"
            self.everywhere(executor, placed=5, prepared=None)

    def test_an_exchange_for_which_nothing_was_prepared_fails_and_is_undone(self) -> None:
        with self.exchanging() as executor:
            executor.prepare(drafting(3))
            executor.exchange(pages(9), True, Take.PREPARED)
            executor.settle()
            with pytest.raises(Exception, match="no parts were prepared"):
                executor.exchange(pages(9), True, Take.PREPARED)
            executor.exchange(pages(9), True, Take.FORMER)
            executor.settle()
            self.everywhere(executor, placed=3, prepared=None)

    def test_an_exchange_is_taken_back_and_again_until_it_is_settled(self) -> None:
        with self.exchanging() as executor:
            executor.prepare(drafting(3))
            executor.exchange(pages(9), True, Take.PREPARED)
            executor.exchange(pages(9), True, Take.FORMER)
            self.everywhere(executor, placed=0, former=3)
            executor.exchange(pages(9), True, Take.FORMER)
            self.everywhere(executor, placed=3, former=0)
            executor.settle()
            self.everywhere(executor, placed=3, former=None)

    def test_parts_that_a_rank_refuses_or_cannot_load_are_prepared_on_none(self) -> None:
        with self.exchanging(picky=self.last_rank) as executor:
            for drafts, error, message in (
                (TOO_MANY, ConfigError, "too many drafts"), (BROKEN, Exception, "planted while parts are prepared"),
            ):
                executor.prepare(drafting(3))
                with pytest.raises(error, match=message):
                    executor.prepare(drafting(drafts))
                self.everywhere(executor, placed=0, prepared=None, former=None)

    def test_an_exchange_that_fails_on_a_rank_fails_and_is_taken_back_on_all(self) -> None:
        with self.exchanging(picky=self.last_rank) as executor:
            executor.prepare(drafting(BROKEN_LATER))
            with pytest.raises(Exception, match="planted in an exchange"):
                executor.exchange(pages(17), False, Take.PREPARED)
            executor.exchange(pages(9), False, Take.FORMER)
            executor.settle()
            self.everywhere(executor, placed=0, prepared=None, former=None)
            assert {report.kv_bytes for report in executor.report()} == {9}


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
