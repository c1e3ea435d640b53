"""The tensors that captured steps read: filled anew before each replay, never moved.

Legend: R rows with padding, n of them real, m queries of each row, P pages of a table.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hotswap.core.execution.buffers import PageTable, RequestTable
from hotswap.core.execution.layout import IntArray
from hotswap.core.interfaces.layout import BatchLayout, GroupLayout


class GraphKey(NamedTuple):
    """What a captured step depends on: ``rows`` R, padding included, of ``queries`` m tokens each."""

    rows: int
    queries: int


class StaticBatch:
    """One set of tensors for all captured steps: a step of R rows reads the first R rows and R m tokens of each.

    A row of fewer than m tokens is filled up in front, with tokens that were computed before: they attend as they did,
    and what they write goes to the dummy page. Padding rows lie in the dummy page altogether. So nothing that is only
    there to fill up is ever read by a token that counts, and no page of a request is written but by its own new tokens.

    A fill writes everything that the step reads, tables to their full width, so that nothing of an earlier step is
    left. It runs on the stream of the replays, behind the replay before it: one set serves any number of steps in
    flight.
    """

    def __init__(self, table: RequestTable, groups: Sequence[str], keys: Sequence[GraphKey], device: str) -> None:
        self._table, self._device = table, device
        rows, tokens = max(key.rows for key in keys), max(key.rows * key.queries for key in keys)
        self.inputs = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.inputs)
        self.kv_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.page_tables = {
            group: torch.zeros(rows, self._pages(group).pages.shape[1], dtype=torch.int32, device=device)
            for group in groups
        }
        self.slots = {group: torch.zeros_like(self.inputs) for group in groups}
        self._layouts = {key: self._layout(key) for key in keys}

    def layout(self, key: GraphKey) -> BatchLayout:
        """Views of the tensors; the same object each time."""
        return self._layouts[key]

    def fill(self, key: GraphKey, slots: IntArray, lengths: IntArray, past: IntArray) -> None:
        """Lay out n rows of ``lengths`` new tokens behind ``past`` computed ones, of the requests at ``slots``, all
        [n]. Each row has at least m tokens in all."""
        rows, m = key
        n, ends = len(slots), past + lengths
        positions = np.tile(np.arange(m), (rows, 1))
        positions[:n] = ends[:, None] + np.arange(-m, 0)
        new = positions[:n] >= past[:, None]
        tokens, kv_lens = np.zeros((rows, m), np.int64), np.full(rows, m, np.int32)
        tokens[:n] = self._table.tokens[slots[:, None], positions[:n]]
        kv_lens[:n] = ends
        _put(self.inputs, tokens)
        _put(self.positions, positions)
        _put(self.kv_lens, kv_lens)
        for group, page_table in self.page_tables.items():
            source = self._pages(group)
            pages = np.full((rows, page_table.shape[1]), source.dummy_page, np.int32)
            pages[:n] = source.pages[slots]
            written = np.full((rows, m), source.dummy_page, np.int64)
            written[:n] = np.where(new, np.take_along_axis(pages[:n], positions[:n] // source.page_size, 1),
                                   source.dummy_page)
            _put(page_table, pages)
            _put(self.slots[group], written * source.page_size + positions % source.page_size)

    def _layout(self, key: GraphKey) -> BatchLayout:
        rows, m = key
        tokens, longest = rows * m, self._table.tokens.shape[1]
        groups = {
            group: GroupLayout(page_table[:rows], self.slots[group][:tokens], self._pages(group).page_size)
            for group, page_table in self.page_tables.items()
        }
        return BatchLayout(
            query_starts=torch.arange(0, tokens + 1, m, dtype=torch.int32, device=self._device),
            positions=self.positions[:tokens], kv_lens=self.kv_lens[:rows], groups=groups, num_rows=rows,
            num_tokens=tokens, query_lens=[m] * rows, kv_lens_max=[longest] * rows, uniform_query_len=m, static=True,
        )

    def _pages(self, group: str) -> PageTable:
        return self._table.tables[group]


def _put(target: torch.Tensor, values: IntArray) -> None:
    """Overwrite the first rows of ``target``. The source is fresh and not pinned, so that it may go at once."""
    source = torch.from_numpy(np.ascontiguousarray(values))
    target[: source.shape[0] if target.dim() > 1 else source.numel()].copy_(source.view(-1, *target.shape[1:]))
