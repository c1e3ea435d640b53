"""Two backends over the same pages: one for steps of decodes, the other for all other steps."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import numpy as np
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import (
    AttentionBackend,
    AttentionSupport,
    BatchLimits,
    GraphLevel,
    GroupShape,
)
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Part
from hotswap.core.interfaces.layout import BatchLayout
from hotswap.plugins.attention.pages import begun_pages

T = TypeVar("T")

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


class CompositeOptions(ComponentOptions):
    prefill: Annotated[ComponentRef, Part("attention")]
    """The backend of steps with prompts, chunks or drafts, decodes beside them included."""
    decode: Annotated[ComponentRef, Part("attention")]
    """The backend of steps in which every row computes one token."""


@dataclass
class _State:
    """``states`` [prefill, decode]. Of the step at hand: which of them has it, and the pages to clear for the other."""

    group: str
    states: tuple[Any, Any]
    decoding: bool = False
    begun: torch.Tensor | None = None


class CompositeAttention(AttentionBackend):
    """One backend for prefill, another for decode, chosen step by step by the layout alone.

    Choose it where no single backend is best at both: a kernel library's prefill with a decode of our own, or a decode
    kernel whose prefill does not take the model's shape. SGLang and vLLM let prefill and decode differ in the same way.
    Both must be able to read one page layout, and some page size; else the start is refused. What the pair supports is
    what both do. A step that mixes decodes with prompts is the prefill backend's.
    """

    Options = CompositeOptions

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._backends: tuple[AttentionBackend, AttentionBackend] = self.parts["prefill"], self.parts["decode"]
        self._supports = tuple(backend.support() for backend in self._backends)
        self._support = self._meet()

    def support(self) -> AttentionSupport:
        return self._support

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> Cache:
        return self._backends[0].allocate(self._laid_out(shape), num_pages, limits)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> _State:
        prefill, decode = (backend.bind(group, self._laid_out(shape), limits) for backend in self._backends)
        return _State(group, (prefill, decode))

    def plan(self, state: _State, layout: BatchLayout) -> None:
        state.decoding = layout.uniform_query_len == 1
        self._backends[state.decoding].plan(state.states[state.decoding], layout)
        state.begun = None
        if _clears(self._supports[state.decoding], self._supports[not state.decoding]):
            queries, lengths = np.asarray(layout.query_lens), np.asarray(layout.kv_lens_max)
            state.begun = begun_pages(layout.groups[state.group], queries, lengths)

    def run(
        self, state: _State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, out: torch.Tensor,
    ) -> None:
        if state.begun is not None:
            for tensor in cache:
                tensor.index_fill_(0, state.begun, 0.0)
        self._backends[state.decoding].run(state.states[state.decoding], q, k, v, cache, out)

    def _laid_out(self, shape: GroupShape) -> GroupShape:
        return replace(shape, layout=shape.layout or self._support.layouts[0])

    def _meet(self) -> AttentionSupport:
        """What both do. ConfigError where that is nothing."""
        prefill, decode = self._supports
        return AttentionSupport(
            devices=self._common("device", prefill.devices, decode.devices),
            dtypes=self._common("dtype", prefill.dtypes, decode.dtypes),
            head_dims=self._common("head size", prefill.head_dims, decode.head_dims),
            page_sizes=self._common("page size", prefill.page_sizes, decode.page_sizes),
            layouts=self._common("page layout", prefill.layouts, decode.layouts) or (),
            needs_clean_pages=prefill.needs_clean_pages or decode.needs_clean_pages,
            leaves_clean_pages=all(
                one.leaves_clean_pages or other.needs_clean_pages
                for one, other in ((prefill, decode), (decode, prefill))),
            windows=prefill.windows and decode.windows,
            softcap=prefill.softcap and decode.softcap,
            graph_level=_graph_level(prefill, decode),
            rounding=max(prefill.rounding, decode.rounding),
            note="; ".join(dict.fromkeys(note for note in (prefill.note, decode.note) if note)),
        )

    def _common(self, what: str, prefill: tuple[T, ...] | None, decode: tuple[T, ...] | None) -> tuple[T, ...] | None:
        """Those of ``prefill`` that ``decode`` has, too; None stands for all."""
        if prefill is None or decode is None:
            return decode if prefill is None else prefill
        common = tuple(value for value in prefill if value in decode)
        if not common:
            sides = (", ".join(map(str, side)) or "none that others read" for side in (prefill, decode))
            first, second = (
                f"{role} {backend.label} takes {side}"
                for role, backend, side in zip(("prefill", "decode"), self._backends, sides, strict=True))
            raise ConfigError(f"no {what} suits both backends: {first}; {second}. Choose another for one of them.")
        return common


def _clears(one: AttentionSupport, other: AttentionSupport) -> bool:
    """Whether the pages that ``one`` begins have to be cleared for ``other``."""
    return other.needs_clean_pages and not one.leaves_clean_pages


def _graph_level(prefill: AttentionSupport, decode: AttentionSupport) -> GraphLevel:
    """Steps of one token are the decode backend's, others the prefill backend's. Pages that are cleared for the other
    side are as many as the step begins: no graph holds that."""
    if decode.graph_level < GraphLevel.ONE_TOKEN or _clears(decode, prefill):
        return GraphLevel.NEVER
    return GraphLevel.ONE_TOKEN if _clears(prefill, decode) else max(
        GraphLevel.ONE_TOKEN, prefill.graph_level)
