"""New parts in their first steps: what they raise reaches no request, but brings the old parts back."""

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from hotswap.core.blame import blame
from hotswap.core.engine.pool import DONE, StepInFlight
from hotswap.core.errors import EngineStoppedError, ExchangeError
from hotswap.core.interfaces.kvcache import CacheUsage, KVCacheManager
from hotswap.core.interfaces.messages import Verdict

logger = logging.getLogger(__name__)

TRIAL_STEPS = 8
"""Steps with rows in which new parts must not raise, before the old ones are let go."""
REVERTS = 3
"""How often the old parts are brought back, where the first times fail and are undone."""


class Trial:
    """Runs on the loop's thread. ``kv`` and ``workers``: parts of these are on trial; a scheduler always is, the old
    one, too, since it has to get on with the others. ``speculator``: the new one's label, empty where there is none.
    ``settle`` lets the old parts go, ``revert`` brings them back: it is told the problem, and whether what runs can
    only be computed again.
    """

    def __init__(
        self, settle: Callable[[], None], revert: Callable[[str, bool], None], *, kv: bool, workers: bool,
        speculator: str = "",
    ) -> None:
        self._settle, self._revert, self._kv, self._workers = settle, revert, kv, workers
        self._speculator = speculator
        self.steps_left = TRIAL_STEPS
        self.problem: str | None = None
        self._void = False
        """Steps in flight count for nothing any more: what the workers say of them cannot be trusted."""
        self._lost = False
        self._reverts_left = REVERTS
        self.over = threading.Event()

    def fail(self, problem: str) -> None:
        """A part has raised. The old ones come back at the next turn of the loop."""
        self._lost |= self._kv
        self.problem = self.problem or problem

    def judge(self, step: StepInFlight, verdict: Verdict) -> bool:
        """Note it where parts of the workers are on trial and this step has failed, or a row of it: the first problem
        is why the old ones come back, and what is in the pages cannot be trusted any more. What a request has brought
        on itself says nothing of the parts, nor does a row of one that has ended.

        Whether the step counts for nothing, so that its requests are computed again: it has failed, or one before it
        had."""
        if self._workers and not self._void:
            problem = verdict.error or next((
                row.error for state, row in zip(step.states, verdict.rows, strict=True)
                if row.error is not None and not row.own and state.status is not DONE), None)
            if problem is not None:
                self._lost = self._void = True
                self.problem = self.problem or problem
        return self._void

    def collected(self, counts: Mapping[str, int]) -> None:
        """A step with rows. A speculator that fails costs no request anything; a new one has to go all the same."""
        self.steps_left -= 1
        if self._speculator and counts.get("dropped_proposals"):
            self.fail(f"{self._speculator} made no proposal, or none that makes sense; the log says why")

    def conclude(self) -> bool:
        """Once a turn, with nothing half done: let the old parts go, or bring them back, where it is time. Whether the
        trial is over. EngineStoppedError where the old parts do not come back."""
        if self.problem is not None:
            if not self._reverted(self.problem):
                return False
        elif self.steps_left <= 0:
            self._settle()
        else:
            return False
        self.over.set()
        return True

    def cut_short(self) -> bool:
        """Somebody else needs the place: what has gone well so far has gone well. Whether the trial is over; where a
        part has raised it is not, and the old ones come back at the next turn of the loop, which ends if they do not.
        """
        self.steps_left = 0
        return self.problem is None and self.conclude()

    def let_go(self) -> None:
        """The loop has ended, and neither happens any more: what both know of it would keep it alive."""
        self._settle, self._revert = lambda: None, lambda problem, lost: None

    def _reverted(self, problem: str) -> bool:
        self._reverts_left -= 1
        try:
            self._revert(problem, self._lost)
        except EngineStoppedError:
            raise
        except Exception as error:
            failed = f"the new parts failed ({problem}), and the old ones do not come back: {blame(error)}"
            if self._reverts_left <= 0 or not isinstance(error, ExchangeError):
                raise EngineStoppedError(failed) from error
            logger.error("%s; trying again", failed)
            return False
        return True


class TriedKV:
    """A KV manager on trial. What it raises outside of a plan would leave the loop half way through a verdict; so it is
    told to the trial, and the loop goes on with an answer that changes nothing: all that runs is computed again."""

    def __init__(self, kv: KVCacheManager, trial: Trial) -> None:
        self.tried, self._trial = kv, trial
        self._usage = CacheUsage(0, 0, 0, 0, 0)

    @classmethod
    def around(cls, kv: KVCacheManager, trial: Trial) -> KVCacheManager:
        return cast(KVCacheManager, cls(kv, trial))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tried, name)

    def begin_plan(self) -> None:
        self._guarded("begin_plan", None)

    def usage(self) -> CacheUsage:
        """From any thread."""
        self._usage = self._guarded("usage", self._usage)
        return self._usage

    def owners(self) -> dict[str, int]:
        return self._guarded("owners", {})  # type: ignore[no-any-return]

    def commit(self, *arguments: Any) -> int:
        return self._guarded("commit", 0, *arguments)  # type: ignore[no-any-return]

    def release(self, *arguments: Any, **named: Any) -> Any:
        return self._guarded("release", None, *arguments, **named)

    def undo(self, entry: Any) -> None:
        self._guarded("undo", None, entry)

    def on_fence(self, fence: Any) -> None:
        self._guarded("on_fence", None, fence)

    def events(self) -> list[Any]:
        return self._guarded("events", [])  # type: ignore[no-any-return]

    def _guarded(self, method: str, otherwise: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return getattr(self.tried, method)(*arguments, **named)
        except Exception as error:
            problem = blame(error, self.tried, method)
            logger.exception("%s", problem)
            self._trial.fail(problem)
            return otherwise
