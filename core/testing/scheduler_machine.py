"""Random lives of an engine under a scheduler: arrivals, turns, aborts, failing plans, a successor, until all is done.

Whatever the order of events, each request gets exactly the toy language's tokens, one ending and no more, no plan
breaks a rule, and nothing is left behind. The device runs late and checks every read; see
:mod:`hotswap.core.testing.fakes`.
"""

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotswap.core.interfaces.scheduler import PlanContext, Scheduler, StepPlan
from hotswap.core.request import Request
from hotswap.core.testing.rig import Rig, assert_clean, expected, make_rig
from hotswap.core.testing.wrapping import Noted

MAX_LEN = 48
PAGE_SIZES = (1, 2, 4, 8)


PLANNED = "planned by the machine"


class PlannedFailure(Exception):
    """Raised after a whole plan was made, so that all of it must be undone."""


class Fallible(Noted):
    """``failing``: the next plan is made, and then lost to an exception."""

    failing = False

    def plan(self, ctx: PlanContext) -> StepPlan:
        plan = super().plan(ctx)
        if self.failing:
            self.failing = False
            raise PlannedFailure(PLANNED)
        return plan

    def _refused(self, error: str) -> None:
        if PLANNED not in error:
            super()._refused(error)


class SchedulerMachine(RuleBasedStateMachine):
    """Subclasses, or the factory that makes them, set ``make_scheduler`` and ``kv``."""

    make_scheduler: Callable[[], Scheduler]
    kv: str

    @initialize(
        page_size=st.sampled_from(PAGE_SIZES), room=st.floats(1.0, 3.0), budget=st.integers(4, 40),
        slots=st.integers(1, 5), depth=st.sampled_from(((1, True), (2, True), (3, False))),
        lookahead=st.sampled_from((0, 0, 3)), windows=st.sampled_from(({"full": None}, {"full": None, "window": 5})),
    )
    def begin(self, page_size: int, room: float, budget: int, slots: int, depth: tuple[int, bool], lookahead: int,
              windows: dict[str, int | None]) -> None:
        self.errors: list[str] = []
        self.scheduler = Fallible(self.make_scheduler(), self.errors)
        self.rig: Rig = make_rig(
            self.scheduler, self.kv, observers=self.scheduler.hub,
            windows=windows if self.kv != "contiguous" else None, page_size=page_size,
            num_pages=2 + -(-int(MAX_LEN * room) // page_size), max_model_len=MAX_LEN, max_running=slots,
            max_batch_tokens=max(budget, slots, lookahead + 1), depth=depth[0], chained=depth[1], lookahead=lookahead)
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    @precondition(lambda self: len(self.requests) < 12)
    @rule(prompt=st.lists(st.integers(0, 12), min_size=1, max_size=MAX_LEN - 2), again=st.booleans(),
          output=st.integers(1, MAX_LEN), priority=st.integers(0, 2), stop=st.booleans(), tenant=st.sampled_from("ab"))
    def arrive(
        self, prompt: list[int], again: bool, output: int, priority: int, stop: bool, tenant: str,
    ) -> None:
        parent = self.requests[-1] if again and self.requests else None
        if parent is not None:
            prompt = parent.prompt_token_ids
        self.requests.append(self.rig.add(
            f"r{len(self.requests)}", prompt, min(output, MAX_LEN - len(prompt)), priority=priority, tenant=tenant,
            fork_of=parent.id if parent is not None else None, eos_token_ids=frozenset([5] if stop else [])))

    @rule(turns=st.integers(1, 6))
    def turn(self, turns: int) -> None:
        for _ in range(turns):
            self.rig.loop.turn()
            self.rig.clock.advance(0.01)

    @precondition(lambda self: self.rig.loop.pool.states)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.rig.loop.pool.states)))
        self.aborted.add(name)
        self.rig.loop.abort(name)

    @precondition(lambda self: not self.rig.loop.failed_plans)  # several in a row end the requests, as they should
    @rule()
    def lose_a_plan(self) -> None:
        self.scheduler.failing = True
        self.rig.loop.turn()
        self.scheduler.failing = False

    @rule()
    def exchange(self) -> None:
        """A successor is told of those that wait, and serves those that run."""
        self.scheduler = Fallible(self.make_scheduler(), self.errors)
        self.rig.loop.parts.scheduler = self.scheduler
        for state in self.rig.loop.pool.states.values():
            if not state.running:
                self.scheduler.admit(state)

    @invariant()
    def pages_add_up(self) -> None:
        if hasattr(self, "rig"):
            assert not self.errors, self.errors[0]
            self.rig.loop.parts.kv.check()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        self.rig.run()
        assert not self.errors, self.errors[0]
        for request in self.requests:
            tokens, wanted = self.rig.client.tokens(request.id), expected(request)
            assert tokens == (wanted[: len(tokens)] if request.id in self.aborted else wanted), request.id
            assert len(self.rig.client.endings(request.id)) == 1, f"{request.id} must end once"
        assert_clean(self.rig)
