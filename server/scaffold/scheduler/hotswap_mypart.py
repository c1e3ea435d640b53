"""A scheduler: which requests compute how many tokens in the next step."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.scheduler import Answer, PlanContext, RequestView, Row, Scheduler, StepPlan


class MyPart(Scheduler):
    """First come, first served: those that run go on, then the oldest that waits may start.

    Choose it ... (say when: `hotswap plugins show scheduler:mypart` prints this).
    """

    class Options(ComponentOptions):
        max_chunk: Annotated[int, Field(ge=1)] = 256
        """Most tokens of one request in a step: a long prompt is computed in pieces, beside the others' next tokens."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.waiting: dict[str, int] = {}  # id -> order of arrival

    def admit(self, view: RequestView) -> None:
        """A request waits: it is new, or it was suspended."""
        self.waiting[view.id] = view.sequence

    def drop(self, request_id: str) -> None:
        """A request has ended, whether it waited or ran."""
        self.waiting.pop(request_id, None)

    def plan(self, ctx: PlanContext) -> StepPlan:
        """Hand out the step's token budget. ``ready`` says how many tokens a request could use right now."""
        rows: list[Row] = []
        left = ctx.token_budget
        line = sorted((view for view in ctx.running if view.ready), key=lambda view: view.sequence)
        while left > 0 and len(rows) < ctx.row_limit and (view := self._next(ctx, line)) is not None:
            row = self._row(ctx, view, line, left)
            if row is None:
                ctx.hold(view.id, "no room")  # the log will say why it waited
                break
            self.waiting.pop(view.id, None)
            rows.append(row)
            left -= row.n_tokens + row.draft_slots
        return StepPlan(rows)

    def _next(self, ctx: PlanContext, line: list[RequestView]) -> RequestView | None:
        if line:
            return line.pop(0)
        may_start = self.waiting and ctx.free_slots > 0
        return ctx.view(min(self.waiting, key=self.waiting.__getitem__)) if may_start else None

    def _row(self, ctx: PlanContext, view: RequestView, line: list[RequestView], left: int) -> Row | None:
        """Reserve room and make the row; None: there is no room. Who runs may take the room of younger ones."""
        n_tokens = min(view.ready, left, self.options.max_chunk)
        if n_tokens <= 0:  # it waits for its parent, or for pages on their way
            return None
        drafts = min(view.draft_limit, left - n_tokens) if n_tokens == view.ready else 0  # for the speculator
        room = n_tokens if view.running else view.ready  # one that starts must not run short at once
        if ctx.reserve(view.id, room, drafts) is Answer.GRANTED:
            return Row(view.id, n_tokens, drafts)
        while (answer := ctx.reserve(view.id, room)) is Answer.NO and view.running and line:
            ctx.suspend(line.pop().id, reason=f"makes room for {view.id}")
        return Row(view.id, n_tokens) if answer is Answer.GRANTED else None
