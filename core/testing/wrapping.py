"""A scheduler around another one, for tests that watch or disturb it."""

from typing import Any

from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.scheduler import PlanContext, Scheduler, StepOutcome, StepPlan


class Wrapped(Scheduler):
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Scheduler) -> None:
        super().__init__()
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    def describe(self) -> Description:
        return self.inner.describe()

    def admit(self, view: Any) -> None:
        self.inner.admit(view)

    def drop(self, request_id: str) -> None:
        self.inner.drop(request_id)

    def plan(self, ctx: PlanContext) -> StepPlan:
        return self.inner.plan(ctx)

    def observe(self, outcome: StepOutcome) -> None:
        self.inner.observe(outcome)

    def next_wakeup(self) -> float | None:
        return self.inner.next_wakeup()
