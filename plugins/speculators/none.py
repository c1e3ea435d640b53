"""No speculation."""

from collections.abc import Sequence

from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.speculator import Drafts, ProposeRow, Speculator, SpeculatorNeeds


class NoSpeculator(Speculator):
    """Proposes nothing: each row that samples yields one token a step. Choose it for large batches, which keep the
    device busy without guesses."""

    def describe(self) -> Description:
        return Description(offers=frozenset({"stages"}))

    def needs(self) -> SpeculatorNeeds:
        return SpeculatorNeeds()

    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        return Drafts([[] for _ in rows])
