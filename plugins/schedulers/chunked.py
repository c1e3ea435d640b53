"""Chunked prefill (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", 2024)."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from hotswap.core.interfaces.scheduler import PlanContext, RequestView, StepPlan
from hotswap.plugins.schedulers.base import QueueOptions, QueueScheduler, Step

BACKLOG_STEPS = 32
"""Steps in which a backlog of prompts is to be served; what ``beside_decodes`` serves in as many is none."""


class ChunkedScheduler(QueueScheduler):
    """Every step serves all decodes first; prompts share what is left of the token budget, in chunks.

    The default. Choose it to bound the time between tokens: a long prompt delays nobody by more than one step. A prompt
    that cannot be finished in a step takes at most half of what is left while others could use the rest, so that a
    short prompt starts soon, whatever stands before it.
    """

    class Options(QueueOptions):
        max_chunk: Annotated[int, Field(ge=1)] | None = None
        """Most prompt tokens of one request in a step; None: as the budget allows."""
        beside_decodes: Annotated[int, Field(ge=1)] | None = None
        """Most prompt tokens in a step that has decodes, since all of them wait for it; None: as the budget allows."""
        beside_decodes_backlog: Annotated[int, Field(ge=1)] | None = None
        """Up to which ``beside_decodes`` grows with the backlog of prompts, so that 32 steps would serve it: decodes
        wait longer then, for fewer steps; None: it does not grow."""

        @model_validator(mode="after")
        def _grows(self) -> Self:
            least, most = self.beside_decodes, self.beside_decodes_backlog
            if most is not None and (least is None or most < least):
                raise ValueError(
                    f"beside_decodes_backlog is {most}, up to which beside_decodes grows, and that is "
                    f"{'not set' if least is None else least}: set beside_decodes to at most {most}, or "
                    f"beside_decodes_backlog to null{'' if least is None else f' or at least {least}'}")
            return self

    def plan(self, ctx: PlanContext) -> StepPlan:
        step = Step(ctx)
        ready = [view for view in ctx.running if view.ready]
        self.serve_decodes(step, [view for view in ready if view.ready == 1])
        prompts = [view for view in ready if view.ready > 1]
        if step.rows and (least := self.options.beside_decodes) is not None:
            step.leave(max(least, self._for_backlog(ctx, prompts)))
        cut = self._serve_prompts(step, prompts)
        cut += self._start_waiting(step)
        self._hand_out_rest(step, cut)
        return StepPlan(step.rows)

    def _for_backlog(self, ctx: PlanContext, prompts: list[RequestView]) -> int:
        """Tokens a step for the prompts that have begun, and those that have slots to begin in; 0: none are needed."""
        most: int | None = self.options.beside_decodes_backlog
        if most is None:
            return 0
        backlog = sum(view.ready for view in prompts) + self.waiting.tokens(ctx.free_slots)
        return min(most, backlog // BACKLOG_STEPS)

    def _serve_prompts(self, step: Step, views: list[RequestView]) -> list[RequestView]:
        """Returns those that were cut, in order."""
        cut, views = [], self.in_order(views, step.ctx.now)
        for index, view in enumerate(views):
            if step.full:
                step.ctx.hold(view.id, "the step is full")
            elif view.id not in step.suspended:
                n_tokens = self._chunk(step, view, others=index + 1 < len(views) or len(self.waiting) > 0)
                if self.serve(step, view, n_tokens) and n_tokens < view.ready:
                    cut.append(view)
        return cut

    def _start_waiting(self, step: Step) -> list[RequestView]:
        cut = []
        for view in self.startable(step):
            n_tokens = self._chunk(step, view, others=len(self.waiting) > 1)
            if not self.start(step, view, n_tokens):
                break
            if n_tokens < view.ready:
                cut.append(view)
        return cut

    def _chunk(self, step: Step, view: RequestView, others: bool) -> int:
        most = min(view.ready, step.left, self.options.max_chunk or view.ready)
        half = (step.left + 1) // 2
        return half if others and half < most < view.ready else most

    def _hand_out_rest(self, step: Step, cut: list[RequestView]) -> None:
        """Nobody else could use the rest of the budget: the prompts that were cut get it, first come first."""
        if self.options.max_chunk is not None:
            return
        for view in cut:
            if step.left <= 0:
                return
            step.extend(view.id, view.ready)
