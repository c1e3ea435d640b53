"""Where the time of a whole log went."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from hotswap.core.engine.context import COMPUTED_BY
from hotswap.lab.decisions.lives import Life, Lives
from hotswap.lab.decisions.log import Event, Log


@dataclass
class Overview:
    """Of one engine. Seconds, unless it says otherwise; ``busy`` is the time in which at least one step was in flight,
    ``parts`` what the workers told of theirs."""

    replica: str
    seconds: float = 0.0
    busy: float = 0.0
    planning: float = 0.0
    steps: int = 0
    empty_plans: int = 0
    failed_plans: int = 0
    rows: int = 0
    tokens: int = 0
    kept: int = 0
    drafted: int = 0
    accepted: int = 0
    suspensions: Counter[str] = field(default_factory=Counter)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    held: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    lives: list[Life] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _begun: float | None = None
    _flying: int = 0
    _last: float = 0.0

    def take(self, event: Event) -> None:
        time = event["t"]
        self._begun = time if self._begun is None else self._begun
        if self._flying:
            self.busy += time - self._last
        self.seconds, self._last = time - self._begun, time
        match event["event"]:
            case "step":
                self.steps += 1
                self._flying += 1
                self.planning += event["duration"]
                self.rows += len(event["rows"])
                self.tokens += sum(n_tokens + drafts for _, n_tokens, drafts in event["rows"])
                self.suspensions.update(mode for _, mode, _ in event["suspensions"])
            case "idle":
                self.empty_plans += 1
            case "plan_failed":
                self.failed_plans += 1
            case "verdict":
                self._flying -= 1
                for part, seconds in event["worker"].items():
                    self.parts[part] += seconds
                for _, n_kept, drafted, accepted, *_ in event["rows"]:
                    self.kept, self.drafted = self.kept + n_kept, self.drafted + drafted
                    self.accepted += accepted

    def add(self, life: Life) -> None:
        self.lives.append(life)
        for reason, seconds in life.held.items():
            # By whom is in the story of the request: here it would be as many reasons as requests.
            self.held[f"{COMPUTED_BY}another" if reason.startswith(COMPUTED_BY) else reason] += seconds


def overview(log: Log) -> Overview:
    found, following = Overview(log.replica), Lives(log.replica)
    for event in log.events():
        found.take(event)
        if (life := following.take(event)) is not None:
            found.add(life)
    for life in following.close(found._last):
        found.add(life)
    found.notes = log.notes()
    return found


def overviews(logs: Iterable[Log]) -> list[Overview]:
    return [overview(log) for log in logs]
