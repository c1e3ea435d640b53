"""Our schedulers pass the kit that we give to plugin authors."""

import pytest

from hotswap.core.interfaces.scheduler import Scheduler
from hotswap.core.testing.rig import build
from hotswap.core.testing.scheduler import SchedulerSuite


class TestChunked(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked")


class TestChunkedInSmallChunks(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "chunked", max_chunk=3)


class TestContinuous(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "continuous")


class TestContinuousWithPriority(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "continuous", policy="priority")


class TestStatic(SchedulerSuite):
    def make_scheduler(self) -> Scheduler:
        return build("scheduler", "static")


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
