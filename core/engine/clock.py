"""The only place that reads the machine's time. All else is given a :class:`Clock`, so that it can be simulated."""

import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds, monotonic."""

    def wall(self) -> float:
        """Seconds since the epoch."""


class SystemClock:
    def now(self) -> float:
        return time.perf_counter()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """Stands still until it is advanced."""

    def __init__(self, start: float = 0.0) -> None:
        self.time = start

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds
