"""The scheduler passes hotswap's conformance kit, and keeps its order."""

import inspect

from hotswap.core.testing.scheduler import SchedulerSuite
from hotswap_shortest_first import policy, scheduler
from hotswap_shortest_first.policy import ShortestFirst
from hotswap_shortest_first.scheduler import StrictScheduler


class TestStrict(SchedulerSuite):
    def make_scheduler(self):
        return StrictScheduler(StrictScheduler.Options(), {"policy": ShortestFirst()})

    def test_the_shortest_that_waits_is_served_first(self):
        rig = self.rig(max_running=1)
        requests = [rig.add("long", [1] * 30, 4), rig.add("short", [2] * 3, 4)]
        ended = []
        while rig.loop.pool.states or rig.loop.in_flight:
            rig.loop.turn()
            ended += [r.id for r in requests if rig.client.endings(r.id) and r.id not in ended]
        assert ended == ["short", "long"]


def test_each_part_fits_on_a_screen():
    for module in (policy, scheduler):
        assert len(inspect.getsource(module).splitlines()) <= 60
