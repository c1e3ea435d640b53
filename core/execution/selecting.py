"""Finds the best of a row's numbers without sorting all of them."""

import numpy as np
import torch

_GROUP = 16
"""Numbers of which only the largest is looked at, to begin with."""

_CROWDED = 4
"""At most so many times as many as are wanted are sorted."""


def best_of(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``width`` largest of each row of ``x`` [n, V], largest first, and their ids, the lowest first among equals:
    [n, width] each. Of those that equal the last one any may be left out."""
    if width == x.shape[1]:
        everything = torch.sort(x, dim=-1, descending=True, stable=True)
        return everything.values, everything.indices
    found = _promising(x, width) if x.is_cpu else None
    if found is None:
        ids = x.topk(width, dim=-1, sorted=False).indices.sort(-1).values
        found = x.gather(1, ids), ids
    values, order = torch.sort(found[0], dim=-1, descending=True, stable=True)
    return values[:, :width], found[1].gather(1, order[:, :width])


def _promising(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Numbers [n, K], with rising ids, among which the ``width`` largest of each row are, -inf being none; None where
    there are too many, or too few.

    Groups of numbers are compared by their largest: those that reach the ``width``-th of these are ``width`` at least.
    numpy partitions without branches; torch's selection has one a number, which in new logits nobody foresees.
    """
    count = x.shape[1] // _GROUP
    if 2 * width > count:
        return None
    peaks = x[:, : count * _GROUP].view(len(x), _GROUP, count).amax(1).numpy()
    least = np.partition(peaks, count - width, axis=-1)[:, count - width, None]
    numbers = x.numpy()
    rows, ids = np.divmod(np.flatnonzero(numbers >= least), x.shape[1])
    counts = np.bincount(rows, minlength=len(x))
    most = int(counts.max())
    # NaN reach nothing. Equals come by the thousand, such as those that a mask excludes.
    if counts.min() < width or most > _CROWDED * width:
        return None
    places = np.arange(len(ids)) - (counts.cumsum() - counts)[rows]
    found, whose = np.full((len(x), most), -np.inf, numbers.dtype), np.zeros((len(x), most), np.int64)
    found[rows, places], whose[rows, places] = numbers[rows, ids], ids
    return torch.from_numpy(found), torch.from_numpy(whose)
