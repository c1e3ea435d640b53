"""What the ranks of one engine tell each other in a step, so that all of them compute the same rows.

The first rank of the first stage decides on drafts, the first rank of the last stage on tokens. Both are told as
tensors of numbers [rows, width] whose shape every rank knows beforehand, whatever becomes of the rank that decides. One
that fails says so in the same place: without drafts the step goes on, without tokens it fails on all of them together.
"""

from collections.abc import Callable, Sequence

import torch

from hotswap.core.execution.choosing import Choices
from hotswap.core.execution.speculation import Proposal
from hotswap.core.interfaces.speculator import Drawn
from hotswap.core.modeling.mesh import Mesh

_FAULTY = -1
_FAILED = -2
_DRAWN = -3


class StepFailedTogether(Exception):
    """The rank that decides has failed this step, and every rank that waits for it knows. On that rank its cause is the
    reason."""


class ProposalEndedError(Exception):
    """The rank that leads has ended its proposal, while this one would have it draw."""


class Accord:
    """``lookahead``: most drafts of a row. ``meets``: ranks that propose may meet in collectives of the target's. Where
    a rank is alone, everything is its own word.

    What the leading rank says of drafts is a table [rows, 2 + lookahead]: in the first row's first place the number of
    proposals that made no sense, or what else the table is; then by row a length and so many drafts. A draw has its
    tokens in the places of the drafts, so that whoever waits for a draw or for the end understands either.
    """

    def __init__(self, mesh: Mesh, device: str, lookahead: int, meets: bool = False) -> None:
        self._mesh, self._device, self._lookahead, self._meets = mesh, device, lookahead, meets
        self._rows, self._drawing = 0, False
        self._last_word: torch.Tensor | None = None
        """The table of the leading rank that came while this one waited for a draw."""

    def drafts(self, count: int, propose: Callable[[], Proposal]) -> Proposal:
        """The drafts of ``count`` rows, and how many proposals were dropped. ``propose`` is called on each rank of the
        first stage, and may :meth:`draw`; what the rank that leads says counts.

        Where it raises there, no row has a draft. Raises where it raised on a rank that others may be waiting for in a
        collective of the target's: they cannot be told."""
        own = Proposal([[] for _ in range(count)], None, 1, failed=True)
        self._rows, self._drawing, self._last_word = count, False, None
        if not self._mesh.is_first:
            own = own._replace(failed=False)
        else:
            try:
                own = propose()
            except Exception:
                if self._meets and not self._drawing and not self._mesh.alone:
                    raise
        return own if self._mesh.alone else self._agreed(own)

    def draw(self, count: int, draw: Callable[[], Drawn]) -> Drawn:
        """``count`` drafts inside ``propose``. ``draw`` is called on the rank that leads, and others get its tokens
        alone. ProposalEndedError where it has none to give."""
        if self._mesh.alone:
            return draw()
        if self._last_word is not None:
            raise ProposalEndedError("the rank that leads has ended its proposal; its log says why")
        if count > self._rows * self._lookahead:
            raise ValueError(f"{count} drafts at once, more than {self._lookahead} for each of {self._rows} rows")
        self._drawing, drawn = True, Drawn([], None)
        table = self._empty(_DRAWN)
        if self._mesh.leads:
            drawn = draw()
            places = torch.zeros(self._rows * self._lookahead, dtype=torch.int64)
            places[:count] = torch.tensor(drawn.tokens)
            table[:, 2:] = places.view(self._rows, self._lookahead)
        table = self._share(table)
        if table[0, 0] != _DRAWN:
            self._last_word = table
            raise ProposalEndedError("the rank that leads has ended its proposal; its log says why")
        self._drawing = False
        return Drawn(table[:, 2:].flatten()[:count].tolist(), drawn.probs)

    def _agreed(self, own: Proposal) -> Proposal:
        word = self._last_word
        if not self._mesh.is_first:
            word = self._mesh.receive(self._empty(_FAILED).to(self._device)).cpu()
        elif word is None:
            table = self._empty(_FAILED)
            if not own.failed:
                table[0, 0], table[:, 1:] = own.dropped, _table(own.drafts, self._lookahead)
            word = self._share(table)
            while word[0, 0] == _DRAWN:  # this rank has failed, or drawn less than the leading one
                word = self._share(table)
        self._mesh.pass_on(word.to(self._device))
        rows = word.tolist()
        dropped = rows[0][0]
        if dropped == _FAILED:
            return Proposal([[] for _ in rows], None, 1, failed=True)
        return Proposal([row[2 : 2 + row[1]] for row in rows], own.probs, dropped, own.failed)

    def _share(self, table: torch.Tensor) -> torch.Tensor:
        """On the host, where it is looked at more than once."""
        return self._mesh.share(table.to(self._device)).cpu()

    def _empty(self, what: int) -> torch.Tensor:
        table = torch.zeros(self._rows, 2 + self._lookahead, dtype=torch.int64)
        table[0, 0] = what
        return table

    def choices(self, count: int, choose: Callable[[], Choices]) -> Choices:
        """What ``count`` rows keep. ``choose`` is called on the first rank of the stage; the others learn the tokens,
        and which rows are faulty, though not why."""
        if self._mesh.alone:
            return choose()
        table, choices, error = torch.full((count, 3 + self._lookahead), _FAILED), Choices([], []), None
        if self._mesh.leads:
            try:
                choices = choose()
                accepted = [_FAULTY if i in choices.errors else n for i, n in enumerate(choices.accepted)]
                table = torch.cat([torch.tensor(accepted)[:, None], _table(choices.kept, 1 + self._lookahead)], 1)
            except Exception as raised:
                error = raised
        rows = _checked(self._mesh.share(table.to(self._device)), error)
        if self._mesh.leads:
            return choices
        return Choices(
            [row[2 : 2 + row[1]] for row in rows], [max(row[0], 0) for row in rows],
            {i: "the rank that samples says why" for i, row in enumerate(rows) if row[0] == _FAULTY})


def _table(rows: Sequence[Sequence[int]], width: int) -> torch.Tensor:
    """[rows, 1 + width] int64: the length of each row, then its numbers, then zeros."""
    return torch.tensor([[len(row), *row, *([0] * (width - len(row)))] for row in rows])


def _checked(table: torch.Tensor, error: Exception | None) -> list[list[int]]:
    rows: list[list[int]] = table.tolist()
    if rows[0][0] == _FAILED:
        raise StepFailedTogether("another rank failed; its log says why") from error
    return rows
