"""A scheduler that makes no difference between prefill and decode: one line, strictly in order."""

from collections.abc import Mapping
from typing import Annotated, Any

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
from hotswap.core.interfaces.scheduler import Answer, PlanContext, RequestView, Row, Scheduler, StepPlan


class StrictScheduler(Scheduler):
    """The first in line gets all tokens it can use, then the next. Choose it when the order matters more than the
    throughput: a long prompt at the front makes the decodes behind it wait."""

    class Options(ComponentOptions):
        policy: Annotated[ComponentRef, Part("queue_policy")] = ComponentRef(use="shortest_first")
        """The order of the line."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.policy = self.parts["policy"]
        self.waiting: dict[str, RequestView] = {}

    def admit(self, view: RequestView) -> None:
        self.policy.admit(view)
        self.waiting[view.id] = view

    def drop(self, request_id: str) -> None:
        self.policy.drop(request_id)
        self.waiting.pop(request_id, None)

    def plan(self, ctx: PlanContext) -> StepPlan:
        rows: list[Row] = []
        left = ctx.token_budget
        line = sorted((v for v in ctx.running if v.ready), key=lambda v: self.policy.key(v, ctx.now))
        while left > 0 and len(rows) < ctx.row_limit and (view := self._next(ctx, line)) is not None:
            n_tokens = min(view.ready, left)
            drafts = min(view.draft_limit, left - n_tokens) if n_tokens == view.ready else 0
            room = n_tokens if view.running else view.ready  # one that starts must not run short at once
            answer = ctx.reserve(view.id, room, drafts)
            if answer is not Answer.GRANTED and drafts:
                answer, drafts = ctx.reserve(view.id, room), 0
            while answer is Answer.NO and view.running and line:  # those at the end of the line give way
                ctx.suspend(line.pop().id, reason=f"makes room for {view.id}")
                answer = ctx.reserve(view.id, room)
            if answer is not Answer.GRANTED:
                ctx.hold(view.id, f"no room: {answer.value}")
                break  # nobody overtakes
            self.waiting.pop(view.id, None)
            rows.append(Row(view.id, n_tokens, drafts))
            left -= n_tokens + drafts
        return StepPlan(rows)

    def _next(self, ctx: PlanContext, line: list[RequestView]) -> RequestView | None:
        """The running first, then as many of the waiting as may start."""
        if line or ctx.free_slots <= 0:
            return line.pop(0) if line else None
        may = [v for v in self.waiting.values() if self.policy.gate(v, ctx.now) is None]
        return ctx.view(min(may, key=lambda v: self.policy.key(v, ctx.now)).id) if may else None
