"""Which statistic for paired blocks: their error rates, power and widths on the same made-up and recorded noise.

    python benchmarks/experiment/methods.py [--experiments 300] [--quads 40] [--steps 100]
                                               [--recording FILE]

One metric, one look: the mean step time of a block. Each method gives a 95 % interval for the effect; it errs where
that leaves out 0 though the arms are equal, or leaves out 3 % though that is what was planted, and finds where it
leaves out 0 then.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from noise import SYNTHETIC, Floats, Recording, Source
from scipy import stats

from hotswap.lab.statistics import signed_rank

PLANTED = 0.03
Interval = tuple[float, float]


def student(quads: Floats, random: np.random.Generator) -> Interval:
    """Mean and its standard error."""
    found = stats.ttest_1samp(quads, 0).confidence_interval(0.95)
    return float(found.low), float(found.high)


def trimmed(quads: Floats, random: np.random.Generator) -> Interval:
    """20 % trimmed mean (Yuen)."""
    low, high = stats.mstats.trimmed_mean_ci(quads, (0.2, 0.2), alpha=0.05)
    return float(low), float(high)


def wilcoxon(quads: Floats, random: np.random.Generator) -> Interval:
    """Signed ranks, inverted: what the experiment uses."""
    n = len(quads)
    return signed_rank.interval(signed_rank.walsh_averages(quads), stats.norm.isf(0.025) * signed_rank.scale(n))


def sign(quads: Floats, random: np.random.Generator) -> Interval:
    """Median, by the sign test."""
    below = int(stats.binom.ppf(0.025, len(quads), 0.5))
    ordered = np.sort(quads)
    return float(ordered[below - 1]), float(ordered[len(quads) - below])


def block_bootstrap(quads: Floats, random: np.random.Generator) -> Interval:
    """Percentiles of the mean over resampled stretches (Künsch's moving blocks), of length n ** (1/3)."""
    n = len(quads)
    length = max(1, round(n ** (1 / 3)))
    starts = random.integers(0, n - length + 1, (999, -(-n // length)))
    places = (starts[:, :, None] + np.arange(length)).reshape(999, -1)[:, :n]
    low, high = np.percentile(quads[places].mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


METHODS: dict[str, Callable[[Floats, np.random.Generator], Interval]] = {
    "Student's t": student, "20 % trimmed mean": trimmed, "signed ranks": wilcoxon, "sign test": sign,
    "moving block bootstrap": block_bootstrap}


def quads_of(source: Source, quads: int, steps: int, random: np.random.Generator) -> Floats:
    """Log ratios of equal arms, drawn ABBA or BAAB, in blocks of so many steps."""
    stream = source(random)
    logs = np.log([stream(steps).mean() for _ in range(4 * quads)]).reshape(quads, 4)
    abba = (logs[:, 1] + logs[:, 2] - logs[:, 0] - logs[:, 3]) / 2
    return np.asarray(abba * random.choice([-1.0, 1.0], quads))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--experiments", type=int, default=300)
    parser.add_argument("--quads", type=int, default=40)
    parser.add_argument("--steps", type=int, default=100, help="of a block")
    parser.add_argument("--recording", type=Path, help="of record_noise.py")
    arguments = parser.parse_args()
    sources = dict(SYNTHETIC)
    if arguments.recording:
        sources = {"recorded": Recording(arguments.recording).source, **sources}
    print("| noise | method | called different, of equal arms | 3 % found | 3 % inside | half width |")
    print("|---|---|---:|---:|---:|---:|")
    planted = float(np.log1p(PLANTED))
    for noise, source in sources.items():
        random = np.random.default_rng([7, *noise.encode()])
        drawn = [quads_of(source, arguments.quads, arguments.steps, random) for _ in range(arguments.experiments)]
        for method, interval in METHODS.items():
            equal = np.array([interval(quads, random) for quads in drawn])
            slowed = equal + planted  # every method moves with the data
            print(f"| {noise} | {method} | {_share((equal[:, 0] > 0) | (equal[:, 1] < 0))} | "
                  f"{_share(slowed[:, 0] > 0)} | {_share((slowed[:, 0] <= planted) & (planted <= slowed[:, 1]))} | "
                  f"{np.median(equal[:, 1] - equal[:, 0]) / 2:.2%} |")


def _share(hits: np.ndarray) -> str:
    return f"{hits.mean():.1%}"


if __name__ == "__main__":
    main()
