"""Wilcoxon's signed-rank test of paired differences, the estimate that belongs to it, and its inversion.

The estimate is the median of the Walsh averages, the means of all pairs of differences (Hodges and Lehmann, "Estimates
of location based on rank tests", 1963). The statistic at a shift is the number of averages above it less the number
below, which falls as the shift grows: the shifts that are not rejected are an interval between two of the averages, and
the test of a shift and the interval cannot disagree. A block that a neighbour disturbed has a large rank, nothing more.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from hotswap.lab.records import MetricSpec, Pair

Floats = NDArray[np.float64]

QUAD = 2
"""Pairs whose order is drawn together: base first in one of them and second in the other."""

RATIO_LIMIT = float(np.log(1e6))
"""Where one side of a ratio is 0 or infinite: the sign is known, and the size is larger than any other."""


def quads(pairs: Sequence[Pair], metric: MetricSpec) -> Floats:
    """The differences of an arm from the base, shape [quads]: log ratios, or differences of an additive metric, each
    the mean of two pairs. NaN where a pair lacks the metric; a quad that is not complete yet is left out.

    Swapping the arms of all four blocks changes the sign, and that swap is what the seed drew. ValueError where the
    pairs were not drawn like this, or a value is not one that the metric can have.
    """
    n = len(pairs) // QUAD
    for first, second in zip(pairs[::QUAD], pairs[1::QUAD], strict=False):
        if first.base_first == second.base_first:
            raise ValueError("pairs come in quads, base first in one and the arm first in the other; these are not.")
    differences: Floats = np.array([difference(pair, metric) for pair in pairs[:n * QUAD]], dtype=np.float64)
    return np.asarray(differences.reshape(n, QUAD).mean(axis=1), dtype=np.float64)


def difference(pair: Pair, metric: MetricSpec) -> float:
    """The logarithm of arm / base, or arm - base of an additive metric; NaN where either lacks it."""
    base, arm = pair.base.get(metric.name), pair.arm.get(metric.name)
    if base is None or arm is None:
        return float("nan")
    if np.isnan(base) or np.isnan(arm):
        raise ValueError(f"{metric.name} is NaN in a pair; a metric that a block cannot give is left out of it.")
    if base == arm:
        return 0.0
    if metric.additive:
        if np.isinf(base) or np.isinf(arm):
            raise ValueError(f"{metric.name} is additive and infinite in a pair; infinities need a ratio.")
        return arm - base
    if base < 0 or arm < 0:
        raise ValueError(f"{metric.name} is {min(base, arm)} in a pair; only an additive metric can be negative.")
    with np.errstate(divide="ignore"):
        return float(np.clip(np.log(arm) - np.log(base), -RATIO_LIMIT, RATIO_LIMIT))


def scores(differences: Floats) -> Floats:
    """Signed ranks of ``differences`` [n], with 0 where one is missing. Ties share their ranks; a zero keeps its rank
    and has no sign (Pratt, 1959)."""
    there = ~np.isnan(differences)
    signed = np.zeros(len(differences))
    signed[there] = rankdata(np.abs(differences[there])) * np.sign(differences[there])
    return signed


def untied(differences: Floats, seed: int) -> Floats | None:
    """Signed ranks with ties and zeros broken by coins, or None where there are none: what `scores` becomes at any
    shift beside the ties. Equal values in all blocks would else look as if no difference were possible."""
    there = ~np.isnan(differences)
    sizes = np.abs(differences[there])
    if len(np.unique(sizes)) == len(sizes) and sizes.all():
        return None
    generator = np.random.default_rng(seed)
    ranks = np.empty(len(sizes))
    ranks[np.lexsort((generator.random(len(sizes)), sizes))] = np.arange(1, len(sizes) + 1)
    coins = generator.integers(0, 2, len(sizes)) * 2 - 1
    signed = np.zeros(len(differences))
    signed[there] = ranks * np.where(sizes > 0, np.sign(differences[there]), coins)
    return signed


def scale(n: int) -> float:
    """The standard deviation of a sum of n signed ranks whose signs are coins."""
    return float(np.sqrt(n * (n + 1) * (2 * n + 1) / 6)) or 1.0


def walsh_averages(differences: Floats) -> Floats:
    """Means of all pairs of the differences that are there, each with itself included, ascending: [n (n + 1) / 2]."""
    there = differences[~np.isnan(differences)]
    rows, columns = np.triu_indices(len(there))
    return np.sort((there[rows] + there[columns]) / 2)


def interval(averages: Floats, limit: float) -> tuple[float, float]:
    """The shifts at which the statistic is at most ``limit``, from sorted Walsh averages; unbounded where even the
    largest statistic is."""
    n = len(averages)
    below = np.ceil((n - limit) / 2)
    if not below >= 1:
        return -np.inf, np.inf
    index = int(below) - 1
    return float(averages[index]), float(averages[n - 1 - index])
