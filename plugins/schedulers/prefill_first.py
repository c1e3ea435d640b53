"""Prompts before decodes, in steps of their own, as vLLM before its version 1 and nano-vllm schedule by default."""

from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.scheduler import PlanContext, RequestView, StepPlan
from hotswap.plugins.schedulers.base import QueueOptions, QueueScheduler, Step


class PrefillFirstScheduler(QueueScheduler):
    """A step computes whole prompts as long as there are any with room, and decodes only when there are none.

    Choose it when the time to the first token and the throughput of short answers matter most: a step of prompts is
    dense, and more requests decode together afterwards. The price is the time between tokens: each arrival stops all
    that decode for a whole step, and a burst for several (``chunked`` is the remedy). ``max_prefills_in_a_row`` bounds
    that, so that an endless stream of prompts cannot starve those that decode.
    """

    class Options(QueueOptions):
        max_prefills_in_a_row: Annotated[int, Field(ge=1)] = 8
        """After so many steps of prompts, those that decode get a step."""

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._in_a_row = 0

    def plan(self, ctx: PlanContext) -> StepPlan:
        step = Step(ctx)
        ready = [view for view in ctx.running if view.ready]
        decodes = [view for view in ready if view.ready == 1]
        if not decodes or self._in_a_row < self.options.max_prefills_in_a_row:
            self._serve_prompts(step, self.in_order([view for view in ready if view.ready > 1], ctx.now))
        if step.rows:
            self._in_a_row += 1
            for view in decodes:
                if view.id not in step.suspended:
                    ctx.hold(view.id, "prompts first")
        else:
            self._in_a_row = 0
            self.serve_decodes(step, decodes)
        return StepPlan(step.rows)

    def _serve_prompts(self, step: Step, begun: list[RequestView]) -> None:
        """Those that were too long for the step before, then those that wait."""
        for view in begun:
            if view.id not in step.suspended and self.fits(step, view):
                self.serve(step, view, min(view.ready, step.left))
        for view in self.startable(step):
            if not self.fits(step, view) or not self.start(step, view, min(view.ready, step.left)):
                break
