"""Our schedulers pass the kit that we give to plugin authors."""

from typing import Any

import pytest

from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView, Scheduler
from hotswap.core.testing.rig import build
from hotswap.core.testing.scheduler import SchedulerSuite


class TestChunked(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked")


class TestChunkedInSmallChunks(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", max_chunk=3)


class TestChunkedWithLittleBesideDecodes(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", beside_decodes=2)


class TestChunkedWithMoreBesideDecodesForABacklog(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", beside_decodes=1, beside_decodes_backlog=4)


class TestContinuous(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "continuous")


class TestContinuousWithPriority(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "continuous", policy="priority")


class TestStatic(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "static")


class TestPrefillFirst(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "prefill_first")


class TestPrefillFirstInTurns(SchedulerSuite):
    kv = "prefix"

    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "prefill_first", max_prefills_in_a_row=1, policy="priority")


class TestShortestFirst(SchedulerSuite):
    machine_examples = 30

    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", policy="shortest_first")


class TestLongestPrefixFirst(SchedulerSuite):
    kv = "prefix"
    machine_examples = 30

    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "continuous", policy={"use": "longest_prefix_first", "max_overtaken": 3})


class TestFairShare(SchedulerSuite):
    machine_examples = 30

    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", policy="fair_share")


class Ageing(QueuePolicy):
    """By the time that is left of a patience, which is shorter for short prompts: keys change while requests wait."""

    dynamic = preemptive = True

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        waited = now - view.arrival
        return (round(view.prompt_length * 0.01 - waited * (1 + view.prompt_length % 3), 9), view.sequence)


def with_ageing(use: str) -> Scheduler:
    scheduler = build("scheduler", use)
    scheduler.policy = scheduler.waiting.policy = Ageing()
    return scheduler


class TestChunkedWithAPolicyOfChangingKeys(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return with_ageing("chunked")


class TestContinuousWithAPolicyOfChangingKeys(SchedulerSuite):
    kv = "prefix"

    def make_scheduler(self) -> Scheduler:
        return with_ageing("continuous")


class TestChunkedOnPrefixCache(SchedulerSuite):
    kv = "prefix"

    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", policy="priority")


class TestChunkedOnContiguousCache(SchedulerSuite):
    kv = "contiguous"

    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked")

    @pytest.mark.skip("a contiguous cache has no room for a second request here, so there is no shortage to test")
    def test_shortage_ends_with_everybody_served(self) -> None: ...
