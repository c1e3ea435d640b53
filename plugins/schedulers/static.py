"""Static batching: the textbook baseline, as in FasterTransformer or a ``generate`` call on a padded batch."""

from collections.abc import Mapping
from typing import Any

from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.scheduler import PlanContext, RequestView, StepPlan
from hotswap.plugins.schedulers.base import QueueScheduler, Step


class StaticScheduler(QueueScheduler):
    """A batch is formed when nothing runs, and the next one only when its last request has ended.

    Choose it as a baseline to compare with; it wastes the places of requests that end early. Prompts longer than what
    is left of the token budget are computed over several steps, before any of the batch decodes. A request of the batch
    whose prompt begins like another one's starts when that beginning has been computed.
    """

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._joining: list[str] = []
        """Of the batch, but not started: the beginning of their prompts is being computed."""

    def describe(self) -> Description:
        return Description(offers=frozenset({"closed_batches"}))

    def plan(self, ctx: PlanContext) -> StepPlan:
        step = Step(ctx)
        if not ctx.running and ctx.nothing_in_flight:
            self._form_batch(step)
            return StepPlan(step.rows)
        ready = self.in_order([view for view in ctx.running if view.ready], ctx.now)
        prompts = [view for view in ready if view.ready > 1]
        self._serve(step, prompts)
        self._let_join(step)
        if not (prompts or step.rows or self._joining):
            self._serve(step, ready)
        return StepPlan(step.rows)

    def drop(self, request_id: str) -> None:
        super().drop(request_id)
        if request_id in self._joining:
            self._joining.remove(request_id)

    def _serve(self, step: Step, views: list[RequestView]) -> None:
        for view in views:
            if not step.full and view.id not in step.suspended:
                self.serve(step, view, min(view.ready, step.left))

    def _form_batch(self, step: Step) -> None:
        """Take requests while there are slots and room, also those whose prompts must wait for a later step."""
        ctx, line = step.ctx, self.waiting
        line.begin_plan()
        self.probe_waiting(ctx)
        while ctx.free_slots > len(line.passed) and (view := self.next_head(ctx)) is not None:
            if not self._start_first(step, view):
                break
        self._joining = list(line.passed)[:ctx.free_slots]

    def _let_join(self, step: Step) -> None:
        """Start those whose beginnings are there. Who does not get room is left to the next batch. A full step tells
        nothing: whoever computes a beginning, but has no row in it, would be taken for one that does so no longer."""
        if step.full:
            return
        views = [step.ctx.view(request_id) for request_id in self._joining]
        self._joining = [view.id for view in views if not view.ready]
        for view in views:
            if view.ready:
                self._start_first(step, view)

    def _start_first(self, step: Step, view: RequestView) -> bool:
        return self.start(step, view, 0 if step.full else min(view.ready, step.left))
