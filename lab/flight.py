"""One request under way, and what is written down of it when it has landed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.records import RequestRecord
from hotswap.lab.targets.target import Ending


@dataclass
class Flight:
    """Heard of from the target's threads (a ``Hearer``); times of ``planned``, ``sent`` and ``chunks`` count from
    ``origin``. ``tell`` is called once, at the end."""

    index: int
    item: WorkItem
    planned: float
    sent: float
    origin: float
    tell: Callable[["Flight"], None]
    chunks: list[tuple[float, int | None]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    untold: int = 0
    """Deliveries that did not say which tokens they were."""
    answered: float | None = None
    ending: Ending | None = None

    def arrived(self, time: float, tokens: int | None, ids: Sequence[int] | None = None, answer: bool = True) -> None:
        self.chunks.append((time - self.origin, tokens))
        if ids is None:
            self.untold += 1
        else:
            self.tokens.extend(ids)
        if answer and self.answered is None:
            self.answered = time - self.origin

    def ended(self, ending: Ending) -> None:
        self.ending = ending
        self.tell(self)

    def frozen(self) -> "Flight":
        """As it is now: what comes later changes nothing of it."""
        return replace(self, chunks=list(self.chunks), tokens=list(self.tokens), ending=None)


def records_of(flights: Iterable[Flight], wall: float) -> tuple[RequestRecord, ...]:
    """In the order of the workload. What came after ``wall`` seconds was not delivered in this stretch.

    A delivery of unknown size gets its part of what usage says; where no usage came, since the request was cut off, as
    many tokens as deliveries of the others have had.
    """
    flights = sorted(flights, key=lambda flight: flight.index)
    known = [f for f in flights if f.ending is not None and f.ending.output_tokens is not None and f.chunks]
    tokens = sum(f.ending.output_tokens or 0 for f in known if f.ending is not None)
    usual = tokens / max(1, sum(len(f.chunks) for f in known)) if known else 1.0
    return tuple(_record(flight, wall, usual) for flight in flights)


def _record(flight: Flight, wall: float, usual: float) -> RequestRecord:
    ending, late = flight.ending, flight.ending is None
    known = sum(count for _, count in flight.chunks if count is not None)
    unknown = sum(count is None for _, count in flight.chunks)
    told = ending.output_tokens if ending is not None else None
    total = told if told is not None else known + round(unknown * usual)
    chunks = tuple(chunk for chunk in spread(flight.chunks, total - known) if not late or chunk[0] <= wall)
    output = total if not late else sum(count for _, count in chunks)
    ending = ending or Ending(flight.origin + wall)
    prompt = ending.prompt_tokens if ending.prompt_tokens is not None else len(flight.item.prompt)
    return RequestRecord(
        flight.index, flight.planned, flight.sent, chunks, ending.time - flight.origin, prompt, output,
        finish_reason=ending.finish_reason, error=ending.error, cached_tokens=ending.cached_tokens,
        queued=ending.queued, preemptions=ending.preemptions,
        tokens=tuple(flight.tokens) if flight.chunks and not flight.untold else None,
        answered=flight.answered, incomplete=late)


def spread(chunks: Sequence[tuple[float, int | None]], tokens: int) -> list[tuple[float, int]]:
    """``tokens`` over the deliveries of unknown size, as evenly as whole numbers can be."""
    unknown, seen, result = sum(count is None for _, count in chunks), 0, []
    for time, count in chunks:
        if count is None:
            share = max(0, tokens) * (seen + 1) // unknown - max(0, tokens) * seen // unknown
            seen += 1
            result.append((time, share))
        else:
            result.append((time, count))
    return result
