"""What a verdict changes: tokens are kept, bounds corrected, pages become shareable, suspensions and transfers end."""

import logging
from typing import NamedTuple

from hotswap.core.engine.forks import has_prompt
from hotswap.core.engine.lifecycle import Lifecycle
from hotswap.core.engine.outputs import absorb, keep_prompt_logprobs
from hotswap.core.engine.pool import DONE, RUNNING, SUSPENDING, WAITING, RequestState, StepInFlight
from hotswap.core.interfaces.messages import RowVerdict, Verdict
from hotswap.core.request import FinishReason, RequestOutput

logger = logging.getLogger(__name__)


class Applied(NamedTuple):
    """What a step came to. ``kept``: request and number of tokens. ``voided``: rows of requests that had ended."""

    kept: list[tuple[str, int]]
    voided: list[str]


class Committer:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def apply(self, step: StepInFlight, verdict: Verdict, now: float) -> Applied:
        """Carry out the verdict of a step that has just been collected, and let its fence pass."""
        applied = Applied([], [])
        if verdict.error is None and len(verdict.rows) != len(step.states):
            verdict.error = f"the verdict has {len(verdict.rows)} rows, the message had {len(step.states)}"
        trial = self._lifecycle.trial
        if trial is not None and trial.judge(step, verdict):
            for state, flying in zip(step.states, step.rows, strict=True):
                state.land(flying)
        elif verdict.error is None:
            self._apply_rows(step, verdict.rows, now, applied)
        else:
            self._fail_step(step, verdict.error)
        self._apply_suspensions(verdict)
        self._end_transfers(verdict)
        self._lifecycle.parts.kv.on_fence(step.step_id)
        if trial is not None and step.states:
            trial.collected(verdict.counts)
        return applied

    def _apply_rows(self, step: StepInFlight, rows: list[RowVerdict], now: float, applied: Applied) -> None:
        """All outputs leave behind the last row: whoever wakes at the first of them finds the others there, and does
        not take the interpreter from the rows between. A row that raises keeps back none of those before it."""
        leaving: list[tuple[RequestState, RequestOutput]] = []
        try:
            self._settle_rows(step, rows, now, applied, leaving)
        finally:
            for state, output in leaving:
                self._lifecycle.deliver(state, output)

    def _settle_rows(
        self, step: StepInFlight, rows: list[RowVerdict], now: float, applied: Applied,
        leaving: list[tuple[RequestState, RequestOutput]],
    ) -> None:
        lifecycle, (kept, voided) = self._lifecycle, applied
        for state, flying, row in zip(step.states, step.rows, rows, strict=True):
            state.land(flying)
            if state.status is DONE:
                voided.append(state.id)
                continue
            if row.error is not None or row.request != state.id:
                error = row.error or f"the worker answered for {row.request} instead"
                lifecycle.finish(state, FinishReason.ERROR, error)
                continue
            if row.prompt_logprobs:
                keep_prompt_logprobs(state, row)
            if row.kept:
                try:
                    output, ending = absorb(state, row, now)
                except Exception as error:
                    logger.exception("the detokeniser of request %s raised", state.id)
                    problem = f"the detokeniser raised {type(error).__name__}: {error}"
                    lifecycle.finish(state, FinishReason.ERROR, problem)
                    continue
                kept.append((state.id, len(output.token_ids)))
            if state.status is RUNNING:  # else its table went with the suspension
                self._settle(state, row)
            if row.kept:
                if ending is not None:
                    output.handoff = lifecycle.retire(state, ending.reason)
                leaving.append((state, output))

    def _settle(self, state: RequestState, row: RowVerdict) -> None:
        """Correct the bound, and tell the KV manager what is known and sure where that lets it do something."""
        known, computed = len(state.tokens), row.computed
        # Tokens that a stop rule cut off were computed but are not the request's: they must not become shareable.
        state.settle(computed if computed < known else known, row.lag)
        if state.held and has_prompt(state, self._lifecycle.limits.reuse_tail):
            self._lifecycle.let_children_go(state)
        if state.verified >= state.commit_due:
            state.commit(self._lifecycle.parts.kv)

    def _apply_suspensions(self, verdict: Verdict) -> None:
        for suspended in verdict.suspended:
            state = self._lifecycle.pool.states.get(suspended.request)
            if state is None or state.status is not SUSPENDING:
                continue
            state.status = WAITING
            if suspended.swapped:
                self._lifecycle.transfers.suspended(state, suspended.computed)
            state.computed = state.verified = state.kept_in_flight = 0
            state.on_worker = False
            state.preemptions += 1
            self._lifecycle.admit(state)
            self._lifecycle.let_children_go(state)

    def _end_transfers(self, verdict: Verdict) -> None:
        """Transfers that every rank has done: who waited for one can step, and pages behind it are free."""
        for name, tokens in self._lifecycle.transfers.ended(verdict.finished_transfers):
            if (state := self._lifecycle.transfers.filling.get(name)) is not None:
                self._lifecycle.transfers.detach(state)
                if tokens is None:
                    state.verified = state.computed
                else:
                    self._start_again(state, tokens)
            self._lifecycle.parts.kv.on_fence(name)

    def _start_again(self, state: RequestState, tokens: int) -> None:
        """Only the first ``tokens`` have come into a request's pages. It waits again; those that came are found."""
        state.verified = max(state.verified, min(tokens, state.computed))
        state.commit(self._lifecycle.parts.kv)
        self._lifecycle.parts.kv.release(state.id, self._lifecycle.pool.fences())
        self._lifecycle.pool.pause(state, WAITING)
        self._lifecycle.drops.append(state.id)
        state.on_worker, state.computed, state.verified, state.cached_tokens = False, 0, 0, None
        self._lifecycle.admit(state)

    def _fail_step(self, step: StepInFlight, problem: str) -> None:
        for state, flying in zip(step.states, step.rows, strict=True):
            state.land(flying)
            if state.status is not DONE:
                error = f"the step that computed this request failed: {problem}"
                self._lifecycle.finish(state, FinishReason.ERROR, error)
