"""The load generator: sends requests when they are due, and writes down what came back.

An open loop sends by a plan made beforehand, and latency counts from the plan: a server that falls behind is charged
for the wait of those that it kept from being sent ("coordinated omission", Gil Tene). A closed loop keeps a number of
requests in flight. Both are one loop: requests become due, and at most so many of them are under way.
"""

import contextlib
import heapq
import math
import queue
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hotswap.core.errors import HotswapError
from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.flight import Flight, records_of
from hotswap.lab.records import RequestRecord
from hotswap.lab.targets.target import Ending, Outgoing, Target

LOOK_S = 1.0
"""How often the generator looks whether a silent target still lives."""
ABORT_S = 30.0
"""How long requests that were aborted may take to end."""
INTERRUPTED = "it was interrupted"

Numbered = tuple[int, WorkItem]
"""A request and its place in the workload, which ``WorkItem.after`` refers to."""


@dataclass(frozen=True)
class OpenLoop:
    """``rate`` requests a second. ``arrivals``: "poisson"; "constant"; "bursty", gaps drawn from a gamma distribution
    of the shape ``burstiness`` (1 is Poisson, less is burstier); or "workload", the items' own times, which know no
    rate. ``limit``: most under way at a time; who waits for that at the client is charged for it."""

    rate: float = 1.0
    arrivals: str = "poisson"
    burstiness: float = 0.25
    limit: int | None = None

    def starts(self, seed: int) -> Iterator[float]:
        """Seconds from the start, rising, for ever."""
        draw, now = random.Random(seed), 0.0
        shape = {"poisson": 1.0, "bursty": self.burstiness}.get(self.arrivals)
        while True:
            yield now
            now += draw.gammavariate(shape, 1 / (shape * self.rate)) if shape else 1 / self.rate


@dataclass(frozen=True)
class ClosedLoop:
    """``limit`` requests in flight at all times."""

    limit: int = 8


Load = OpenLoop | ClosedLoop


@dataclass(frozen=True)
class Stretch:
    """What came of one stretch of load: a record for each request, and how long it took, in seconds. ``broken``: why it
    ended before its time, by the user or for want of requests; what was under way then is incomplete."""

    records: tuple[RequestRecord, ...]
    wall: float
    broken: str | None = None


def run_load(
    target: Target, items: Iterable[Numbered], load: Load, now: Callable[[], float], *, name: str, seed: int = 0,
    window: float | None = None, on_ended: Callable[[int], None] = lambda count: None,
) -> Stretch:
    """Send all of ``items``, or as many as fit into ``window`` seconds. ``name`` tells this stretch's requests from
    others' of the run. A turn of a session waits for the one before it, if that is among the items. ``on_ended`` hears
    how many requests have ended.

    With a window, what has not ended when it closes is aborted and recorded as incomplete, with the tokens that came
    inside it; what was due and could not be sent is recorded, too. The same holds where the target dies, the user
    interrupts, or a workload raises a HotswapError in the middle, as a trace does at a line that does not fit.
    """
    return _Run(target, iter(items), load, now, name, seed, window, on_ended).run()


class _Due(NamedTuple):
    """``pulled``: straight from the workload, and not from behind another turn."""

    time: float
    number: int
    pulled: bool
    item: WorkItem


