"""How one step's rows lie in the batch: what the runner hands to the attention backend.

Legend of shapes, here and in all kernels and models: T tokens of the batch, R rows (padded), P pages of the widest
table, H query heads, K key-value heads, D head size, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

IntArray = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of integers."""


@dataclass
class GroupLayout:
    """One cache group's pages for this step.

    page_table [R, P] int32: page ids by logical page, the dummy page beyond a row's end and below its first live page.
    slots [T] int64: where each new token's keys and values go, page id * page size + offset.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    page_size: int


@dataclass
class BatchLayout:
    """query_starts [R + 1] int32, positions [T] int64, kv_lens [R] int32 (with this step's tokens): device truth.

    ``kv_lens_max`` and ``query_lens`` are the host's (upper bounds where the device is ahead). ``uniform_query_len``:
    the rows' common query length, None where they differ. ``num_rows`` and ``num_tokens`` count what is real; padding
    rows follow, live in the dummy page and are computed like any other. Rows with a query length of 0 do not occur.
    """

    query_starts: torch.Tensor
    positions: torch.Tensor
    kv_lens: torch.Tensor
    groups: dict[str, GroupLayout]
    num_rows: int
    num_tokens: int
    query_lens: list[int]
    kv_lens_max: list[int]
    uniform_query_len: int | None = None


def batch_layout(
    query_lens: IntArray, past: IntArray, tables: Mapping[str, tuple[IntArray, int]], device: str,
    num_rows: int | None = None,
) -> BatchLayout:
    """The layout of rows of ``query_lens`` [R] tokens behind ``past`` [R] computed ones.

    ``tables`` gives each group's page ids [R, at least the pages of the longest row] int32 and its page size. All
    tensors are new: those of a step in flight are never written again.
    """
    kv_lens = past + query_lens
    starts = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    row_of_token = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = token_positions(query_lens, past)
    groups = {}
    for group, (table, page_size) in tables.items():
        slots = table[row_of_token, positions // page_size].astype(np.int64) * page_size + positions % page_size
        width = -(-int(kv_lens.max()) // page_size)
        groups[group] = GroupLayout(_tensor(table[:, :width], device), _tensor(slots, device), page_size)
    num_rows = len(query_lens) if num_rows is None else num_rows
    uniform = int(query_lens[0]) if (query_lens == query_lens[0]).all() else None
    return BatchLayout(
        query_starts=_tensor(starts, device), positions=_tensor(positions, device),
        kv_lens=_tensor(kv_lens.astype(np.int32), device), groups=groups, num_rows=num_rows,
        num_tokens=int(starts[num_rows]), query_lens=query_lens.tolist(), kv_lens_max=kv_lens.tolist(),
        uniform_query_len=uniform,
    )


def token_positions(query_lens: IntArray, past: IntArray) -> IntArray:
    """[T] int64: rows of ``query_lens`` [R] tokens, each from ``past`` [R] on."""
    ends = np.cumsum(query_lens)
    positions: IntArray = np.arange(ends[-1]) + np.repeat(past - ends + query_lens, query_lens)
    return positions


def _tensor(array: IntArray, device: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)
