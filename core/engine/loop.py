"""The one loop: plan, submit, collect, apply. Single-threaded and without a clock of its own.

Synchronous, overlapped and pipelined execution are this loop with another ``depth`` (steps in flight) and ``chained``
(whether one request may be in two of them).
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hotswap.core.blame import blame
from hotswap.core.engine.clock import Clock
from hotswap.core.engine.context import Context, Limits, PlanError
from hotswap.core.engine.drafts import DraftCounts
from hotswap.core.engine.forks import find_parent, has_prompt
from hotswap.core.engine.outputs import absorb, keep_prompt_logprobs, last_words
from hotswap.core.engine.pool import DONE, RUNNING, SUSPENDING, WAITING, RequestPool, RequestState
from hotswap.core.engine.transfers import Transfers
from hotswap.core.errors import RequestError
from hotswap.core.interfaces.kvcache import Fence, KVCacheManager
from hotswap.core.interfaces.messages import RowVerdict, StepMessage, Verdict
from hotswap.core.interfaces.parallel import EventListener, Executor, Ticket
from hotswap.core.interfaces.scheduler import Scheduler, StepOutcome
from hotswap.core.request import FinishReason, OutputSink, Request

logger = logging.getLogger(__name__)

PLAN_ATTEMPTS = 3
"""After so many failed plans in a row the live requests end with the scheduler's error: they cannot be served."""


class Observers(Protocol):
    """Calls the observers' hooks. ``active`` is False when there are none, and then nothing is prepared for them."""

    @property
    def active(self) -> bool: ...
    def notify(self, hook: str, **arguments: Any) -> None: ...


@dataclass(slots=True)
class StepInFlight:
    step_id: int
    ticket: Ticket
    states: list[RequestState]
    submitted_at: float


@dataclass
class Parts:
    """The components that the loop drives. Replaced between two steps when a part is exchanged."""

    scheduler: Scheduler
    kv: KVCacheManager
    executor: Executor
    observers: Observers

    @property
    def forks(self) -> bool:
        """Whether children share their parent's pages. Who forms a batch and starts nobody until it has ended would
        start them behind it."""
        return "fork" in self.kv.describe().offers and "closed_batches" not in self.scheduler.describe().offers


