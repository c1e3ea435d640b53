"""Noise of a machine as factors on the durations of steps: recorded and resampled, or made up.

Each source is a function of a random generator that returns a `Stream`: called with n, it gives the factors of the next
n steps of the machine, whoever runs them.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
STRETCH_S = 60.0
"""Of the recording, how much stays together on average: longer than an experiment's quad, so that what slows several
blocks in a row still does."""
RARE = 5


Stream = Callable[[int], Floats]
Source = Callable[[np.random.Generator], Stream]


def nominal(rows: int, tokens: int) -> float:
    """Seconds of a step where nothing was recorded: about those of a small model on two cores."""
    return 0.011 + 0.0002 * rows + 0.0005 * tokens


class Recording:
    """``factors`` [steps]: each step's duration as a multiple of what a step with as many rows and tokens took in the
    median. ``cost``: that median, by (rows, tokens), in seconds; by a straight line where it was never seen."""

    def __init__(self, path: Path) -> None:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            self.raw: dict[str, Any] = json.load(file)
        every = (step[1:] for block in self.raw["blocks"] for step in block["steps"])
        steps = np.array([step for step in every if step[0]])  # those without rows only carry news
        by_shape: dict[tuple[int, int], list[float]] = defaultdict(list)
        for rows, tokens, seconds in steps:
            by_shape[int(rows), int(tokens)].append(seconds)
        self._medians = {shape: float(np.median(seen)) for shape, seen in by_shape.items() if len(seen) >= RARE}
        shapes = np.array([[1, *shape] for shape in self._medians], dtype=float)
        self._line = np.linalg.lstsq(shapes, np.array(list(self._medians.values())), rcond=None)[0]
        costs = [self.cost(int(rows), int(tokens)) for rows, tokens, _ in steps]
        self.factors: Floats = steps[:, 2] / np.array(costs)
        self._stretch = max(1.0, STRETCH_S / float(steps[:, 2].mean()))

    def cost(self, rows: int, tokens: int) -> float:
        line = float(self._line @ np.array([1.0, rows, tokens]))
        return self._medians.get((rows, tokens), max(line, 1e-4))

    def source(self, random: np.random.Generator) -> Stream:
        """Stretches of geometric length from anywhere in the recording, which goes round ("The stationary bootstrap",
        Politis and Romano, 1994): what hangs together within a stretch still does."""
        place = int(random.integers(len(self.factors)))

        def take(n: int) -> Floats:
            nonlocal place
            places = np.empty(n, dtype=np.int64)
            done = 0
            while done < n:
                length = int(random.geometric(1 / self._stretch))  # from here on: it remembers nothing
                kept = min(length, n - done)
                places[done:done + kept] = place + np.arange(kept)
                done, place = done + kept, place + kept
                if kept == length:
                    place = int(random.integers(len(self.factors)))
            return self.factors[places % len(self.factors)]

        return take


def heavy_tails(random: np.random.Generator) -> Stream:
    """Steps vary by 5 %; now and then, a neighbour takes a core for about a second."""
    left = 0

    def take(n: int) -> Floats:
        nonlocal left
        factors = np.exp(0.05 * random.standard_t(3, n))
        for index in range(n):
            if left == 0 and random.random() < 1 / 1500:
                left = int(random.geometric(1 / 80))
            if left:
                factors[index] *= 1.9
                left -= 1
        return factors

    return take


def drift(random: np.random.Generator) -> Stream:
    """The machine warms up: 15 % slower over the first 20,000 steps, and as noisy as any."""
    done = 0

    def take(n: int) -> Floats:
        nonlocal done
        trend = 1 + 0.15 * np.minimum(1, (done + np.arange(n)) / 20_000)
        done += n
        return np.asarray(trend * np.exp(0.05 * random.standard_normal(n)))

    return take


def autoregressive(random: np.random.Generator) -> Stream:
    """Slow changes of speed by 6 % that last for seconds: AR(1), with a half-life of 200 steps."""
    keep, level = 0.5 ** (1 / 200), 0.0

    def take(n: int) -> Floats:
        nonlocal level
        shocks = 0.06 * np.sqrt(1 - keep**2) * random.standard_normal(n)
        levels = np.empty(n)
        for index in range(n):
            level = keep * level + shocks[index]
            levels[index] = level
        return np.asarray(np.exp(levels + 0.03 * random.standard_normal(n)))

    return take


def period_of_two(random: np.random.Generator) -> Stream:
    """Every second block is 8 % slower, whoever runs it: a comparison of A B A B … would always find something."""
    blocks = 0

    def take(n: int) -> Floats:
        nonlocal blocks
        blocks += 1
        return np.asarray((1 + 0.08 * (blocks % 2)) * np.exp(0.05 * random.standard_normal(n)))

    return take


SYNTHETIC: dict[str, Source] = {
    "heavy tails": heavy_tails, "drift": drift, "autoregressive": autoregressive, "period of two": period_of_two}
