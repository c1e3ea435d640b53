"""What backends share about pages."""

import numpy as np
import torch

from hotswap.core.execution.layout import IntArray
from hotswap.core.interfaces.layout import GroupLayout


def begun_pages(pages: GroupLayout, queries: IntArray, lengths: IntArray) -> torch.Tensor | None:
    """Ids [n] int64 of the pages in which a row ends that this step begins and does not fill; None where there is none.

    ``queries`` and ``lengths`` [R]: the rows' tokens of this step, and in all."""
    last = (lengths - 1) // pages.page_size
    rows = np.flatnonzero((lengths - queries <= last * pages.page_size) & (lengths % pages.page_size > 0))
    if not len(rows):
        return None
    index = torch.from_numpy(np.stack([rows, last[rows]])).to(pages.page_table.device)
    return pages.page_table[index[0], index[1]].long()
