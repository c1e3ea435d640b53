"""What became of each request of a log, and where its time went.

A request is in one of five phases at any time between arrival and end, so that their lengths add up to its latency:

- *queue*: it waits for its first start.
- *transfer*: it has started, and its pages are on their way from elsewhere.
- *prefill*: it has started and has no token yet.
- *decode*: from the first token on.
- *preempted*: it was suspended, or lost its pages when parts were exchanged; it waits again, and computes or loads
  again what it had.

A phase that a step begins, begins when the step is submitted; one that a step ends, ends when it is collected.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hotswap.lab.decisions.log import Event, Log

PAGES_ON_THEIR_WAY = "its pages are on their way"
"""The reason that core gives for holding a request that has started."""


class Phase(StrEnum):
    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    TRANSFER = "transfer"


class Span(NamedTuple):
    phase: Phase
    begin: float
    end: float


@dataclass
class Life:
    """One request in one engine. Times are seconds of the engine's clock; ``ended`` and ``reason`` are None as long as
    the log does not tell the end, and the spans then reach up to its last event."""

    replica: str
    id: str
    arrived: float
    prompt_length: int
    max_new: int
    phase: Phase = Phase.QUEUE
    spans: list[Span] = field(default_factory=list)
    running: bool = False
    computed: int = 0
    """Tokens that were computed when last told, the most there have been."""
    first_token: float | None = None
    ended: float | None = None
    reason: str | None = None
    output_length: int = 0
    preemptions: int = 0
    cached_tokens: int | None = None
    held: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by the reason that plans gave for not serving it."""
    _since: float = 0.0

    def enter(self, phase: Phase, time: float) -> None:
        if phase is not self.phase:
            self.close(time)
            self.phase = phase

    def close(self, time: float) -> None:
        if time > self._since:
            self.spans.append(Span(self.phase, self._since, time))
            self._since = time

    @property
    def last(self) -> float:
        return self.spans[-1].end if self.spans else self.arrived

    @property
    def latency(self) -> float:
        """From arrival to end, or as far as the log goes."""
        return (self.last if self.ended is None else self.ended) - self.arrived

    def seconds(self) -> dict[Phase, float]:
        found = dict.fromkeys(Phase, 0.0)
        for span in self.spans:
            found[span.phase] += span.end - span.begin
        return found


