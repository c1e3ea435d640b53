"""What the ranks of one engine tell each other in a step, so that all of them compute the same rows.

The first rank of the first stage decides on drafts, the first rank of the last stage on tokens. Both are told as
tensors of numbers [rows, width] whose shape every rank knows beforehand. A rank that fails there says so in the same
place, and the step fails on all of them together.
"""

from collections.abc import Callable, Sequence

import torch

from hotswap.core.execution.choosing import Choices
from hotswap.core.modeling.mesh import Mesh

_FAULTY = -1
_FAILED = -2


class StepFailedTogether(Exception):
    """The rank that decides has failed this step, and every rank that waits for it knows. On that rank its cause is the
    reason."""


class Accord:
    """``lookahead``: most drafts of a row. Where a rank is alone, everything is its own word."""

    def __init__(self, mesh: Mesh, device: str, lookahead: int) -> None:
        self._mesh, self._device, self._lookahead = mesh, device, lookahead

    def drafts(self, count: int, propose: Callable[[], list[list[int]]]) -> list[list[int]]:
        """The drafts of ``count`` rows. ``propose`` is called on each rank of the first stage; those of the rank that
        leads it are taken."""
        if self._mesh.alone:
            return propose()
        table, error = torch.full((count, 1 + self._lookahead), _FAILED), None
        if self._mesh.is_first:
            try:
                table = _table(propose(), self._lookahead)
            except Exception as raised:
                error = raised
            table = self._mesh.share(table.to(self._device))
        else:
            table = self._mesh.receive(table.to(self._device))
        self._mesh.pass_on(table)
        return [row[1 : 1 + row[0]] for row in _checked(table, error)]

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
