"""Chooses among a row's numbers without sorting or adding up all of them: its best, or one by its share of the row."""

import torch

_BLOCK = 256
"""Weights of which the sum is taken before running sums are: those cannot be vectorised."""

_GROUP = 16
"""Numbers of which only the largest is looked at, to begin with."""


def pick(weights: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Indices [n] into ``weights`` [n, K] int64, each with its weight's share of the row: the first whose running sum
    exceeds the part of the total that ``draws`` [n] float64 say. Never one of weight zero, except in a row of zeros,
    where it is the first."""
    width = weights.shape[1]
    count = width // _BLOCK
    sums = weights[:, : count * _BLOCK].view(len(weights), count, _BLOCK).sum(-1)
    if width % _BLOCK:
        sums = torch.cat([sums, weights[:, count * _BLOCK :].sum(-1, keepdim=True)], 1)
    total = sums.sum(-1, keepdim=True)
    # The product may round up to the total, or beyond it where that has more than 53 bits.
    block, target = _reached(sums, torch.minimum((draws[:, None] * total).long(), total - 1))
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, ids.clamp(max=width - 1)).masked_fill_(ids >= width, 0)
    return ids.gather(1, _reached(inside, target)[0]).squeeze(1).clamp_(max=width - 1)  # a row of NaN has any sum


def _reached(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the running sum of ``weights`` [n, K] first exceeds ``target`` [n, 1], and how much of the target is left
    there: both [n, 1]."""
    sums = weights.cumsum(-1)
    at = torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)
    return at, target - (sums - weights).gather(1, at)


def best_of(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` largest of each row of ``x`` [n, V], largest first, and their ids, the lowest first among equals:
    [n, width] each. Of those that equal the last one any may be left out."""
    if width == x.shape[1]:
        everything = torch.sort(x, dim=-1, descending=True, stable=True)
        return everything.values, everything.indices
    among = _promising(x, width)
    found = (x if among is None else x.gather(1, among)).topk(width, dim=-1, sorted=False).indices
    ids = (found if among is None else among.gather(1, found)).sort(-1).values
    values, order = torch.sort(x.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _promising(x: torch.Tensor, width: int) -> torch.Tensor | None:
    """Ids [n, K] among which there are ``width`` that no other exceeds; None: all, where that leaves few out.

    Of groups of numbers the largest are compared, and those groups taken that have the ``width`` largest: each has one
    that no number outside of them exceeds. torch's selection takes a multiple of that one reading of all numbers.
    """
    count = x.shape[1] // _GROUP
    if 2 * width > count:
        return None
    peaks = x[:, : count * _GROUP].view(len(x), _GROUP, count).amax(1)
    chosen = peaks.topk(width, dim=-1, sorted=False).indices
    ids = (chosen[:, None] + count * torch.arange(_GROUP, device=x.device)[:, None]).flatten(1)
    rest = torch.arange(count * _GROUP, x.shape[1], device=x.device)
    return torch.cat([ids, rest.expand(len(x), -1)], 1)
