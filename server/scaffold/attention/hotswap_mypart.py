"""An attention backend: writes new keys and values into the pages, then attends."""

from typing import Annotated, Any

import torch
from pydantic import Field

from hotswap.core.interfaces.attention import NHD, AttentionBackend, AttentionSupport, BatchLimits, GroupShape
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.layout import BatchLayout


class State:
    """What ``plan`` leaves for ``run``, of one cache group."""

    def __init__(self, group: str, shape: GroupShape) -> None:
        self.group, self.shape = group, shape
        self.layout: BatchLayout


class MyPart(AttentionBackend):
    """Attention by its definition, one row after the other.

    Choose it ... (as the place to begin: it is slow, and short enough to be read).

    T tokens of the batch, H query heads, K key-value heads, D head size, S tokens a page; m queries, L keys of a row.
    """

    class Options(ComponentOptions):
        max_queries: Annotated[int, Field(ge=1)] = 256
        """So many tokens of a prompt attend at a time: the scores take so many times the length of memory."""

    def support(self) -> AttentionSupport:
        """Any device, head size, page size, window and softcap. What is not supported is refused at the start."""
        return AttentionSupport(dtypes=("float32", "bfloat16", "float16"), layouts=(NHD,), rounding=1e-5)

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's keys and values [pages, S, K, D]."""
        size = (num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
        keys, values = (
            torch.zeros(size, dtype=getattr(torch, limits.dtype), device=limits.device) for _ in range(2))
        return keys, values

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> State:
        return State(group, shape)

    def plan(self, state: Any, layout: BatchLayout) -> None:
        """Once a step; ``run`` is called once a layer."""
        state.layout = layout

    def run(
        self, state: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor,
    ) -> None:
        layout, pages = state.layout, state.layout.groups[state.group]
        keys, values = cache
        keys.flatten(0, 1)[pages.slots] = k
        values.flatten(0, 1)[pages.slots] = v
        start = 0
        for row, (queries, length) in enumerate(zip(layout.query_lens, layout.kv_lens.tolist(), strict=True)):
            table = pages.page_table[row, : -(-length // pages.page_size)]
            own_keys, own_values = keys[table].flatten(0, 1), values[table].flatten(0, 1)
            for first in range(0, queries, self.options.max_queries):
                last = min(queries, first + self.options.max_queries)
                piece, seen = slice(start + first, start + last), length - queries + last
                out[piece] = _attend(q[piece], own_keys[:seen], own_values[:seen], state.shape)
            start += queries


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: GroupShape) -> torch.Tensor:
    """q [m, H, D], the last m of the positions of k, v [L, K, D] -> [m, H, D]."""
    asking, keys = torch.arange(len(k) - len(q), len(k))[:, None], torch.arange(len(k))[None, :]
    hidden = keys > asking
    if shape.window is not None:  # what lies before it may be another request's by now, so it is not even read
        hidden |= keys <= asking - shape.window
        first = max(0, len(k) - len(q) - shape.window + 1)
        k, v, hidden = k[first:], v[first:], hidden[:, first:]
    k, v = (x.float().repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (k, v))
    scores = torch.einsum("mhd,lhd->hml", q.float(), k) * shape.scale
    if shape.softcap is not None:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    weights = scores.masked_fill(hidden.to(q.device), float("-inf")).softmax(-1)
    return torch.einsum("hml,lhd->mhd", weights, v).to(q.dtype)