class Lives:
    """Follows the requests of one engine through the events of its log. ``live``: those that have not ended."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.live: dict[str, Life] = {}
        self._planned = 0.0  # when the scheduler was asked last
        self._held: list[tuple[str, str]] = []  # what it said of those that it did not serve

    @property
    def running(self) -> int:
        return sum(life.running for life in self.live.values())

    def take(self, event: Event) -> Life | None:
        """Follow one event; returns the life that it ends."""
        time: float = event["t"]
        match event["event"]:
            case "arrival":
                self.live[event["id"]] = Life(
                    self.replica, event["id"], time, event["prompt_length"], event["max_new"], _since=time)
            case "step":
                self._holds(event)
                self._step(event, time + event["duration"])
            case "idle":
                self._holds(event)
            case "verdict":
                self._verdict(event, time)
            case "exchange" if event["recomputed"]:
                self._lose_pages(time)
            case "finish":
                return self._finish(event, time)
        return None

    def close(self, time: float) -> list[Life]:
        """The log ends here: those that are left."""
        for life in self.live.values():
            life.close(time)
        return list(self.live.values())

    def _holds(self, event: Event) -> None:
        """What a plan said of a request holds until the next plan."""
        for id, reason in self._held:
            if (life := self.live.get(id)) is not None:
                life.held[reason] += event["t"] - self._planned
        self._planned, self._held = event["t"], event["holds"]

    def _step(self, event: Event, submitted: float) -> None:
        for id, _ in event["resumes"]:
            if (life := self.live.get(id)) is not None:
                life.running = True
                if life.phase is Phase.QUEUE:
                    life.enter(Phase.PREFILL, submitted)
        for id, reason in event["holds"]:
            if reason == PAGES_ON_THEIR_WAY and (life := self.live.get(id)) is not None:
                life.enter(Phase.TRANSFER, submitted)
        for id, *_ in event["rows"]:
            if (life := self.live.get(id)) is not None and life.phase is Phase.TRANSFER:
                life.enter(Phase.PREEMPTED if life.preemptions else Phase.PREFILL, submitted)
        for id, *_ in event["suspensions"]:
            if (life := self.live.get(id)) is not None:
                life.running = False
                life.preemptions += 1
                life.enter(Phase.PREEMPTED, submitted)

    def _verdict(self, event: Event, time: float) -> None:
        for id, n_kept, _, _, computed, *_ in event["rows"]:
            if (life := self.live.get(id)) is None:
                continue
            life.output_length += n_kept
            if n_kept and life.first_token is None:
                life.first_token = time
            if n_kept and life.running:
                life.enter(Phase.DECODE, time)
            elif life.running and life.phase is Phase.PREEMPTED and computed >= life.computed:
                life.enter(Phase.PREFILL, time)
            life.computed = max(life.computed, computed)

    def _lose_pages(self, time: float) -> None:
        """Parts were exchanged, and what runs has to be computed again."""
        for life in self.live.values():
            if life.running:
                life.running = False
                life.enter(Phase.PREEMPTED, time)

    def _finish(self, event: Event, time: float) -> Life | None:
        life = self.live.pop(event["id"], None)
        if life is not None:
            if event["output_length"] and life.first_token is None:
                life.first_token = time
            life.close(time)
            life.ended, life.reason, life.output_length = time, event["reason"], event["output_length"]
            life.preemptions, life.cached_tokens = event["preemptions"], event["cached_tokens"]
        return life


def lives(log: Log) -> Iterator[Life]:
    """Every request of a log, in the order in which they end; those that have not, last."""
    following, time = Lives(log.replica), 0.0
    for event in log.events():
        time = event["t"]
        if (life := following.take(event)) is not None:
            yield life
    yield from following.close(time)


@dataclass(frozen=True)
class Journey:
    """A request through all engines that worked on it, one after the other: with a deployment that hands requests over
    that can be two. What passes between them counts as transfer."""

    lives: tuple[Life, ...]

    @property
    def id(self) -> str:
        return self.lives[0].id

    @property
    def replica(self) -> str:
        return " > ".join(life.replica for life in self.lives)

    @property
    def reason(self) -> str | None:
        return self.lives[-1].reason

    @property
    def prompt_length(self) -> int:
        return self.lives[0].prompt_length

    @property
    def output_length(self) -> int:
        return self.lives[-1].output_length

    @property
    def preemptions(self) -> int:
        return sum(life.preemptions for life in self.lives)

    @property
    def latency(self) -> float:
        return self.lives[-1].arrived + self.lives[-1].latency - self.lives[0].arrived

    def seconds(self) -> dict[Phase, float]:
        found = dict.fromkeys(Phase, 0.0)
        for life in self.lives:
            for phase, seconds in life.seconds().items():
                found[phase] += seconds
        for before, after in zip(self.lives, self.lives[1:], strict=False):
            found[Phase.TRANSFER] += max(0.0, after.arrived - before.last)
        return found


def journeys(found: Iterable[Life]) -> list[Journey]:
    """Lives joined where one engine has handed a request to the next; in order of arrival."""
    whole: list[list[Life]] = []
    open_ends: dict[str, list[Life]] = {}
    for life in sorted(found, key=lambda life: life.arrived):
        parts = open_ends.pop(life.id, None)
        if parts is None:
            parts = []
            whole.append(parts)
        parts.append(life)
        if life.reason == "handoff":
            open_ends[life.id] = parts
    return [Journey(tuple(parts)) for parts in whole]
