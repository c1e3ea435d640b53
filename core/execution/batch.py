"""A step's rows on the way through the runner, and the requests that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hotswap.core.execution.buffers import Resident
from hotswap.core.execution.layout import IntArray, token_positions
from hotswap.core.interfaces.scheduler import Row


class Cohort(NamedTuple):
    """The requests of a step's rows, in order: where the next step has the same, nobody is looked up again.
    ``slots`` [R]: their places in the table, whose ``version`` it was."""

    names: list[str]
    version: int
    residents: list[Resident]
    slots: IntArray


@dataclass
class Batch:
    """The rows of a step that can run, and their columns [R]: ``counts`` known tokens each, from ``computed`` on, and
    with drafts ``lengths``. A row ``samples`` when it reaches the last known token. ``slots``: the requests' places in
    the table."""

    rows: Sequence[Row]
    residents: list[Resident]
    slots: IntArray
    counts: IntArray
    computed: IntArray
    known: IntArray
    samples: IntArray
    lengths: IntArray
    drafts: Sequence[Sequence[int]]
    draft_probs: list[torch.Tensor | None] | None = None

    def sampled_tokens(self, sampling: IntArray) -> IntArray:
        """Of the rows ``sampling`` the last known token and the drafts, as places [N] int64 among the step's tokens."""
        if not len(sampling):
            return np.zeros(0, np.int64)
        starts = np.cumsum(self.lengths) - self.lengths
        widths = self.lengths - self.counts + 1
        return token_positions(widths[sampling], (starts + self.counts - 1)[sampling])
