"""The conformance kit for schedulers. A plugin's whole test file::

    class TestMine(SchedulerSuite):
        def make_scheduler(self):
            return MyScheduler(MyScheduler.Options(), {"policy": FirstComeFirstServed()})

Every test drives the real loop on the fake device of :mod:`hotswap.core.testing.fakes`, so a plan that breaks a rule,
reads a page too early or loses a request shows by itself.
"""

import random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from hotswap.core.interfaces.scheduler import PlanContext, Scheduler, StepPlan
from hotswap.core.testing.rig import Rig, assert_clean, expected, make_rig, random_prompt
from hotswap.core.testing.scheduler_machine import SchedulerMachine
from hotswap.core.testing.wrapping import Noted


class _Watched(Noted):
    """Notes plans that do nothing, too."""

    def __init__(self, inner: Scheduler, errors: list[str]) -> None:
        super().__init__(inner, errors)
        self.idle_plans = 0
        """Plans in a row that did nothing although requests waited, nothing ran and nothing was in flight, and that did
        not say when to plan again."""

    def plan(self, ctx: PlanContext) -> StepPlan:
        could_start = ctx.waiting > 0 and not ctx.running and ctx.nothing_in_flight
        plan = super().plan(ctx)
        idle = could_start and not plan.rows and self.next_wakeup() is None
        self.idle_plans = self.idle_plans + 1 if idle else 0
        if self.idle_plans > 1:
            self.errors.append("requests wait, nothing runs, the cache is free, and the scheduler starts nothing")
        return plan


class SchedulerSuite:
    """Subclass it and provide ``make_scheduler``."""

    kv: str = "paged"
    """The KV manager that the tests run on."""
    machine_examples = 60
    """Random lives per run of the suite."""

    def make_scheduler(self) -> Scheduler:
        raise NotImplementedError("return a new instance of the scheduler under test")

    def rig(self, **settings: Any) -> Rig:
        watched = _Watched(self.make_scheduler(), [])
        return make_rig(watched, settings.pop("kv", self.kv), observers=watched.hub, **settings)

    def finish(self, rig: Rig, requests: list[Any]) -> None:
        """Run to the end: nothing was raised, no plan refused, each request has exactly its tokens, everything came
        back."""
        rig.run()
        watched = rig.loop.parts.scheduler
        assert isinstance(watched, _Watched)
        assert not watched.errors, watched.errors[0]
        for request in requests:
            assert rig.client.tokens(request.id) == expected(request), f"{request.id} got other tokens"
        assert_clean(rig)

    def test_random_lives_end_with_everybody_served(self) -> None:
        machine = type("Machine", (SchedulerMachine,), {
            "make_scheduler": staticmethod(self.make_scheduler), "kv": self.kv})
        run_state_machine_as_test(machine, settings=settings(
            max_examples=self.machine_examples, stateful_step_count=30, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False,
        ))

    def test_requests_get_exactly_their_tokens_at_every_depth(self) -> None:
        for depth, chained in [(1, True), (2, True), (3, False)]:
            rig = self.rig(depth=depth, chained=chained, max_running=4, max_batch_tokens=16)
            rng = random.Random(depth)
            requests = [rig.add(f"r{i}", random_prompt(rng, 20, [1, 2, 3]), rng.randrange(1, 20)) for i in range(10)]
            self.finish(rig, requests)

    def test_drafts_change_nothing_but_the_speed(self) -> None:
        for skill in (0.0, 0.6, 1.0):
            rig = self.rig(lookahead=3, skill=skill, depth=2)
            requests = [rig.add(f"r{i}", [i + 1, 2, 3], 20) for i in range(5)]
            self.finish(rig, requests)

    def test_budget_and_row_limit_hold(self) -> None:
        """The context refuses a plan beyond them, so it is enough that none was refused."""
        rig = self.rig(max_batch_tokens=8, max_running=3)
        requests = [rig.add(f"r{i}", [1 + i % 9] * (5 + 3 * i), 6) for i in range(9)]
        self.finish(rig, requests)

    def test_a_prompt_longer_than_the_budget_is_served(self) -> None:
        rig = self.rig(max_batch_tokens=8)
        self.finish(rig, [rig.add("long", [i % 13 for i in range(50)], 4)])

    def test_shortage_ends_with_everybody_served(self) -> None:
        """Room for 1.3 requests: suspensions are allowed, endless ones are not."""
        rig = self.rig(num_pages=1 + 40, page_size=4, max_model_len=128, max_batch_tokens=64)
        requests = [rig.add(f"r{i}", [i + 1] * 50, 60) for i in range(2)]
        states = list(rig.loop.pool.states.values())
        self.finish(rig, requests)
        assert all(state.preemptions <= 2 for state in states), [state.preemptions for state in states]

    def test_an_old_request_does_not_starve_behind_new_ones(self) -> None:
        rig = self.rig(num_pages=1 + 33, page_size=4, max_running=2, max_batch_tokens=32)
        requests = [rig.add("old", [1] * 60, 20)]
        for i in range(300):
            if len(rig.loop.pool.states) < 6:
                requests.append(rig.add(f"new{i}", [2 + i % 9] * 5, 3))
            rig.loop.turn()
            rig.clock.advance(0.001)
            if rig.client.endings("old"):
                break
        assert rig.client.endings("old"), "300 turns were not enough for the oldest request"
        self.finish(rig, requests)

    def test_aborts_in_every_state_give_everything_back(self) -> None:
        for after in range(12):
            rig = self.rig(num_pages=1 + 40, page_size=4, depth=2, max_batch_tokens=16, max_running=3)
            requests = [rig.add(f"r{i}", [i + 1] * 30, 30) for i in range(4)]
            for _ in range(after):
                rig.loop.turn()
            for request in requests[::2]:
                rig.loop.abort(request.id)
                rig.loop.abort(request.id)
            self.finish(rig, requests[1::2])
            assert all(rig.client.endings(request.id) == ["abort"] for request in requests[::2])

    def test_a_successor_goes_on_where_it_left_off(self) -> None:
        """A scheduler owns nothing: a new instance is told of those that wait, and serves those that run."""
        rig = self.rig(max_running=2, max_batch_tokens=16)
        requests = [rig.add(f"r{i}", [i + 1] * 10, 12) for i in range(5)]
        for _ in range(4):
            rig.loop.turn()
        predecessor = rig.loop.parts.scheduler
        assert isinstance(predecessor, _Watched)
        successor = rig.loop.parts.scheduler = _Watched(self.make_scheduler(), predecessor.errors)
        for state in rig.loop.pool.states.values():
            if not state.running:
                successor.admit(state)
        self.finish(rig, requests)
