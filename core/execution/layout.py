"""Lays a step's rows out in the batch, vectorised: the values are those of :mod:`hotswap.core.interfaces.layout`."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from hotswap.core.interfaces.layout import BatchLayout, GroupLayout

IntArray = np.ndarray[Any, np.dtype[Any]]
"""A numpy array of integers."""


class Spread(NamedTuple):
    """How a step's T tokens are divided among its rows. ``starts`` [R + 1] int32: the tokens before each row; ``rows``
    [T] and ``within`` [T] int64: each token's row, and its place in that; ``uniform``: how many each row has, None
    where they differ. To be read only."""

    starts: IntArray
    rows: IntArray
    within: IntArray
    uniform: int | None

    def positions(self, past: IntArray) -> IntArray:
        """[T] int64: of rows that begin at ``past`` [R]."""
        positions: IntArray = past[self.rows] + self.within
        return positions


def spread(query_lens: IntArray) -> Spread:
    """Of rows of ``query_lens`` [R] tokens: kept, since a decoding step has the same as the one before it."""
    return _spread(tuple(query_lens.tolist()))


@lru_cache(maxsize=8)
def _spread(query_lens: tuple[int, ...]) -> Spread:
    lengths = np.array(query_lens, np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(lengths)), lengths)
    uniform = query_lens[0] if len(set(query_lens)) == 1 else None
    made = Spread(starts.astype(np.int32), rows, np.arange(len(rows)) - starts[rows], uniform)
    for shared in made[:3]:  # by all engines of the process
        shared.flags.writeable = False
    return made


def batch_layout(
    query_lens: IntArray, past: IntArray, tables: Mapping[str, tuple[IntArray, int]], device: str,
    num_rows: int | None = None,
) -> BatchLayout:
    """The layout of rows of ``query_lens`` [R] tokens behind ``past`` [R] computed ones.

    ``tables`` gives each group's page ids [R, at least the pages of the longest row] int32 and its page size. All
    tensors are new: those of a step in flight are never written again.
    """
    kv_lens, where = past + query_lens, spread(query_lens)
    longest = int(kv_lens.max())
    positions = where.positions(past)
    groups = {}
    for group, (table, page_size) in tables.items():
        page, offset = np.divmod(positions, page_size)
        slots = table[where.rows, page].astype(np.int64) * page_size + offset
        width = -(-longest // page_size)
        groups[group] = GroupLayout(_tensor(table[:, :width], device), _tensor(slots, device), page_size)
    num_rows = len(query_lens) if num_rows is None else num_rows
    return BatchLayout(
        query_starts=_tensor(where.starts.copy(), device), positions=_tensor(positions, device),
        kv_lens=_tensor(kv_lens.astype(np.int32), device), groups=groups, num_rows=num_rows,
        num_tokens=int(where.starts[num_rows]), query_lens=query_lens.tolist(), kv_lens_max=kv_lens.tolist(),
        uniform_query_len=where.uniform,
    )


def token_positions(query_lens: IntArray, past: IntArray) -> IntArray:
    """[T] int64: rows of ``query_lens`` [R] tokens, each from ``past`` [R] on."""
    return spread(query_lens).positions(past)


def _tensor(array: IntArray, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device == "cpu" else tensor.to(device)
