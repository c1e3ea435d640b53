"""A fault to be found: an attention backend that makes each step of the worker longer by a share of itself.

It computes what ``inner`` computes and, at the start of each step, spins for ``share`` of what the step before took.
The time between two starts is that of a step where the engine is busy; where it is not, twice the time of the layers
stands in for it, which is about what embedding, head and sampling add to small models.
"""

from collections.abc import Mapping
from time import perf_counter
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.attention import AttentionBackend, AttentionSupport, BatchLimits, GroupShape, PageLayout
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
from hotswap.core.interfaces.layout import BatchLayout


class SlowedOptions(ComponentOptions):
    inner: Annotated[ComponentRef, Part("attention")] = ComponentRef(use="torch")
    """The backend that does the work."""
    share: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Of a step's time, what is wasted."""


class SlowedAttention(AttentionBackend):
    """For the power runs of ``benchmarks/experiment``; choose it for nothing else."""

    Options = SlowedOptions

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._inner: AttentionBackend = self.parts["inner"]
        self._began = self._ended = 0.0

    def support(self) -> AttentionSupport:
        return self._inner.support()

    def page_axes(self) -> PageLayout:
        return self._inner.page_axes()

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> Any:
        return self._inner.allocate(shape, num_pages, limits)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> Any:
        return self._inner.bind(group, shape, limits)

    def plan(self, state: Any, layout: BatchLayout) -> None:
        now = perf_counter()
        step = min(now - self._began, 2 * (self._ended - self._began)) if self._ended > self._began else 0.0
        until = now + self.options.share * step
        while perf_counter() < until:
            pass
        self._began = perf_counter()
        self._inner.plan(state, layout)

    def run(self, state: Any, q: Any, k: Any, v: Any, cache: Any, out: Any) -> None:
        self._inner.run(state, q, k, v, cache, out)
        self._ended = perf_counter()
