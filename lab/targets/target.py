"""What the load generator needs of an engine or a server, and what it hears back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Outgoing:
    """One request. ``id`` is unique in the run. How tokens are chosen is the target's setting: it is the same for all
    requests of a run."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class Ending:
    """How a request ended. Counts are None where the target does not tell; ``error``: why it failed, its status first
    ("HTTP 503: …")."""

    time: float
    finish_reason: str | None = None
    error: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queued: float | None = None
    preemptions: int | None = None


class Hearer(Protocol):
    """Hears of one request, from any thread; times are the target's clock's."""

    def arrived(self, time: float, tokens: int | None, ids: Sequence[int] | None = None, answer: bool = True) -> None:
        """A delivery of ``tokens`` tokens, None where only the usage at the end will say how many; ``answer`` is False
        for reasoning."""

    def ended(self, ending: Ending) -> None:
        """Once, last."""


@dataclass
class Activity:
    """What a target counted between :meth:`Target.begin` and :meth:`Target.finish`; see ``BlockRecord``."""

    cpu: float | None = None
    engine: dict[str, float] = field(default_factory=dict)
    timeline: list[tuple[float, int, int, float]] = field(default_factory=list)


class Target(Protocol):
    """``can_reset``: whether ``reset`` empties its prefix cache."""

    can_reset: bool

    def send(self, request: Outgoing, hearer: Hearer) -> None:
        """Start a request and return at once. Whatever goes wrong is told to the hearer."""

    def abort(self, id: str) -> None:
        """End a request early, if it still lives; its hearer is told."""

    def reset(self) -> None:
        """Empty the prefix cache, while nothing runs. HotswapError where it cannot."""

    def begin(self) -> None:
        """Count from zero."""

    def finish(self) -> Activity:
        """What was counted since ``begin``."""

    def problem(self) -> str | None:
        """Why it cannot serve any more; None where it can."""

    def effective(self) -> Mapping[str, Any]:
        """What a request says, but for prompt and length: shown once, so that no default is hidden."""

    def close(self) -> None:
        """Stop what was started for it. Safe to call twice."""


TargetFactory = Callable[[], Target]
