"""What backends share about pages."""

import math

import numpy as np
import torch

from hotswap.core.execution.layout import IntArray
from hotswap.core.interfaces.layout import GroupLayout
from hotswap.plugins.cpu import memory


def begun_pages(pages: GroupLayout, queries: IntArray, lengths: IntArray) -> torch.Tensor | None:
    """Ids [n] int64 of the pages in which a row ends that this step begins and does not fill; None where there is none.

    ``queries`` and ``lengths`` [R]: the rows' tokens of this step, and in all."""
    last = (lengths - 1) // pages.page_size
    rows = np.flatnonzero((lengths - queries <= last * pages.page_size) & (lengths % pages.page_size > 0))
    if not len(rows):
        return None
    index = torch.from_numpy(np.stack([rows, last[rows]])).to(pages.page_table.device)
    return pages.page_table[index[0], index[1]].long()


def rest_of_pages(last: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots [R, S] behind the slots ``last`` [R] in their pages, as many as there can be: where there are fewer, the
    page's last one again. Of a page that is full that is the slot itself, which a step writes after it has cleared."""
    behind = last[:, None] + 1 + torch.arange(page_size, device=last.device)
    return behind.minimum((last // page_size * page_size + page_size - 1)[:, None])


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """On a CPU a large cache is there at once, and takes what it holds: torch would write every zero."""
    if torch.device(device).type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    return memory.zeros(math.prod(size) * dtype.itemsize).view(dtype).view(size)
