"""The one loop: plan, submit, collect, apply. Single-threaded and without a clock of its own.

Synchronous, overlapped and pipelined execution are this loop with another ``depth`` (steps in flight) and ``chained``
(whether one request may be in two of them).
"""

import logging
from collections import Counter

from hotswap.core.blame import blame
from hotswap.core.engine.clock import Clock
from hotswap.core.engine.commit import Committer
from hotswap.core.engine.context import Context, Limits, PlanError
from hotswap.core.engine.drafts import DraftCounts
from hotswap.core.engine.forks import find_parent
from hotswap.core.engine.lifecycle import Lifecycle
from hotswap.core.engine.parts import Parts
from hotswap.core.engine.pool import FlyingRow, RequestState, StepInFlight
from hotswap.core.engine.transfers import Transfers
from hotswap.core.errors import EngineStoppedError, RequestError
from hotswap.core.interfaces.deployment import EventListener
from hotswap.core.interfaces.kvcache import KVCacheManager
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.scheduler import StepOutcome
from hotswap.core.request import FinishReason, OutputSink, Request

logger = logging.getLogger(__name__)

PLAN_ATTEMPTS = 3
"""After so many failed plans in a row the request whose row is wrong ends with the scheduler's error, or all live ones
where it is nobody's in particular: they cannot be served."""


