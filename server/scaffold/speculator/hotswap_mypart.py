"""A speculator: proposes tokens that the model verifies in the same step."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions, Description
from hotswap.core.interfaces.speculator import Drafts, ProposeRow, Speculator, SpeculatorNeeds


class MyPart(Speculator):
    """Proposes what followed the last token when it came up before.

    Choose it ... (for text that repeats itself; a draft that is wrong costs a little compute and changes nothing).
    """

    class Options(ComponentOptions):
        max_draft: Annotated[int, Field(ge=1)] = 3
        """Most tokens proposed in a step."""

    def describe(self) -> Description:
        """"stages": it needs nothing of the model, and so works behind pipeline stages."""
        return Description(offers=frozenset({"stages"}))

    def needs(self) -> SpeculatorNeeds:
        return SpeculatorNeeds(lookahead=self.options.max_draft)

    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        """For each row at most ``slots`` tokens. Chosen, not sampled, so they come without probabilities."""
        return Drafts([self._continuation(row) for row in rows])

    def _continuation(self, row: ProposeRow) -> list[int]:
        earlier = np.flatnonzero(row.tokens[:-1] == row.tokens[-1])
        if not len(earlier):
            return []
        begin = int(earlier[-1]) + 1
        found: list[int] = row.tokens[begin : begin + min(row.slots, self.options.max_draft)].tolist()
        return found
