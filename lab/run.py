"""Runs an experiment: arms take turns at the same requests, and each block is written down as it ends."""

import gc
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from hotswap.core.errors import HotswapError
from hotswap.core.interfaces.workload import WorkItem
from hotswap.core.request import GREEDY_EPSILON
from hotswap.lab.experiment import Experiment
from hotswap.lab.interleave import ROUNDS, orders
from hotswap.lab.journal import Journal, JournalError
from hotswap.lab.load import INTERRUPTED, Load, Numbered, OpenLoop, Stretch, run_load
from hotswap.lab.metrics import Slo, failed, values_of
from hotswap.lab.outputs import divergences, told_by_both
from hotswap.lab.processes import Neighbours
from hotswap.lab.records import BlockRecord, Pair, RequestRecord
from hotswap.lab.renewal import Renewal
from hotswap.lab.targets.target import Activity, Target

LEAST_REQUESTS = 4
WARM_UP_REQUESTS = 8


@dataclass
class Arm:
    """``origin``: arms of the same one share a prefix cache, since they are the same server."""

    name: str
    target: Target
    origin: str = ""


class Monitor(Protocol):
    """Follows an experiment, and knows when there is enough of it."""

    def add(self, arm: str, pair: Pair) -> None: ...

    def enough(self, progress: float) -> str | None:
        """Why the run may stop; None: go on. ``progress``: the share of the planned run that is over; at 1 no other
        quad follows."""


class Patient:
    """A monitor that never has enough."""

    def add(self, arm: str, pair: Pair) -> None:
        """Nothing is followed."""

    def enough(self, progress: float) -> str | None:
        return None


class Progress(Protocol):
    """Hears how far a run has come: ``done`` of 1, and in words."""

    def __call__(self, done: float, words: str) -> None: ...


@dataclass
class Measured:
    """All that was measured. ``pairs``: by arm, in order. ``outputs_compared``: by arm, of how many requests the greedy
    output was compared with the base's."""

    blocks: list[BlockRecord] = field(default_factory=list)
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    divergences: list[dict[str, Any]] = field(default_factory=list)
    outputs_compared: Counter[str] = field(default_factory=Counter)
    stopped: str = ""
    partial: bool = False


class Served(NamedTuple):
    """What came of a block. ``foreign``: cores that other processes used beside it."""

    stretch: Stretch
    activity: Activity
    foreign: float | None


class Dead(Exception):
    """The run cannot go on: an arm cannot, or the workload."""


