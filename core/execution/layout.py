"""Lays a step's rows out in the batch, vectorised: the values are those of :mod:`hotswap.core.interfaces.layout`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hotswap.core.interfaces.layout import BatchLayout, GroupLayout

IntArray = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of integers."""


def batch_layout(
    query_lens: IntArray, past: IntArray, tables: Mapping[str, tuple[IntArray, int]], device: str,
    num_rows: int | None = None,
) -> BatchLayout:
    """The layout of rows of ``query_lens`` [R] tokens behind ``past`` [R] computed ones.

    ``tables`` gives each group's page ids [R, at least the pages of the longest row] int32 and its page size. All
    tensors are new: those of a step in flight are never written again.
    """
    kv_lens = past + query_lens
    longest = int(kv_lens.max())
    starts = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(query_lens, out=starts[1:])
    row_of_token = np.repeat(np.arange(len(query_lens)), query_lens)
    positions = token_positions(query_lens, past)
    groups = {}
    for group, (table, page_size) in tables.items():
        page, offset = np.divmod(positions, page_size)
        slots = table[row_of_token, page].astype(np.int64) * page_size + offset
        width = -(-longest // page_size)
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
    if ends[-1] == len(query_lens):  # a token each, since no row has none
        return np.array(past, np.int64)
    positions: IntArray = np.arange(ends[-1]) + np.repeat(past - ends + query_lens, query_lens)
    return positions


def _tensor(array: IntArray, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device == "cpu" else tensor.to(device)
