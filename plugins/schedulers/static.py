"""Static batching: the textbook baseline, as in FasterTransformer or a ``generate`` call on a padded batch."""

from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.scheduler import PlanContext, StepPlan
from hotswap.plugins.schedulers.base import QueueScheduler, Step


class StaticScheduler(QueueScheduler):
    """A batch is formed when nothing runs, and the next one only when its last request has ended.

    Choose it as a baseline to compare with; it wastes the places of requests that end early. Prompts longer than what
    is left of the token budget are computed over several steps, before any of the batch decodes.
    """

    def describe(self) -> Description:
        return Description(offers=frozenset({"closed_batches"}))

    def plan(self, ctx: PlanContext) -> StepPlan:
        step = Step(ctx)
        if not ctx.running and ctx.nothing_in_flight:
            self._form_batch(step)
            return StepPlan(step.rows)
        ready = self.in_order([view for view in ctx.running if view.ready], ctx.now)
        prompts = [view for view in ready if view.ready > 1]
        for view in prompts or ready:
            if not step.full and view.id not in step.suspended:
                self.serve(step, view, min(view.ready, step.left))
        return StepPlan(step.rows)

    def _form_batch(self, step: Step) -> None:
        """Take requests while there are slots and room, also those whose prompts must wait for a later step."""
        ctx = step.ctx
        self.probe_waiting(ctx)
        while ctx.free_slots > 0 and (head := self.waiting.head(ctx.now)) is not None:
            view = ctx.view(head.id)
            n_tokens = 0 if step.full else min(view.ready, step.left)
            if not view.ready or not self.start(step, view, n_tokens):
                return
