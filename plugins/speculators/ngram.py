"""Prompt lookup decoding (Saxena, 2023): what followed these words before may follow them again."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from hotswap.core.interfaces.component import ComponentOptions, Description
from hotswap.core.interfaces.speculator import Drafts, ProposeRow, Speculator, SpeculatorNeeds


class NgramSpeculator(Speculator):
    """Copies what followed the most recent earlier occurrence of the last few tokens (Saxena, "Prompt Lookup Decoding",
    2023). Needs no second model. Choose it for outputs that repeat their prompt: editing, summaries, code, retrieval.
    """

    class Options(ComponentOptions):
        min_n: Annotated[int, Field(ge=1)] = 2
        """Fewest tokens that must match."""
        max_n: Annotated[int, Field(ge=1)] = 4
        """Most tokens that are compared; of all occurrences those that match longest are preferred."""
        max_draft: Annotated[int, Field(ge=1)] = 4
        """Most tokens proposed a step."""

        @model_validator(mode="after")
        def _ordered(self) -> "NgramSpeculator.Options":
            if self.min_n > self.max_n:
                raise ValueError(f"min_n is {self.min_n} and max_n {self.max_n}; min_n must not be the larger one")
            return self

    def describe(self) -> Description:
        return Description(offers=frozenset({"stages"}))

    def needs(self) -> SpeculatorNeeds:
        return SpeculatorNeeds(lookahead=self.options.max_draft)

    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        options = self.options
        return Drafts([
            continuation(row.tokens, options.min_n, options.max_n, min(row.slots, options.max_draft)) for row in rows
        ])


def continuation(tokens: "np.ndarray[Any, Any]", min_n: int, max_n: int, count: int) -> list[int]:
    """``count`` tokens that follow the most recent among the longest earlier matches of the end of ``tokens`` [L].

    Matches are of ``min_n`` to ``max_n`` tokens; without one nothing is returned. Where the copy reaches the end of
    ``tokens`` it goes on with what it has copied, as in LZ77 (Ziv and Lempel, 1977): a loop is continued as a loop.
    """
    if count < 1 or len(tokens) <= min_n:
        return []
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    matched = 1 if len(ends) else 0
    while len(ends) and matched < max_n:
        longer = ends[ends > matched]
        longer = longer[tokens[longer - matched - 1] == tokens[-matched - 1]]
        if not len(longer):
            break
        ends, matched = longer, matched + 1
    if matched < min_n:
        return []
    copied = tokens[ends[-1] :]
    found: list[int] = copied[np.arange(count) % len(copied)].tolist()
    return found
