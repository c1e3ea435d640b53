"""Latencies at a price the loop can pay: prometheus-client's own histogram takes microseconds an observation."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate


class Histogram:
    """Written by one thread, read by any. ``bounds``: the upper bounds of the buckets, ascending; above is one more."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus counts them."""
        labels = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(labels, map(float, accumulate(list(self.counts))), strict=True))


class LastTokens:
    """When each request had its last token. Most requests have one in every step, so those of the newest step are one
    set with one time, and set operations do most of the work."""

    def __init__(self) -> None:
        self._newest = set[str]()
        self._newest_at = 0.0
        self._older: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._newest) + len(self._older)

    def begin(self, request: str, time: float) -> None:
        """Its first token has come."""
        self._older[request] = time

    def end(self, request: str) -> float | None:
        """Forget it; returns when its last token came, None where it had none."""
        if request in self._newest:
            self._newest.remove(request)
            return self._newest_at
        return self._older.pop(request, None)

    def step(
        self, requests: set[str], several: Mapping[str, int], time: float,
    ) -> Iterator[tuple[float, int, int]]:
        """These ``requests`` have got tokens, ``several`` of them more than one: yields (seconds since the last token
        before, tokens, how many requests). Requests that have not begun, or have ended, do not count."""
        steady = requests & self._newest
        more = several.keys() & steady
        yield time - self._newest_at, 1, len(steady) - len(more)
        for request in more:
            yield time - self._newest_at, several[request], 1
        for request in self._newest - steady:
            self._older[request] = self._newest_at
        for request in requests - steady:
            if (before := self._older.pop(request, None)) is not None:
                steady.add(request)
                yield time - before, several.get(request, 1), 1
        self._newest, self._newest_at = steady, time
