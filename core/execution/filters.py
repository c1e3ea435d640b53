"""What temperature and filters leave of a row of logits: whole numbers, in proportion to probability.

Filters set weights to zero, in the order of transformers' generation: temperature, top-k, top-p (Holtzman et al.,
2020), min-p (Nguyen et al., 2024), typical (Meister et al., 2023). Where tokens are equally good the lower id is kept,
so that ``top_k=1`` and a tiny ``top_p`` are greedy decoding.

Why integers: their sums are exact, so that what is left of a row depends neither on its neighbours nor on how a device
associates a sum.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf, log

import numpy as np
import torch

from hotswap.core.execution.race import winners, winners_of_all, winners_of_rows
from hotswap.core.execution.sampling_table import Group, Scratch
from hotswap.core.execution.selecting import best_of

ONE = 2.0**40
"""The best token's weight. What is 2**40 times less probable weighs nothing, and 2**22 weights add up in an int64."""

_SLICE_ELEMENTS = {"cpu": 1 << 19}
_SLICE_ELEMENTS_ELSEWHERE = 1 << 23
"""Most logits that are processed at a time, each taking about 30 bytes on the way: what a CPU's cache holds, and what
an accelerator's memory spares."""

_WIDTHS = (128, 2048)
"""How many of a row's best tokens are tried before all are sorted: sorting 50,000 takes 50 times as long on a CPU."""


@dataclass(frozen=True)
class Candidates:
    """Integer weights [n, K] of what the filters left; ``ids`` [n, K] names the tokens, None: all, in order."""

    weights: torch.Tensor
    ids: torch.Tensor | None

    def draw(self, keys: torch.Tensor) -> torch.Tensor:
        """[n] int64: a token of each row, whose ``keys`` [n] int64 are."""
        if self.ids is None:
            return winners_of_rows(self.weights, keys)
        held = (self.weights > 0).any(0).nonzero()  # best first, and so zero from somewhere on
        width = int(held[-1]) + 1 if len(held) else 1
        return winners(self.weights[:, :width], self.ids[:, :width], keys)

    def probs(self, vocab_size: int) -> torch.Tensor:
        """[n, V] float32."""
        probs = (self.weights / self.weights.sum(-1, keepdim=True).double()).float()
        if self.ids is None:
            return probs
        return probs.new_zeros(len(probs), vocab_size).scatter_(1, self.ids, probs)


def candidates_of(
    logits: torch.Tensor, best: torch.Tensor, groups: Iterable[Group], scratch: Scratch,
) -> Iterator[tuple[torch.Tensor, Candidates]]:
    """(rows, their candidates) of the rows in ``groups``, in bounded memory. ``logits`` [N, V], ``best`` [N]."""
    for group in groups:
        if group.filtered:
            yield from _filtered(logits, best, group, scratch)
            continue
        for part, x, top in _slices(logits, best, group, scratch):
            weights = weights_of(x, top, part, part.cuts_min_p)
            yield part.rows, Candidates(_cut_typical(weights, part) if part.cuts_typical else weights, None)


