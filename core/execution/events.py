"""Counts of events: in all, and since they were last told."""

from collections import Counter


class EventCounts:
    """``totals``: by name, each behind ``prefix``."""

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self.totals: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    def add(self, event: str, count: int = 1) -> None:
        self.totals[self._prefix + event] += count

    def news(self) -> dict[str, int]:
        """What was counted since the last call."""
        news = dict(self.totals - self._told)
        self._told.update(news)
        return news