class EngineLoop:
    """``turn()`` does one thing and says whether it did any. Whoever drives it waits when it did not.

    ``depth``: greatest number of steps in flight. ``chained``: see the module.
    """

    def __init__(
        self, parts: Parts, limits: Limits, clock: Clock, depth: int = 1, chained: bool = True,
        transfers: Transfers | None = None,
    ) -> None:
        self.parts, self.limits, self.clock, self.depth, self.chained = parts, limits, clock, depth, chained
        self.pool, self.transfers = RequestPool(), transfers or Transfers()
        self.in_flight: deque[StepInFlight] = deque()
        self.submitted = self.collected = 0
        self.steps = self.max_depth_seen = 0
        self.progress_at = clock.now()
        self.drafts = DraftCounts()
        self.events: Counter[str] = Counter()
        """What the workers' verdicts counted, since the start."""
        self.failed_plans = 0
        self.last_plan_error: str | None = None
        self._drops: list[str] = []
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
            self._admit(state)

    def _let_children_go(self, state: RequestState) -> None:
        """To the scheduler: to share what their parent has computed, or as any other where it does not run."""
        held, state.held = state.held, []
        for child in held:
            if child.status is WAITING:
                self._admit(child)

    def abort(self, request_id: str) -> None:
        state = self.pool.states.get(request_id)
        if state is not None:
            self.finish(state, FinishReason.ABORT)

    def finish(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """End a request that does not end by its own tokens. Its client is told, whatever a component raises."""
        output = last_words(state, reason, error)
        try:
            output.handoff = self._retire(state, reason)
        finally:
            self._deliver(state, output)

    def finish_all(self, reason: FinishReason, error: str | None = None) -> None:
        for state in list(self.pool.states.values()):
            try:
                self.finish(state, reason, error)
            except Exception:
                logger.exception("request %s could not give back what it holds", state.id)

    def watch(self, listener: EventListener) -> None:
        """Tell ``listener`` which cached pages come and go, from now on."""
        self._listeners.append(listener)
        self.parts.kv.keep_events(True)

    # the loop

    def turn(self) -> bool:
        did = len(self.in_flight) < self.depth and self.plan_and_submit()
        if self.in_flight and (not did or len(self.in_flight) >= self.depth):
            self.collect()
            did = True
        if not self.pool.states:
            self.progress_at = self.clock.now()
            if not (did or self.in_flight):
                self._give_back_leaks()
        return did

    def next_wakeup(self) -> float | None:
        return self.parts.scheduler.next_wakeup()

    def plan_and_submit(self) -> bool:
        """Plan one step and hand it to the executor; False when there is nothing to hand over."""
        if not (self.pool.states or self._drops or self.transfers.pending):
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
        self.failed_plans, self.last_plan_error = 0, None
        message = context.message
        message.transfer = self.transfers.message(message.step_id)
        hears = self.transfers.pending and not self.in_flight  # an empty step, to hear of a transfer's end
        if not (states or self._drops or message.has_operations or hears):
            return False
        message.drops, self._drops = self._drops, []
        now = self.clock.now()
        for state in states:
            if state.first_scheduled_at is None:
                state.first_scheduled_at = now
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_step_planned", message=message, holds=context.holds, time=begun, duration=now - begun,
                suspensions=[(s.request, s.mode.value, s.reason) for s in context.suspensions],
            )
        self._submit(message, states, now)
        return True

    def _submit(self, message: StepMessage, states: list[RequestState], now: float) -> None:
        self.submitted = message.step_id
        ticket = self.parts.executor.submit(message)
        self.in_flight.append(StepInFlight(message.step_id, ticket, states, now))
        self.max_depth_seen = max(self.max_depth_seen, len(self.in_flight))

    def _plan_failed(self, context: Context, error: Exception) -> None:
        for state in context.undo():
            self._admit(state)  # the scheduler may have crossed it off already
        self.failed_plans += 1
        scheduler = self.parts.scheduler
        invalid = isinstance(error, PlanError)
        problem = f"scheduler {scheduler.name!r} made an invalid plan: {error}" if invalid else blame(
            error, scheduler, "plan")
        self.last_plan_error = problem
        first = self.failed_plans == 1  # the same plan is tried again at once: one traceback is enough
        logger.error("%s (plan undone)", problem, exc_info=error if first and not invalid else None)
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_plan_failed", component=scheduler.label, error=problem, time=context.now)
        if self.failed_plans >= PLAN_ATTEMPTS and not self.in_flight:
            self.failed_plans = 0
            self.finish_all(FinishReason.ERROR, problem)

    def collect(self) -> None:
        """Wait for the oldest step in flight and apply its verdict."""
        step = self.in_flight[0]
        verdict = self.parts.executor.collect(step.ticket)
        self.in_flight.popleft()
        now = self.clock.now()
        self.collected = step.step_id
        self.steps += 1
        kept: list[tuple[str, int]] = []
        voided: list[str] = []
        if verdict.error is None and len(verdict.rows) != len(step.states):
            verdict.error = f"the verdict has {len(verdict.rows)} rows, the message had {len(step.states)}"
        if verdict.error is not None:
            self._fail_step(step, verdict)
        else:
            self._apply_rows(step, verdict.rows, now, kept, voided)
            if self.limits.lookahead:
                self.drafts.add(verdict)
        self.events.update(verdict.counts)
        self._apply_suspensions(verdict)
        self._end_transfers(verdict)
        self.parts.kv.on_fence(step.step_id)
        duration = now - step.submitted_at
        self._guard("observe", lambda: self.parts.scheduler.observe(
            StepOutcome(step.step_id, now, kept, duration)))
        if self.parts.observers.active:
            self._report(step, verdict, voided, now, duration)
        if self.parts.observers.active or self._listeners:
            self.tell_events()
        if step.states:
            self.progress_at = now

    def _apply_rows(
        self, step: StepInFlight, rows: list[RowVerdict], now: float, kept: list[tuple[str, int]], voided: list[str],
    ) -> None:
        for state, row in zip(step.states, rows, strict=True):
            state.land()
            if state.status is DONE:
                voided.append(state.id)
                continue
            if row.error is not None or row.request != state.id:
                error = row.error or f"the worker answered for {row.request} instead"
                self.finish(state, FinishReason.ERROR, error)
                continue
            if row.prompt_logprobs:
                keep_prompt_logprobs(state, row)
            if row.kept:
                try:
                    output, ending = absorb(state, row, now)
                except Exception as error:
                    logger.exception("the detokeniser of request %s raised", state.id)
                    self.finish(state, FinishReason.ERROR, f"the detokeniser raised {type(error).__name__}: {error}")
                    continue
                kept.append((state.id, len(output.token_ids)))
            if state.status is RUNNING:  # else its table went with the suspension
                self._settle(state, row)
            if row.kept:
                if ending is not None:
                    output.handoff = self._retire(state, ending.reason)
                self._deliver(state, output)

    def _settle(self, state: RequestState, row: RowVerdict) -> None:
        """Correct the bound, and tell the KV manager what is known and sure where that lets it do something."""
        known, computed = len(state.tokens), row.computed
        # Tokens that a stop rule cut off were computed but are not the request's: they must not become shareable.
        state.settle(computed if computed < known else known, row.lag)
        if state.held and has_prompt(state, self.limits.reuse_tail):
            self._let_children_go(state)
        if state.verified >= state.commit_due:
            state.commit(self.parts.kv)

    def _apply_suspensions(self, verdict: Verdict) -> None:
        for suspended in verdict.suspended:
            state = self.pool.states.get(suspended.request)
            if state is None or state.status is not SUSPENDING:
                continue
            state.status = WAITING
            if suspended.swapped:
                self.transfers.suspended(state, suspended.computed)
            state.computed = state.verified = state.kept_in_flight = 0
            state.on_worker = False
            state.preemptions += 1
            self._admit(state)
            self._let_children_go(state)

    def _end_transfers(self, verdict: Verdict) -> None:
        """Transfers that every rank has done: who waited for one can step, and pages behind it are free."""
        for name, tokens in self.transfers.ended(verdict.finished_transfers):
            if (state := self.transfers.filling.get(name)) is not None:
                self.transfers.detach(state)
                if tokens is None:
                    state.verified = state.computed
                else:
                    self._start_again(state, tokens)
            self.parts.kv.on_fence(name)

    def _start_again(self, state: RequestState, tokens: int) -> None:
        """Only the first ``tokens`` have come into a request's pages. It waits again; those that came are found."""
        state.verified = max(state.verified, min(tokens, state.computed))
        state.commit(self.parts.kv)
        self.parts.kv.release(state.id, self._in_flight())
        self.pool.pause(state, WAITING)
        self._drops.append(state.id)
        state.on_worker, state.computed, state.verified, state.cached_tokens = False, 0, 0, None
        self._admit(state)

    def _in_flight(self) -> set[Fence]:
        """The fence of everything submitted and not collected."""
        return {self.submitted} if self.submitted > self.collected else set()

    def _fail_step(self, step: StepInFlight, verdict: Verdict) -> None:
        for state in step.states:
            state.land()
            if state.status is not DONE:
                error = f"the step that computed this request failed: {verdict.error}"
                self.finish(state, FinishReason.ERROR, error)

    def _retire(self, state: RequestState, reason: FinishReason) -> Any:
        """Give back everything the request holds, exactly once. Returns what a KV transfer has for the client."""
        handle = None
        if state.status is RUNNING:
            state.commit(self.parts.kv)
            fences, (fence, handle) = self._in_flight(), self.transfers.finished(state, self.parts.kv, reason)
            fences.update(name for name in (fence, self.transfers.detach(state)) if name is not None)
            self.parts.kv.release(state.id, fences, retain=reason is not FinishReason.ERROR)
        self.transfers.forget(state)
        if state.on_worker:
            self._drops.append(state.id)
        self.pool.remove(state)
        state.finish_reason, state.finished_at = reason, self.clock.now()
        self._guard("drop", lambda: self.parts.scheduler.drop(state.id))
        self._let_children_go(state)
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_request_finished", request=state, reason=reason.value, time=state.finished_at)
        return handle

    def _deliver(self, state: RequestState, output: Any) -> None:
        try:
            state.sink(output)
        except Exception:
            logger.exception("the sink of request %s raised; the request goes on without it", state.id)

    def _give_back_leaks(self) -> None:
        """Nothing lives, so nothing may be held. Whoever holds a page is a defect: say who, and serve on."""
        kv = self.parts.kv
        if not kv.usage().held:
            return
        owners = kv.owners()
        logger.error("pages are held although nothing runs, and are given back; owners and pages: %s", owners)
        for request_id in owners:
            kv.release(request_id, (), retain=False)
        if self.parts.observers.active:
            self.parts.observers.notify("hotswap_pages_leaked", owners=owners, time=self.clock.now())

    def _admit(self, state: RequestState) -> None:
        """A request that its scheduler will not take would wait for ever: it ends."""
        if not self._guard("admit", lambda: self.parts.scheduler.admit(state)) and state.id in self.pool.states:
            self.finish(state, FinishReason.ERROR, self.last_plan_error)

    def _guard(self, method: str, call: Callable[[], object]) -> bool:
        """Whether ``call`` went well. What a scheduler raises outside ``plan`` is logged by name, and ends nothing."""
        try:
            call()
        except Exception as error:
            self.last_plan_error = blame(error, self.parts.scheduler, method)
            logger.exception("%s", self.last_plan_error)
            return False
        return True

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

    def tell_events(self) -> None:
        """What has happened to cached pages since the last time, to those who listen."""
        events = self.parts.kv.events()
        if not events:
            return
        if self.parts.observers.active:
            self.parts.observers.notify("hotswap_pages_evicted", events=events, time=self.clock.now())
        for listener in self._listeners:
            try:
                listener(events)
            except Exception:
                logger.exception("a listener to page events raised")
