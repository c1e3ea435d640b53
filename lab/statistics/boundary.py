"""How large the largest statistic of an experiment may be by chance, at each of several looks.

Under the null hypothesis the arms are only labels: the measurements would be the same had the coins of the quads
fallen otherwise. So the largest statistic over all metrics and arms is compared with what it would have been under
other falls of the same coins (max-T: Westfall and Young, "Resampling-Based Multiple Testing", 1993), whatever the noise
is and however the metrics depend on one another. Looks share the error by a spending function (Lan and DeMets,
"Discrete sequential boundaries for clinical trials", 1983), here the power family of Kim and DeMets (1987).
"""

import numpy as np
from numpy.typing import NDArray

from hotswap.lab.statistics.signed_rank import Floats

TOGETHER = 64
"""Quads whose coins are multiplied at a time: bounds the memory of long experiments."""


class Coins:
    """Falls of the coins of one arm's quads, 1 or -1, the same for a quad however many there are."""

    def __init__(self, seed: int, arm: int, flips: int) -> None:
        self._seed, self._arm, self._flips = seed, arm, flips
        self._falls: list[NDArray[np.int8]] = []

    def sums(self, signed: Floats) -> Floats:
        """Of signed ranks [quads, metrics] under each fall: [flips, metrics]. Exact, since ranks are half integers:
        what is a tie stays one."""
        quads, metrics = signed.shape
        for quad in range(len(self._falls), quads):
            generator = np.random.default_rng([self._seed, self._arm, quad])
            self._falls.append(generator.integers(0, 2, self._flips, dtype=np.int8) * np.int8(2) - np.int8(1))
        total = np.zeros((self._flips, metrics))
        for first in range(0, quads, TOGETHER):
            falls = np.stack(self._falls[first:min(quads, first + TOGETHER)], axis=1).astype(np.float32)
            total += falls @ signed[first:first + TOGETHER].astype(np.float32)
        return total


class Boundary:
    """Critical values of successive looks that spend ``alpha`` as alpha * progress**exponent.

    The observed assignment counts as one of those drawn, so that the error is at most ``alpha`` for any number of them
    (Phipson and Smyth, "Permutation p-values should never be zero", 2010).
    """

    def __init__(self, alpha: float, exponent: float, flips: int) -> None:
        self._alpha, self._exponent = alpha, exponent
        self._total = flips + 1
        self._within = np.ones(flips, dtype=bool)  # assignments that no look has called significant
        self._used = 0

    def look(self, maxima: Floats, progress: float) -> float:
        """The critical value of a look: it is significant where its largest statistic is above.

        ``maxima`` [flips]: the largest statistic under each assignment. ``progress``: the share of the planned time
        that is over; it may depend on nothing that the labels of the arms could have changed.
        """
        share = self._alpha * min(progress, 1.0) ** self._exponent
        allowed = int(share * self._total + 1e-9) - self._used
        candidates = maxima[self._within]
        if allowed < 1 or allowed >= len(candidates):
            return np.inf
        place = len(candidates) - allowed
        # The observed one is among the `allowed` largest where it is above the `allowed`-th of the others. Those that
        # would have been significant in its place, however it fell, have used up their share and leave.
        critical, leaving = np.partition(candidates, [place - 1, place])[[place, place - 1]]
        left = self._within & (maxima > leaving)
        self._used += int(left.sum())
        self._within &= ~left
        return float(critical)