class _Run:
    def __init__(
        self, target: Target, items: Iterator[Numbered], load: Load, now: Callable[[], float], name: str, seed: int,
        window: float | None, on_ended: Callable[[int], None],
    ) -> None:
        self._target, self._items, self._load, self._now, self._name = target, items, load, now, name
        self._window, self._on_ended = window, on_ended
        self._starts = load.starts(seed) if isinstance(load, OpenLoop) and load.arrivals != "workload" else None
        self._first_at: float | None = None
        self._due: list[_Due] = []  # a heap; one of the items is always pulled ahead
        self._parked: defaultdict[int, list[Numbered]] = defaultdict(list)  # behind the turn that they wait for
        self._open: set[int] = set()  # pulled and not ended
        self._flying: dict[int, Flight] = {}
        self._done: list[Flight] = []
        self._ended: queue.SimpleQueue[Flight] = queue.SimpleQueue()
        self._origin = self._looked = 0.0
        self._gone: str | None = None

    def run(self) -> Stretch:
        self._origin = self._now()
        broken = None
        try:
            self._pull()
            while (self._due or self._flying) and self._gone is None and (left := self._left()) > 0:
                self._send_due()
                self._wait(min(left, self._until_next(), LOOK_S))
        except KeyboardInterrupt:
            broken = INTERRUPTED
        except HotswapError as error:
            broken = f"the workload has ended: {error}"
        wall = self._elapsed() if self._window is None else min(self._window, self._elapsed())
        cut = self._cut_off() if self._flying or self._due else []
        return Stretch(records_of([*self._done, *cut], wall), wall, broken)

    def _elapsed(self) -> float:
        return self._now() - self._origin

    def _left(self) -> float:
        return float("inf") if self._window is None else self._window - self._elapsed()

    def _room(self) -> bool:
        return self._load.limit is None or len(self._flying) < self._load.limit

    def _until_next(self) -> float:
        """Seconds until something can be sent that is not yet due; what has no room waits for an end."""
        if not self._due or not self._room():
            return LOOK_S
        return max(0.0, self._due[0].time - self._elapsed())

    def _pull(self) -> None:
        """The next item that waits for no other becomes due, in time; turns of sessions are parked on the way."""
        for index, item in self._items:
            self._open.add(index)
            if item.after in self._open and item.after != index:
                self._parked[item.after].append((index, item))
                continue
            heapq.heappush(self._due, _Due(self._when(item), index, True, item))
            return

    def _when(self, item: WorkItem) -> float:
        if isinstance(self._load, ClosedLoop):
            return self._elapsed()  # behind those that became due earlier, sessions' turns among them
        if self._starts is not None:
            return next(self._starts)
        at = item.at or 0.0
        if self._first_at is None:
            self._first_at = at
        return at - self._first_at

    def _send_due(self) -> None:
        while self._due and self._room() and self._due[0].time <= (elapsed := self._elapsed()) and self._left() > 0:
            due, index, pulled, item = heapq.heappop(self._due)
            planned = elapsed if isinstance(self._load, ClosedLoop) else due
            flight = Flight(index, item, planned, elapsed, self._origin, self._ended.put)
            self._flying[index] = flight
            self._target.send(Outgoing(f"{self._name}.{index}", item.prompt, item.max_tokens), flight)
            if pulled:
                self._pull()

    def _wait(self, timeout: float) -> None:
        try:
            self._land(self._ended.get(block=timeout > 0, timeout=timeout or None))
        except queue.Empty:
            if self._flying and self._elapsed() - self._looked >= LOOK_S:
                self._looked = self._elapsed()
                self._look()

    def _land(self, flight: Flight) -> None:
        if self._flying.pop(flight.index, None) is None:
            return  # given up already
        self._done.append(flight)
        self._open.discard(flight.index)
        for index, item in self._parked.pop(flight.index, ()):
            heapq.heappush(self._due, _Due(self._elapsed() + item.pause, index, False, item))
        self._on_ended(len(self._done))
        if flight.ending is not None and flight.ending.error is not None:
            self._look()

    def _look(self) -> None:
        """Once the target is gone, what is under way has failed, and nothing more is sent."""
        if self._gone is None and (problem := self._target.problem()) is not None:
            self._gone = problem
            for flight in list(self._flying.values()):
                flight.ending = flight.ending or Ending(self._now(), error=problem)
                self._land(flight)

    def _cut_off(self) -> list[Flight]:
        """No more is waited for: abort what is under way, so that the next stretch begins on an idle target."""
        for flight in list(self._flying.values()):  # those that have ended in time, and were not taken note of yet
            if flight.ending is not None and flight.ending.time - self._origin <= (self._window or math.inf):
                self._done.append(self._flying.pop(flight.index))
        cut = [flight.frozen() for flight in self._flying.values()]
        elapsed = min(self._elapsed(), self._window or math.inf)
        cut += [Flight(due.number, due.item, due.time, elapsed, self._origin, self._ended.put)
                for due in self._overdue(elapsed)]
        for index in self._flying:
            self._target.abort(f"{self._name}.{index}")
        deadline = self._now() + ABORT_S
        while self._flying and (left := deadline - self._now()) > 0:
            try:
                self._flying.pop(self._ended.get(timeout=left).index, None)
            except queue.Empty:
                break
        return cut

    def _overdue(self, elapsed: float) -> list[_Due]:
        """What should have left before ``elapsed`` and has not; in a closed loop that is nothing."""
        found: list[_Due] = []
        with contextlib.suppress(HotswapError):  # a trace that breaks off has no more that could be due
            while isinstance(self._load, OpenLoop) and self._due and self._due[0].time < elapsed:
                found.append(heapq.heappop(self._due))
                if found[-1].pulled:
                    self._pull()
        return found
