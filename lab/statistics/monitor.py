"""When an experiment has seen enough."""

from collections.abc import Sequence

from hotswap.lab.records import Comparison, Look, MetricSpec, Outcome, Pair
from hotswap.lab.statistics.comparison import Finding, SequentialTest
from hotswap.lab.statistics.settings import Settings
from hotswap.lab.statistics.signed_rank import QUAD


class Monitor:
    """Is told each pair as it is done, looks at equal shares of the planned time, and says whether to stop and why.

        monitor = Monitor(["chunked"], metrics, settings)
        while (reason := monitor.enough(elapsed / limit)) is None:
            monitor.add("chunked", next_pair())
        comparisons = monitor.finish(elapsed / limit)

    ``looks`` is kept with the results: ``analyse`` with it gives the same comparisons again.
    """

    def __init__(self, arms: Sequence[str], metrics: Sequence[MetricSpec], settings: Settings) -> None:
        known = [metric.name for metric in metrics]
        for name in (*settings.decide, *settings.margins):
            if name not in known:
                raise ValueError(f"'{name}' is no metric of this experiment; there are {', '.join(known)}.")
        self._settings = settings
        self._test = SequentialTest(arms, metrics, settings)
        self._pairs: dict[str, list[Pair]] = {arm: [] for arm in arms}
        self.looks: list[Look] = []

    def add(self, arm: str, pair: Pair) -> None:
        self._pairs[arm].append(pair)

    def enough(self, progress: float) -> str | None:
        """Why the run should stop; None: go on. ``progress``: the share of the planned time, or of the planned pairs,
        that is over. Looks happen only when all arms have as many whole quads."""
        counts = {len(pairs) for pairs in self._pairs.values()}
        if len(counts) > 1 or counts.pop() % QUAD or progress < self._next_look():
            return None
        self._look(progress)
        awaited = self._awaited()
        if self._settings.stop == "verdicts" and awaited and all(map(_decided, awaited)):
            return "every verdict is in"
        if self._settings.stop == "width" and awaited and all(map(self._narrow, awaited)):
            return "every interval is narrow enough"
        return "time is over" if progress >= 1 else None

    def finish(self, progress: float) -> list[Comparison]:
        """The comparisons of all that was told. ``progress`` is 1 where the time is over or another quad would not fit,
        and below where the run was broken off: an error that was saved for later is not spent on what was seen."""
        counts = {arm: len(pairs) for arm, pairs in self._pairs.items()}
        if not self.looks or self.looks[-1].pairs != counts and self.looks[-1].progress < 1:
            self._look(max([progress, *(look.progress for look in self.looks)]))
        return self._test.comparisons()

    def _next_look(self) -> float:
        if self._settings.stop == "time":
            return 1.0
        looks = self._settings.looks
        done = int(self.looks[-1].progress * looks + 1e-9) if self.looks else 0
        return min(1.0, (done + 1) / looks)

    def _look(self, progress: float) -> None:
        self._test.look(self._pairs, progress)
        self.looks.append(Look(progress, {arm: len(pairs) for arm, pairs in self._pairs.items()}))

    def _awaited(self) -> list[Finding]:
        """What no block of an arm can tell, such as goodput without an SLO, is waited for only where it is named."""
        decide, findings = self._settings.decide, self._test.findings
        if decide:
            return [finding for finding in findings if finding.metric.name in decide]
        return [finding for finding in findings if finding.n_quads]

    def _narrow(self, finding: Finding) -> bool:
        return (finding.high - finding.low) / 2 <= (self._settings.width or 0.0)


def _decided(finding: Finding) -> bool:
    return finding.outcome is not Outcome.NOT_ENOUGH_DATA
