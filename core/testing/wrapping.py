"""A scheduler around another one, for tests that watch or disturb it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.scheduler import PlanContext, Scheduler, StepOutcome, StepPlan
from hotswap.core.live import ObserverHub


@contextmanager
def noting(errors: list[str], method: str) -> Iterator[None]:
    """Write what is raised into ``errors`` on its way to a loop that logs it, undoes a plan, and tries again."""
    try:
        yield
    except Exception as error:
        errors.append(f"{method} raised {error!r}")
        raise


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


class Noted(Wrapped):
    """Writes into ``errors`` what the scheduler raises, and, as an observer on ``hub``, why its plans are refused: the
    loop logs both, and goes on."""

    def __init__(self, inner: Scheduler, errors: list[str]) -> None:
        super().__init__(inner)
        self.errors = errors

    @property
    def hub(self) -> ObserverHub:
        hub = ObserverHub()
        hub.listen("kit:noted", "hotswap_plan_failed", self._refused, ("error",))
        return hub

    def _refused(self, error: str) -> None:
        self.errors.append(error)

    def admit(self, view: Any) -> None:
        with noting(self.errors, "admit"):
            super().admit(view)

    def drop(self, request_id: str) -> None:
        with noting(self.errors, "drop"):
            super().drop(request_id)

    def observe(self, outcome: StepOutcome) -> None:
        with noting(self.errors, "observe"):
            super().observe(outcome)

    def next_wakeup(self) -> float | None:
        with noting(self.errors, "next_wakeup"):
            return super().next_wakeup()