class Run:
    """One experiment. ``arms``: the base first. ``text`` makes a token readable."""

    def __init__(
        self, experiment: Experiment, arms: Sequence[Arm], items: Iterator[WorkItem], now: Callable[[], float],
        journal: Journal, monitor: Monitor | None = None, progress: Progress = lambda done, words: None,
        text: Callable[[int], str] = str,
    ) -> None:
        self._experiment, self._arms, self._now, self._journal = experiment, list(arms), now, journal
        self._monitor, self._progress, self._text = monitor or Patient(), progress, text
        self._items: Iterator[Numbered] = enumerate(items)
        self._load: Load = experiment.load.loop
        self._slo: Slo = experiment.limits
        self._base = experiment.against
        self.measured = Measured(pairs={name: [] for name in experiment.compared})
        self._greedy = float(experiment.sampling.get("temperature", 1.0)) < GREEDY_EPSILON
        self._positions, self._interrupted = 0, False
        self._renewal: Renewal | None = None
        self.share = 0.0
        """Of the planned run, how much is done."""

    def run(self) -> Measured:
        """As far as it comes: an arm that dies, and a user who interrupts, end the run and lose nothing."""
        measured = self.measured
        try:
            size = self._warm_up()
            measured.stopped = self._rounds(size)
        except (Dead, JournalError) as death:
            measured.stopped, measured.partial = str(death), True
        except KeyboardInterrupt:
            measured.stopped, measured.partial = INTERRUPTED, True
        self._journal.end(measured.stopped, measured.partial)
        return measured

    def _warm_up(self) -> int:
        """Serve blocks that do not count. Returns how many requests a block should have."""
        wanted, limit = self._experiment.block, self._load.limit or 1
        size = wanted.requests or max(WARM_UP_REQUESTS, 2 * limit)
        slowest = 0.0
        for number in range(self._experiment.warm_up):
            items, walls = self._take(size), list[float]()
            for arm in self._arms:
                self._progress(0.0, f"warming up {arm.name}")
                served = self._serve(arm, items, f"warm-up {number}").stretch
                if self._interrupted:
                    raise KeyboardInterrupt
                self._check(arm, served.records, "while warming up")
                walls.append(served.wall)
            slowest = max(walls) / size  # of the last time: the first has more to do
        if wanted.requests is not None:
            return size
        if isinstance(self._load, OpenLoop) and self._load.arrivals != "workload":
            return max(LEAST_REQUESTS, round(self._load.rate * wanted.seconds))
        return max(LEAST_REQUESTS, 2 * limit, round(wanted.seconds / max(slowest, 1e-6)))

    def _rounds(self, size: int) -> str:
        begin, seconds = self._now(), self._experiment.minutes * 60
        for number, order in enumerate(orders([arm.name for arm in self._arms], self._experiment.seed)):
            self._progress(min(1.0, max(self.share, (self._now() - begin) / seconds)), f"pair {number + 1}")
            self._round(number, order, self._take(size))
            if (number + 1) % ROUNDS == 0:
                end = self._look_ahead(number + 1, self._now() - begin)
                if (why := self._monitor.enough(self.share)) is not None or end is not None:
                    return end or why or ""
        raise AssertionError("rounds have no end")

    def _take(self, size: int) -> list[Numbered]:
        """The next requests. A trace may end at a line that nobody has looked at before."""
        try:
            return list(islice(self._items, size))
        except HotswapError as error:
            raise Dead(f"the workload has ended: {error}") from error

    def _look_ahead(self, pairs: int, elapsed: float) -> str | None:
        """Bring ``share`` up to date. Why no other quad follows, if none does."""
        experiment, seconds = self._experiment, self._experiment.minutes * 60
        self.share = min(1.0, max(elapsed / seconds, pairs / experiment.pairs if experiment.pairs else 0.0))
        if experiment.pairs is not None and pairs >= experiment.pairs:
            self.share = 1.0
            return f"{pairs} pairs are in"
        if elapsed * (1 + ROUNDS / pairs) > seconds:
            self.share = 1.0
            return "time is over"
        return None

    def _round(self, number: int, order: Sequence[str], items: list[Numbered]) -> None:
        arms = {arm.name: arm for arm in self._arms}
        blocks: dict[str, BlockRecord] = {}
        for name in order:
            block = self._block(arms[name], items, number)
            blocks[name] = block
            self.measured.blocks.append(block)
            self._journal.block(block)
            if self._interrupted:
                raise KeyboardInterrupt
            self._check(arms[name], block.requests, f"in pair {number}")
        values = {name: values_of(block, self._slo) for name, block in blocks.items()}
        for name, pairs in self.measured.pairs.items():
            pairs.append(Pair(values[self._base], values[name], order.index(self._base) < order.index(name)))
            self._monitor.add(name, pairs[-1])
            if self._greedy:
                self._compare_outputs(blocks[self._base], blocks[name])

    def _compare_outputs(self, base: BlockRecord, arm: BlockRecord) -> None:
        both = list(told_by_both(base, arm))
        self.measured.outputs_compared[arm.arm] += len(both)
        self.measured.divergences += divergences(both, arm, self._text)

    def _block(self, arm: Arm, items: list[Numbered], number: int) -> BlockRecord:
        stretch, activity, foreign = self._serve(arm, items, f"pair {number}")
        position, self._positions = self._positions, self._positions + 1
        return BlockRecord(
            arm.name, number, position, stretch.wall, stretch.records, activity.cpu, activity.engine,
            tuple(activity.timeline), foreign)

    def _serve(self, arm: Arm, items: list[Numbered], name: str) -> Served:
        """The same requests, from the same state of the cache, at the same planned times, for every arm."""
        target = arm.target
        self._check(arm, (), f"before {name}")  # while others had their turns
        if self._experiment.cache == "cold":
            if target.can_reset:
                self._reset(arm, name)
            else:
                items = self._fresh(arm, items, name)
        gc.collect()  # what the last block has left is not this one's to clear away
        neighbours = Neighbours(self._now)
        target.begin()
        stretch = run_load(target, items, self._load, self._now, name=name, seed=self._seed(name))
        activity = target.finish()
        self._interrupted = stretch.broken is not None  # the requests are all there
        return Served(stretch, activity, neighbours.cores())

    def _reset(self, arm: Arm, name: str) -> None:
        try:
            arm.target.reset()
        except HotswapError as error:
            self._check(arm, (), f"before {name}")
            raise Dead(f"arm {arm.name!r} could not empty its cache before {name}: {error}") from error

    def _seed(self, name: str) -> int:
        return random.Random(f"{self._experiment.seed} {name}").getrandbits(32)

    def _fresh(self, arm: Arm, items: list[Numbered], name: str) -> list[Numbered]:
        """Arms that are one server get different beginnings, others the same."""
        if self._renewal is None:
            self._renewal = Renewal(items)
        alike = [other.name for other in self._arms if other.origin == arm.origin]
        return list(self._renewal(items, f"{name} {alike.index(arm.name)}"))

    def _check(self, arm: Arm, requests: Sequence[RequestRecord], when: str) -> None:
        if (problem := arm.target.problem()) is not None:
            raise Dead(f"arm {arm.name!r} died {when}: {problem}")
        bad = failed(requests)
        if bad and len(bad) == len(requests):
            raise Dead(f"arm {arm.name!r} answered no request {when}: {bad[0].error}")