class EngineLoop:
    """``turn()`` does one thing and says whether it did any. Whoever drives it waits when it did not.

    ``depth``: greatest number of steps in flight. ``chained``: see the module.
    """

    def __init__(
        self, parts: Parts, limits: Limits, clock: Clock, depth: int = 1, chained: bool = True,
        transfers: Transfers | None = None,
    ) -> None:
        self.parts, self.clock, self.depth, self.chained = parts, clock, depth, chained
        self.transfers = transfers or Transfers()
        self.lifecycle = Lifecycle(parts, limits, clock, self.transfers)
        self.pool, self.in_flight = self.lifecycle.pool, self.lifecycle.pool.in_flight
        self._committer = Committer(self.lifecycle)
        self.submitted = self.steps = self.max_depth_seen = 0
        self.progress_at = clock.now()
        self.drafts = DraftCounts()
        self.events: Counter[str] = Counter()
        """What the workers' verdicts counted, since the start."""
        self.failed_plans = 0
        self.broken: str | None = None
        """Why no further turn can be taken."""
        self._listeners: list[EventListener] = []
        parts.kv.keep_events(parts.observers.active)

    # requests

    def add(self, request: Request, sink: OutputSink) -> None:
        now = self.clock.now()
        if not self.pool.states:
            self.progress_at = now
        left = self.limits.max_model_len - len(request.prompt_token_ids)
        most = min(request.sampling.max_tokens or left, left)
        if request.continued is not None and len(request.continued.tokens) >= most:
            raise RequestError(f"a request of {most} tokens cannot go on behind {len(request.continued.tokens)}")
        state = self.pool.add(request, sink, now, most)
        if self.parts.observers.active:
            self.parts.observers.notify("hotswap_request_arrived", request=state, time=now)
        if not (self.parts.forks and find_parent(state, self.pool.states, self.limits.reuse_tail)):
            self.lifecycle.admit(state)

    def abort(self, request_id: str) -> None:
        state = self.pool.states.get(request_id)
        if state is not None:
            self.lifecycle.finish(state, FinishReason.ABORT)

    def finish_all(self, reason: FinishReason, error: str | None = None) -> None:
        for state in list(self.pool.states.values()):
            try:
                self.lifecycle.finish(state, reason, error)
            except Exception:
                logger.exception("request %s could not give back what it holds", state.id)

    def watch(self, listener: EventListener) -> None:
        """Tell ``listener`` which cached pages come and go, from now on."""
        self._listeners.append(listener)
        self.parts.kv.keep_events(True)

    # the loop

    def turn(self) -> bool:
        if self.broken is not None:
            raise EngineStoppedError(self.broken)
        if self.lifecycle.trial is not None and self.lifecycle.trial.conclude():
            self.lifecycle.trial = None
        did = len(self.in_flight) < self.depth and self.plan_and_submit()
        if self.in_flight and (not did or len(self.in_flight) >= self.depth):
            self.collect()
            did = True
        if not self.pool.states:
            self.progress_at = self.clock.now()
            if not (did or self.in_flight):
                self.lifecycle.give_back_leaks()
        return did

    @property
    def limits(self) -> Limits:
        return self.lifecycle.limits

    @property
    def hears_pages(self) -> bool:
        """Whether anybody listens to what happens to cached pages."""
        return self.parts.observers.active or bool(self._listeners)

    @property
    def last_plan_error(self) -> str | None:
        """What went wrong in the scheduler, since the last plan that went well."""
        return self.lifecycle.scheduler_error

    def next_wakeup(self) -> float | None:
        """When the scheduler wants to plan again though nothing has happened; None where it does not, or raises."""
        asked: list[float | None] = [None]
        self.lifecycle.guard("next_wakeup", lambda: asked.append(self.parts.scheduler.next_wakeup()))
        return asked[-1]

    def plan_and_submit(self) -> bool:
        """Plan one step and hand it to the executor; False when there is nothing to hand over."""
        if not (self.pool.states or self.lifecycle.drops or self.transfers.pending):
            return False
        begun = self.clock.now()
        context = Context(
            self.pool, self.parts.kv, self.limits, self.submitted + 1, begun,
            chained=self.chained, slots=self.depth, in_flight=len(self.in_flight), transfers=self.transfers,
        )
        try:
            states = context.seal(self.parts.scheduler.plan(context))
        except Exception as error:
            self._plan_failed(context, error)
            return not self.in_flight
        self.failed_plans = 0
        self.lifecycle.scheduler_error = None
        message = context.message
        message.transfer = self.transfers.message(message.step_id)
        hears = self.transfers.pending and not self.in_flight  # an empty step, to hear of a transfer's end
        if not (states or self.lifecycle.drops or message.has_operations or hears):
            if self.parts.observers.active:
                self.parts.observers.notify("hotswap_nothing_planned", holds=context.holds, time=begun)
            return False
        message.drops, self.lifecycle.drops = self.lifecycle.drops, []
        now = self.clock.now()
        for state in states:
            if state.first_scheduled_at is None:
                state.first_scheduled_at = now
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_step_planned", message=message, holds=context.holds, time=begun, duration=now - begun,
                suspensions=[(s.request, s.mode.value, s.reason) for s in context.suspensions],
            )
        self._submit(message, states, context.flying, now)
        return True

    def submit_operations(self, message: StepMessage) -> None:
        """A step without rows that no scheduler has planned."""
        message.drops, self.lifecycle.drops = self.lifecycle.drops, []
        message.transfer = self.transfers.message(message.step_id)
        now = self.clock.now()
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_step_planned", message=message, holds=[], time=now, duration=0.0, suspensions=[])
        self._submit(message, [], [], now)

    def _submit(
        self, message: StepMessage, states: list[RequestState], rows: list[FlyingRow], now: float,
    ) -> None:
        self.submitted = message.step_id
        ticket = self.parts.executor.submit(message)
        self.in_flight.append(StepInFlight(message.step_id, ticket, states, rows, now))
        self.max_depth_seen = max(self.max_depth_seen, len(self.in_flight))

    def _plan_failed(self, context: Context, error: Exception) -> None:
        for state in context.undo():
            self.lifecycle.admit(state)  # the scheduler may have crossed it off already
        self.failed_plans += 1
        scheduler = self.parts.scheduler
        invalid = isinstance(error, PlanError)
        problem = f"scheduler {scheduler.name!r} made an invalid plan: {error}" if invalid else blame(
            error, scheduler, "plan")
        self.lifecycle.scheduler_error = problem
        first = self.failed_plans == 1  # the same plan is tried again at once: one traceback is enough
        logger.error("%s (plan undone)", problem, exc_info=error if first and not invalid else None)
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_plan_failed", component=scheduler.label, error=problem, time=context.now)
        if self.lifecycle.trial is not None:
            self.lifecycle.trial.fail(problem)
        elif self.failed_plans >= PLAN_ATTEMPTS and not self.in_flight:
            self.failed_plans = 0
            culprit = self.pool.states.get(error.request or "") if isinstance(error, PlanError) else None
            if culprit is None:
                self.finish_all(FinishReason.ERROR, problem)
            else:
                self.lifecycle.finish(culprit, FinishReason.ERROR, problem)

    def collect(self) -> None:
        """Wait for the oldest step in flight and apply its verdict."""
        step = self.in_flight[0]
        verdict = self.parts.executor.collect(step.ticket)
        self.in_flight.popleft()
        now = self.clock.now()
        self.steps += 1
        kept, voided = self._committer.apply(step, verdict, now)
        if verdict.error is None and self.limits.lookahead:
            self.drafts.add(verdict)
        self.events.update(verdict.counts)
        duration = now - step.submitted_at
        self.lifecycle.guard("observe", lambda: self.parts.scheduler.observe(
            StepOutcome(step.step_id, now, kept, duration)))
        if self.parts.observers.active:
            self._report(step, verdict, voided, now, duration)
        if self.hears_pages:
            self.tell_events(self.parts.kv)
        if step.states:
            self.progress_at = now

    def _report(
        self, step: StepInFlight, verdict: Verdict, voided: list[str], now: float, duration: float,
    ) -> None:
        self.parts.observers.notify(
            "hotswap_step_finished", verdict=verdict, requests=step.states, voided=voided, usage=self.parts.kv.usage(),
            time=now, duration=duration,
        )
        if verdict.finished_transfers:
            self.parts.observers.notify(
                "hotswap_transfers_ended", counters=self.transfers.counters(), time=now)

    def tell_events(self, kv: KVCacheManager) -> None:
        """What has happened to cached pages since the last time, to those who listen."""
        events = kv.events()
        if not events:
            return
        if self.parts.observers.active:
            self.parts.observers.notify("hotswap_pages_evicted", events=events, time=self.clock.now())
        for listener in self._listeners:
            try:
                listener(events)
            except Exception:
                logger.exception("a listener to page events raised")
