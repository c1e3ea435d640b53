"""Continuous batching (Yu et al., 2022): the iteration-level scheduling of "Orca: A Distributed Serving System for
Transformer-Based Generative Models"."""

from hotswap.core.interfaces.scheduler import PlanContext, StepPlan
from hotswap.plugins.schedulers.base import QueueScheduler, Step


class ContinuousScheduler(QueueScheduler):
    """Requests join and leave the batch at every step; a prompt is computed whole, beside the decodes.

    Choose it when the time to the first token matters more than an even time between tokens, and as the baseline that
    chunked prefill is compared with. Only a prompt longer than the whole token budget is cut, since it could never run.
    """

    def plan(self, ctx: PlanContext) -> StepPlan:
        step = Step(ctx)
        ready = [view for view in ctx.running if view.ready]
        self.serve_decodes(step, [view for view in ready if view.ready == 1])
        for view in self.in_order([view for view in ready if view.ready > 1], ctx.now):
            if view.id not in step.suspended and self.fits(step, view):
                self.serve(step, view, min(view.ready, step.left))
        for view in self.startable(step):
            if not self.fits(step, view) or not self.start(step, view, min(view.ready, step.left)):
                break
        return StepPlan(step.rows)