def _slices(
    logits: torch.Tensor, best: torch.Tensor, group: Group, scratch: Scratch,
) -> Iterator[tuple[Group, torch.Tensor, torch.Tensor]]:
    """Some rows of ``group`` after the other: their logits in float32, until the next are asked for, and their best."""
    most = max(1, _SLICE_ELEMENTS.get(logits.device.type, _SLICE_ELEMENTS_ELSEWHERE) // logits.shape[1])
    for index in torch.split(torch.arange(len(group.rows), device=logits.device), most):
        part = group if len(index) == len(group.rows) else group.take(index)
        given = logits[_together(part.rows)]
        yield part, scratch.take("logits", given.shape, torch.float32).copy_(given), best[part.rows][:, None]


def draw_unfiltered(
    logits: torch.Tensor, best: torch.Tensor, peaks: torch.Tensor, group: Group, keys: torch.Tensor,
) -> torch.Tensor:
    """[n] int64: a token of each row of ``group``, which has neither top-k, top-p nor typical; of :func:`block_peaks`
    [N, B] and few of the ``logits`` [N, V]. ``keys`` [n]."""
    last = logits.shape[1] - 1
    top = best[group.rows][:, None]

    def weigh(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        values = logits[group.rows[rows][:, None], ids.clamp(max=last)].float()
        return weights_of(values, top[rows], group.take(rows), group.cuts_min_p).masked_fill_(ids > last, 0)

    bounds = weights_of(peaks[group.rows].float(), top, group, group.cuts_min_p)
    return winners_of_all(bounds, weigh, keys).clamp_(max=last)  # where all are NaN


def _together(rows: torch.Tensor) -> "torch.Tensor | slice":
    """``rows``, as a slice where they are neighbours, which is not copied. On an accelerator the host would have to
    wait to see that."""
    if rows.device.type != "cpu" or int(rows[-1]) - int(rows[0]) != len(rows) - 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def weights_of(x: torch.Tensor, top: torch.Tensor, group: Group, cut_min_p: bool = False) -> torch.Tensor:
    """Logits [n, K], the row's best being ``top`` [n, 1] -> int64 in [0, 2**40] in proportion to probability; what
    min-p leaves, where it comes first.

    The best is taken away before the division, so that no temperature can overflow.
    """
    weights = _scaled_weights_(x - top, group)
    if cut_min_p:
        # Kept is what exceeds the last float32 below the least weight. Operators on bool and int64 take a multiple.
        least = _least_weight(group)
        nearest = least.to(x.dtype)
        below = torch.where(nearest >= least, torch.nextafter(nearest, torch.full_like(nearest, -inf)), nearest)
        weights.mul_((weights - below).sign_().clamp_(min=0))
    return weights.long()


def _scaled_weights_(differences: torch.Tensor, group: Group) -> torch.Tensor:
    """Logits less their row's best -> weights in [0, 2**40], not yet whole numbers. In place."""
    scale = (1.0 / (group.temperature * log(2.0))).to(differences.dtype)
    return _exp2_(differences.mul_(scale)).mul_(ONE)


def _least_weight(group: Group) -> torch.Tensor:
    """Min-p, as a whole number of a weight."""
    return (group.min_p * ONE).ceil()


def _exp2_(x: torch.Tensor) -> torch.Tensor:
    """In place. torch's exp2 on a CPU rounds the last few elements of a tensor, or of a thread's part of it, otherwise
    than the rest, which would make a row's weights depend on the rows beside it; numpy's does not."""
    if x.device.type == "cpu":
        np.exp2(x.numpy(), out=x.numpy())
        return x
    return x.exp2_()


def _surprisal(probs: torch.Tensor) -> torch.Tensor:
    """-log of float64 ``probs``, infinite where they are zero. numpy's on a CPU, for the same reason."""
    if probs.device.type == "cpu":
        with np.errstate(divide="ignore", invalid="ignore"):
            return torch.from_numpy(-np.log(probs.numpy()))
    return -probs.log()


def _filtered(
    logits: torch.Tensor, best: torch.Tensor, group: Group, scratch: Scratch,
) -> Iterator[tuple[torch.Tensor, Candidates]]:
    """Rows with top-k or top-p: best tokens first, as many as it takes.

    A row is done when what top-k and top-p leave of it ends strictly above the worst token tried: then no token beyond
    those tried, and no equal of the last one kept, can matter.
    """
    mass = None
    # An accelerator sorts everything at once: looking which rows are done would make the host wait.
    for width in sorted({max(width, group.largest_k + 1) for width in _WIDTHS}) if logits.is_cpu else ():
        if width >= logits.shape[1]:
            break
        values, ids, mass = _look(logits, best, group, width, mass, scratch)
        weights = _cut_top(weights_of(values, best[group.rows][:, None], group), mass, group)
        last_kept = (weights > 0).sum(-1, keepdim=True).sub_(1).clamp_min_(0)
        done = (values.gather(1, last_kept) > values[:, -1:]).squeeze(1)
        found, left = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
        if len(found):
            part = group.take(found)
            yield part.rows, Candidates(_cut_rest(weights[found], part), ids[found])
        if not len(left):
            return
        mass, group = mass[left], group.take(left)
    for part, x, top in _slices(logits, best, group, scratch):
        values, ids = best_of(x, x.shape[1])
        weights = _cut_top(weights_of(values, top, part), None, part)
        yield part.rows, Candidates(_cut_rest(weights, part), ids)


def _look(
    logits: torch.Tensor, best: torch.Tensor, group: Group, width: int, mass: torch.Tensor | None, scratch: Scratch,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ``width`` best logits of each row of ``group``, their ids, [n, width] each, and the row's mass [n, 1]."""
    found, masses = [], []
    for part, x, top in _slices(logits, best, group, scratch):
        found.append(best_of(x, width))
        if mass is None and part.uses_mass:
            weights = _scaled_weights_(torch.sub(x, top, out=scratch.take("weights", x.shape, torch.float32)), part)
            masses.append(scratch.take("whole", x.shape, torch.int64).copy_(weights).sum(-1, keepdim=True))
    values, ids = map(torch.cat, zip(*found, strict=True))
    if mass is None:
        # Integers even where it is not used: floats would make the sums that stand in for it inexact.
        mass = torch.cat(masses) if masses else torch.zeros_like(ids[:, :1])
    return values, ids, mass


def _cut_top(weights: torch.Tensor, mass: torch.Tensor | None, group: Group) -> torch.Tensor:
    """Top-k, then top-p of what it left: the smallest set that holds ``top_p`` of the mass. ``mass`` [n, 1] is that of
    the row before top-k; None: ``weights`` [n, K], best first, hold all of it. Changes ``weights``."""
    rank = torch.arange(weights.shape[1], device=weights.device)
    weights.masked_fill_(rank >= group.top_k, 0)
    sums = weights.cumsum(-1)
    left = sums[:, -1:] if mass is None else torch.where(group.top_k < inf, sums[:, -1:], mass)
    return weights.masked_fill_((sums - weights) >= group.top_p * left, 0)


def _cut_rest(weights: torch.Tensor, group: Group) -> torch.Tensor:
    """Min-p, then typical. Changes ``weights``."""
    if group.cuts_min_p:
        weights.mul_(weights >= _least_weight(group).long())  # masked_fill_ has a branch per token
    return _cut_typical(weights, group) if group.cuts_typical else weights


def _cut_typical(weights: torch.Tensor, group: Group) -> torch.Tensor:
    """The smallest set that holds ``typical_p`` of the mass, of the tokens whose surprisal is nearest the entropy."""
    mass = weights.sum(-1, keepdim=True)
    probs = weights / mass.double()
    surprisal = _surprisal(probs)
    # In fixed point, for the sake of the exact sum.
    entropy = (probs * surprisal).nan_to_num_(0.0).mul_(ONE).long().sum(-1, keepdim=True) / ONE
    distance = (surprisal - entropy).abs()
    order = torch.sort(distance, dim=-1, stable=True).indices
    ordered = weights.gather(1, order)
    ordered.masked_fill_((ordered.cumsum(-1) - ordered) >= group.typical_p * mass, 0)
    return weights.scatter_(1, order, ordered)
