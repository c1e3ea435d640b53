"""Effects, simultaneous intervals and verdicts of an experiment, at one look or at several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import expm1, inf, log1p, nan

import numpy as np

from hotswap.lab.records import Better, Comparison, Look, MetricSpec, Outcome, Pair
from hotswap.lab.statistics import signed_rank
from hotswap.lab.statistics.boundary import Boundary, Coins
from hotswap.lab.statistics.settings import Settings
from hotswap.lab.statistics.signed_rank import QUAD, Floats


def analyse(
    pairs_by_arm: Mapping[str, Sequence[Pair]], metrics: Sequence[MetricSpec], settings: Settings,
    looks: Sequence[Look] | None = None,
) -> list[Comparison]:
    """Every metric of every arm against the base, arm by arm.

    Pairs are in the order in which they ran, two by two a quad. ``looks``: when the data was looked at, the last being
    that of this analysis; without them it is the only one. ValueError as of ``signed_rank.quads``.
    """
    test = SequentialTest(list(pairs_by_arm), metrics, settings)
    for look in looks or [Look(1.0, {arm: len(pairs) for arm, pairs in pairs_by_arm.items()})]:
        test.look({arm: pairs_by_arm[arm][:look.pairs[arm]] for arm in pairs_by_arm}, look.progress)
    return test.comparisons()


@dataclass(frozen=True)
class Finding:
    """What a look says of one metric of one arm. ``n_quads``: those that have the metric. ``statistic``: the
    standardised signed-rank sum, positive where the arm has more. ``effect``, ``low``, ``high`` as in `Comparison`."""

    arm: str
    metric: MetricSpec
    statistic: float
    effect: float
    low: float
    high: float
    margin: float
    outcome: Outcome
    n_quads: int


class SequentialTest:
    """Looks at growing data; keeps what earlier looks have spent."""

    def __init__(self, arms: Sequence[str], metrics: Sequence[MetricSpec], settings: Settings) -> None:
        self._metrics, self._settings = metrics, settings
        self._coins = {arm: Coins(settings.seed, index, settings.flips) for index, arm in enumerate(arms)}
        self._boundary = Boundary(settings.alpha, settings.spending, settings.flips)
        self._history: list[tuple[Floats, float]] = []
        self._pairs: Mapping[str, Sequence[Pair]] = {}
        self.findings: list[Finding] = []

    def look(self, pairs_by_arm: Mapping[str, Sequence[Pair]], progress: float) -> list[Finding]:
        self._pairs = {arm: list(pairs) for arm, pairs in pairs_by_arm.items()}
        differences = {
            arm: [signed_rank.quads(pairs, metric) for metric in self._metrics] for arm, pairs in self._pairs.items()}
        maxima = np.zeros(self._settings.flips)
        for arm, columns in differences.items():
            np.maximum(maxima, self._largest_by_chance(arm, columns), out=maxima)
        critical = self._boundary.look(maxima, progress)
        self._history.append((maxima, progress))
        self.findings = [
            self._finding(arm, metric, column, critical)
            for arm, columns in differences.items() for metric, column in zip(self._metrics, columns, strict=True)]
        return self.findings

    def comparisons(self) -> list[Comparison]:
        """Of the last look, with p-values: the smallest error rate at which the look would have been significant."""
        ladder = self._ladder()
        return [self._comparison(finding, ladder) for finding in self.findings]

    def _largest_by_chance(self, arm: str, columns: Sequence[Floats]) -> Floats:
        """The largest statistic over the metrics of an arm under each fall of its coins, which its metrics share."""
        if not columns or not len(columns[0]):
            return np.zeros(self._settings.flips)
        ranked, scales = [], []
        for column in columns:
            for signed in (signed_rank.scores(column), signed_rank.untied(column, self._settings.seed)):
                if signed is not None:
                    ranked.append(signed)
                    scales.append(signed_rank.scale(_present(column)))
        sums = self._coins[arm].sums(np.stack(ranked, axis=1))
        return np.asarray((np.abs(sums) / np.array(scales)).max(axis=1))

    def _finding(self, arm: str, metric: MetricSpec, column: Floats, critical: float) -> Finding:
        margin = self._margin(arm, metric)
        n = _present(column)
        if not n:
            return Finding(arm, metric, 0.0, nan, -inf, inf, margin, Outcome.NOT_ENOUGH_DATA, n)
        averages = signed_rank.walsh_averages(column)
        statistic = float(signed_rank.scores(column).sum()) / signed_rank.scale(n)
        low, high = signed_rank.interval(averages, critical * signed_rank.scale(n) * (1 + 1e-9))
        small = margin if metric.additive else log1p(margin)
        if -small <= low and high <= small:
            outcome = Outcome.NO_DIFFERENCE
        elif abs(statistic) > critical:
            outcome = Outcome.BETTER if (statistic > 0) == (metric.better is Better.HIGHER) else Outcome.WORSE
        else:
            outcome = Outcome.NOT_ENOUGH_DATA
        effect = float(np.median(averages))
        if not metric.additive:
            effect, low, high = expm1(effect), expm1(low), expm1(high)
        return Finding(arm, metric, statistic, effect, low, high, margin, outcome, n)

    def _margin(self, arm: str, metric: MetricSpec) -> float:
        """Relative, or in the metric's unit where it is additive."""
        settings = self._settings
        if metric.name in settings.margins:
            return settings.margins[metric.name]
        if not metric.additive or metric.unit == "share":
            return settings.margin
        return settings.margin * abs(_median([value for value, _ in self._both(arm, metric)] or [0.0]))

    def _both(self, arm: str, metric: MetricSpec) -> list[tuple[float, float]]:
        """Values of base and arm in the pairs of whole quads that have both."""
        pairs, name = self._pairs[arm], metric.name
        return [(pair.base[name], pair.arm[name]) for pair in pairs[:len(pairs) // QUAD * QUAD]
                if name in pair.base and name in pair.arm]

    def _ladder(self) -> list[tuple[float, float]]:
        """(error rate, critical value of the last look) for rates from the smallest there is to 1."""
        settings = self._settings
        rates = np.geomspace(1 / (settings.flips + 1), 1, 50)
        steps = []
        for rate in sorted({*map(float, rates), settings.alpha}):
            boundary = Boundary(rate, settings.spending, settings.flips)
            steps.append((rate, [boundary.look(maxima, progress) for maxima, progress in self._history][-1]))
        return steps

    def _comparison(self, finding: Finding, ladder: Sequence[tuple[float, float]]) -> Comparison:
        both = self._both(finding.arm, finding.metric)
        size, alpha = abs(finding.statistic), self._settings.alpha
        significant = any(rate == alpha and size > critical for rate, critical in ladder)
        p = min((rate for rate, critical in ladder if size > critical and (rate <= alpha) == significant), default=1.0)
        return Comparison(
            finding.arm, finding.metric.name, _median([base for base, _ in both]), _median([arm for _, arm in both]),
            finding.effect, finding.low, finding.high, p, finding.outcome, finding.margin, len(both))


def _present(column: Floats) -> int:
    return int((~np.isnan(column)).sum())


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if values else nan
