"""What the stock schedulers share: a waiting line, service in order, and making room by suspending those behind."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
from hotswap.core.interfaces.scheduler import (
    GRANTED,
    NO,
    Answer,
    PlanContext,
    QueuePolicy,
    RequestView,
    Row,
    Scheduler,
    StepOutcome,
)
from hotswap.plugins.schedulers.waiting import Key, WaitingLine


class QueueOptions(ComponentOptions):
    policy: Annotated[ComponentRef, Part("queue_policy")] = ComponentRef(use="fcfs")
    """The order in which requests are served."""


class Step:
    """One plan in the making: the rows so far, what is left of the budget, who was suspended."""

    def __init__(self, ctx: PlanContext) -> None:
        self.ctx = ctx
        self.rows: list[Row] = []
        self.left, self.row_limit = ctx.token_budget, ctx.row_limit
        self.full = self.left <= 0 or self.row_limit <= 0
        self.suspended: set[str] = set()

    def extend(self, request_id: str, most: int) -> None:
        """Give a planned row more of its tokens, up to ``most``, from what is left; it has room for them already."""
        index = next(i for i, row in enumerate(self.rows) if row.request == request_id)
        n_tokens = min(most, self.rows[index].n_tokens + self.left)
        if self.ctx.reserve(request_id, n_tokens) is GRANTED:
            self.left -= n_tokens - self.rows[index].n_tokens
            self.rows[index] = Row(request_id, n_tokens)

    def leave(self, most: int) -> None:
        """Nothing beyond ``most`` further tokens is planned."""
        self.left = min(self.left, most)

    def add(self, request_id: str, n_tokens: int, drafts: int) -> None:
        self.rows.append(Row(request_id, n_tokens, drafts))
        self.left -= n_tokens + drafts
        self.full = self.left <= 0 or len(self.rows) >= self.row_limit


class QueueScheduler(Scheduler):
    """Base of the stock schedulers. A request that is served first can always get room: those behind it give way."""

    Options = QueueOptions

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.policy: QueuePolicy = self.parts["policy"]
        self.waiting = WaitingLine(self.policy)
        self._keys: dict[str, Key] = {}
        self._now = 0.0

    def admit(self, view: RequestView) -> None:
        self.policy.admit(view)
        key = None
        if not self.policy.dynamic:
            key = self._keys[view.id] = self.policy.key(view, self._now)
        self.waiting.push(view, key)

    def drop(self, request_id: str) -> None:
        self.policy.drop(request_id)
        self._keys.pop(request_id, None)
        self.waiting.remove(request_id)

    def observe(self, outcome: StepOutcome) -> None:
        self._now = outcome.now
        self.policy.observe(outcome)

    def next_wakeup(self) -> float | None:
        return self.policy.next_wakeup()

    def serve_decodes(self, step: Step, views: list[RequestView]) -> None:
        for view in self.in_order(views, step.ctx.now):
            if step.full:
                step.ctx.hold(view.id, "the step is full")
            elif view.id not in step.suspended:
                self.serve(step, view, 1)

    def startable(self, step: Step) -> Iterator[RequestView]:
        """Waiting requests in order, as long as the step and the slots have room; the caller starts each or stops.

        Where all slots are taken, a preemptive policy lets the head take the place of one behind it. That step
        only suspends: the head starts when the slot is free.
        """
        ctx = step.ctx
        self.waiting.begin_plan()
        if not step.full and (ctx.free_slots > 0 or self.policy.preemptive):
            self.probe_waiting(ctx)
        while not step.full and (ctx.free_slots > 0 or self.policy.preemptive):
            victim = None
            if ctx.free_slots <= 0:
                # First of all, since nobody in line is before its head: no prompt is compared with the cache in vain.
                victim, head = self._last_running(step), self.waiting.head(ctx.now)
                if victim is None or head is None or not self._is_behind(victim, head, ctx.now):
                    return
            view = self.next_head(ctx)
            if view is None:
                return
            if victim is not None:
                if not self._is_behind(victim, view, ctx.now):
                    return
                self._suspend(step, victim, view)
                ctx.view(view.id)  # again: the other one has left pages
            yield view

    def next_head(self, ctx: PlanContext) -> RequestView | None:
        """The first that waits for nothing but room. Those before it that cannot start, since what they would compute
        is on its way, are passed over: they keep their places, and hold up nobody."""
        while (head := self.waiting.head(ctx.now)) is not None:
            view = ctx.view(head.id)
            if view.ready:
                return view
            if not self.waiting.pass_over(head.id):
                break
        return None

    def probe_waiting(self, ctx: PlanContext) -> None:
        """Once a plan, and only for a policy that asks for it: each probe compares a whole prompt with the cache."""
        for request_id in self.waiting.longest(self.policy.probes):
            ctx.probe(request_id)

    def fits(self, step: Step, view: RequestView) -> bool:
        """A prompt that fits into a budget of its own waits for one; a longer one takes what there is."""
        if step.full:
            return False
        return view.ready <= step.left or view.ready > step.ctx.token_budget

    def serve(self, step: Step, view: RequestView, n_tokens: int) -> bool:
        """Plan a running request's next tokens, if there can be room for them."""
        drafts = 0
        if view.draft_limit and n_tokens == view.ready:
            drafts = min(view.draft_limit, step.left - n_tokens)
        answer = step.ctx.reserve(view.id, n_tokens, drafts)
        if answer is not GRANTED:
            drafts, answer = 0, self._make_room(step, view, n_tokens, may_suspend=True)
            if answer is not GRANTED:
                step.ctx.hold(view.id, f"no room: {answer.value}")
                return False
        step.add(view.id, n_tokens, drafts)
        return True

    def start(self, step: Step, view: RequestView, n_tokens: int) -> bool:
        """Start a waiting request with its first tokens (or none yet), once there is room for all that is known of it.

        Room for a first chunk alone would let it start, run short, and be suspended again, over and over.
        """
        drafts = min(view.draft_limit, step.left - n_tokens) if n_tokens == view.ready else 0
        answer = step.ctx.reserve(view.id, view.ready, drafts)
        if answer is not GRANTED:
            drafts, answer = 0, self._make_room(step, view, view.ready, self.policy.preemptive)
            if answer is not GRANTED:
                step.ctx.hold(view.id, f"cannot start: {answer.value}")
                return False
        self.waiting.remove(view.id)
        self.policy.start(view)
        if n_tokens:
            step.add(view.id, n_tokens, drafts)
        return True

    def _make_room(self, step: Step, view: RequestView, n_tokens: int, may_suspend: bool) -> Answer:
        """Ask again without drafts, then by suspending one after the other of those behind."""
        answer = step.ctx.reserve(view.id, n_tokens)
        while answer is NO and may_suspend and self.suspend_one_behind(step, view):
            answer = step.ctx.reserve(view.id, n_tokens)
        return answer

    def suspend_one_behind(self, step: Step, view: RequestView) -> bool:
        """Suspend the running request with the largest victim key, if that is behind ``view`` and not planned yet."""
        victim = self._last_running(step, view.id)
        if victim is None or not self._is_behind(victim, view, step.ctx.now):
            return False
        self._suspend(step, victim, view)
        return True

    def _last_running(self, step: Step, *besides: str) -> RequestView | None:
        """The running request with the largest victim key, of those that this plan has neither planned nor suspended.
        """
        taken = {*besides, *step.suspended, *(row.request for row in step.rows)}
        candidates = (other for other in step.ctx.running if other.id not in taken)
        return max(candidates, key=lambda other: self.policy.victim_key(other, step.ctx.now), default=None)

    def _is_behind(self, victim: RequestView, view: RequestView, now: float) -> bool:
        return self.policy.victim_key(victim, now) > self.policy.key(view, now)

    def _suspend(self, step: Step, victim: RequestView, view: RequestView) -> None:
        step.ctx.suspend(victim.id, reason=f"makes room for {view.id}")
        step.suspended.add(victim.id)

    def in_order(self, views: list[RequestView], now: float) -> list[RequestView]:
        """By the policy's keys, which are remembered where they cannot change."""
        if self.policy.dynamic:
            return sorted(views, key=lambda view: self.policy.key(view, now))
        keys = self._keys
        try:
            return sorted(views, key=lambda view: keys[view.id])
        except KeyError:  # requests that ran when this scheduler took over
            keys.update((view.id, self.policy.key(view, now)) for view in views if view.id not in keys)
            return sorted(views, key=lambda view: keys[view.id])
