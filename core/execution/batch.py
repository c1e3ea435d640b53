"""A step's rows on the way through the runner, and the requests that they belong to."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hotswap.core.execution.buffers import Resident
from hotswap.core.execution.layout import IntArray, token_positions
from hotswap.core.interfaces.scheduler import Row


class Cohort(NamedTuple):
    """The requests of a step's rows, in order: where the next step has the same, nobody is looked up again.
    ``slots`` [R]: their places in the table, whose ``version`` it was. ``scored``: the rows whose requests ask for
    logprobs of the prompt."""

    names: tuple[str, ...]
    version: int
    residents: list[Resident]
    slots: IntArray
    scored: list[int]

    @classmethod
    def of(cls, residents: list[Resident], version: int) -> "Cohort":
        slots = np.array([resident.slot for resident in residents], np.int64)
        scored = [row for row, one in enumerate(residents) if one.new.sampling.prompt_logprobs is not None]
        return cls(tuple(one.new.id for one in residents), version, residents, slots, scored)


@dataclass
class Batch:
    """The rows of a step that can run, and their columns [R]: ``counts`` known tokens each, from ``computed`` to
    ``ends``, and with drafts ``lengths``. A row ``samples`` when it reaches the last known token. ``cohort``: the rows'
    requests.

    What is found out of them is found out once, when the drafts are there."""

    rows: Sequence[Row]
    cohort: Cohort
    counts: IntArray
    computed: IntArray
    ends: IntArray
    known: IntArray
    samples: IntArray
    lengths: IntArray
    drafts: Sequence[Sequence[int]]
    draft_probs: list[torch.Tensor | None] | None = None

    @property
    def residents(self) -> list[Resident]:
        return self.cohort.residents

    @property
    def slots(self) -> IntArray:
        """[R]: the requests' places in the table."""
        return self.cohort.slots

    @cached_property
    def sampling(self) -> list[int]:
        """The rows that sample."""
        return np.flatnonzero(self.samples).tolist()

    @property
    def sampling_slots(self) -> IntArray:
        """The places in the table of the rows that sample."""
        return self.slots if len(self.sampling) == len(self.rows) else self.slots[self.sampling]

    @cached_property
    def heads(self) -> IntArray | None:
        """What a head will see, as places [N] among the step's tokens: of the rows that sample, the last known token
        and the drafts. None: all tokens."""
        num_tokens = int(self.lengths.sum())
        if len(self.sampling) == num_tokens:
            return None
        starts = np.cumsum(self.lengths) - self.lengths
        first = starts + self.counts - 1
        tokens = token_positions((self.lengths - self.counts + 1)[self.sampling], first[self.sampling])
        return None if len(tokens) == num_tokens else tokens
