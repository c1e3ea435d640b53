"""How one step's rows lie in the batch: what the runner hands to the attention backend.

Legend of shapes, here and in all kernels and models: T tokens of the batch, R rows (padded), P pages of the widest
table, H query heads, K key-value heads, D head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class GroupLayout:
    """One cache group's pages for this step.

    page_table [R, P] int32: page ids by logical page, the dummy page beyond a row's end and below its first live page.
    slots [T] int64: where each new token's keys and values go, page id * page size + offset.
    """

    page_table: "torch.Tensor"
    slots: "torch.Tensor"
    page_size: int


@dataclass
class BatchLayout:
    """query_starts [R + 1] int32, positions [T] int64, kv_lens [R] int32 (with this step's tokens): device truth.

    ``kv_lens_max`` and ``query_lens`` are the host's (upper bounds where the device is ahead). ``uniform_query_len``:
    the rows' common query length, None where they differ. ``num_rows`` and ``num_tokens`` count what is real; padding
    rows follow, live in the dummy page and are computed like any other. Rows with a query length of 0 do not occur.

    ``static``: the step is captured in a graph, or replayed from one. Its tensors then keep their addresses for every
    step of as many rows and of the same uniform query length, and so must the buffers that ``plan`` derives from them;
    the host's numbers are bounds, the same in every such step.
    """

    query_starts: "torch.Tensor"
    positions: "torch.Tensor"
    kv_lens: "torch.Tensor"
    groups: dict[str, GroupLayout]
    num_rows: int
    num_tokens: int
    query_lens: list[int]
    kv_lens_max: list[int]
    uniform_query_len: int | None = None
    static: bool = False
