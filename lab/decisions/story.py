"""What happened to one request, step by step, and what it waited for."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from hotswap.lab.decisions.lives import Lives, Phase
from hotswap.lab.decisions.log import Event, Log

NOT_LOOKED_AT = "behind others, no plan came to it"
"""It waits behind others: a scheduler gives a reason only for those that it looks at."""


@dataclass
class Chapter:
    """A stretch in which the same happened in one step after the other. ``begin`` and ``end``: seconds of the engine's
    clock. ``steps``: the first and the last, None where it belongs to none.

    ``what``: "says" (``text`` tells it), "waits" (``text`` is the reason), "computes" (of its prompt, or again) or
    "decodes". ``plans`` counts those that made it wait; ``missed`` counts, in a stretch of decoding, those that left it
    out, by reason. ``others``: rows and tokens that were computed for others meanwhile.
    """

    what: str
    begin: float
    end: float
    steps: tuple[int, int] | None = None
    text: str = ""
    plans: int = 0
    n_steps: int = 0
    tokens: int = 0
    kept: int = 0
    drafted: int = 0
    accepted: int = 0
    others: tuple[int, int] = (0, 0)
    missed: Counter[str] = field(default_factory=Counter)


class Story:
    """Follows the events of a log and writes down what concerns one request; ``chapters`` in order."""

    def __init__(self, log: Log, request: str) -> None:
        self.request, self.chapters = request, list[Chapter]()
        self._lives = Lives(log.replica)
        self._in_flight = 0
        self._leaving = False  # suspended, and the step with the suspension was not collected yet

    def take(self, event: Event) -> None:
        alive = self.request in self._lives.live
        if event["event"] == "arrival" and event["id"] == self.request:
            self._arrival(event)
        elif alive:
            match event["event"]:
                case "step" | "idle":
                    self._plan(event)
                case "plan_failed":
                    self._say(event["t"], f"{event['component']} fails, and its plan is undone: {event['error']}")
                case "verdict":
                    self._verdict(event)
                case "reset":
                    self._say(event["t"], "everything cached is forgotten")
                case "exchange":
                    self._exchange(event)
        self._lives.take(event)
        if alive and event["event"] == "finish" and event["id"] == self.request:
            again = f", after {event['preemptions']} suspensions" if event["preemptions"] else ""
            self._say(event["t"], f"ends ({event['reason']}) with {event['output_length']} tokens{again}")

    def _arrival(self, event: Event) -> None:
        running = self._lives.running
        text = f"arrives with {event['prompt_length']} prompt tokens, for at most {event['max_new']} new ones"
        if event["priority"]:
            text += f", priority {event['priority']}"
        if event["fork_of"]:
            text += f", sharing the prompt of {event['fork_of']}"
        if event["continued"]:
            text += f"; {event['continued']} tokens come from another engine"
        self._in_flight, self._leaving = 0, False
        self._say(event["t"], f"{text}; {running} run, {len(self._lives.live) - running} wait")

    def _plan(self, event: Event) -> None:
        step, submitted = event.get("step"), event["t"] + event.get("duration", 0.0)
        for victim, mode, reason in event.get("suspensions", ()):
            if victim == self.request:
                self._leaving = True
                self._say(submitted, f"is suspended ({mode}): {reason}", step)
            elif reason.endswith(f" {self.request}"):
                self._say(submitted, f"{victim} is suspended ({mode}): {reason}", step)
        for id, computed in event.get("resumes", ()):
            if id == self.request and not self._lives.live[id].running:  # else other workers are told of it
                again = " again" if self._lives.live[id].phase is not Phase.QUEUE else ""
                found = f"{computed} tokens that are there already" if computed else "nothing in the cache"
                self._say(submitted, f"starts{again} with {found}", step)
        held = dict(event["holds"]).get(self.request)
        row = next((row for row in event.get("rows", ()) if row[0] == self.request), None)
        if row is not None:
            self._served(event, submitted, row[1], row[2])
        elif not self._in_flight and not self._leaving:
            self._waits(event, held or NOT_LOOKED_AT)

    def _exchange(self, event: Event) -> None:
        back = f", which failed: {event['problem']}" if event["problem"] else ""
        lost = ", and it loses its pages" if event["recomputed"] and self._lives.live[self.request].running else ""
        self._say(event["t"], f"{event['new']} takes the place of {event['old']}{back}{lost}")

    def _served(self, event: Event, submitted: float, n_tokens: int, drafts: int) -> None:
        self._in_flight += 1
        decodes = self._lives.live[self.request].phase is Phase.DECODE and n_tokens == 1
        chapter = self._chapter("decodes" if decodes else "computes", submitted, event["step"])
        chapter.n_steps += 1
        chapter.tokens += n_tokens
        self._meanwhile(chapter, event)

    def _waits(self, event: Event, reason: str) -> None:
        life = self._lives.live[self.request]
        last = self.chapters[-1]
        if life.phase is Phase.DECODE and last.what == "decodes":
            last.missed[reason] += 1
            return
        if last.what == "waits" and last.text != reason:
            last.end = event["t"]
        chapter = self._chapter("waits", event["t"], event.get("step"), reason)
        chapter.plans += 1
        self._meanwhile(chapter, event)

    def _verdict(self, event: Event) -> None:
        for id, n_kept, drafted, accepted, *_, error, _ in event["rows"]:
            if id != self.request:
                continue
            self._in_flight -= 1
            chapter = next((c for c in reversed(self.chapters) if c.what in ("computes", "decodes")), None)
            if chapter is not None:
                chapter.end = max(chapter.end, event["t"])
                chapter.kept += n_kept
                chapter.drafted += drafted
                chapter.accepted += accepted
            life = self._lives.live[id]
            if n_kept and life.first_token is None:
                self._say(event["t"], "has its first token", event["step"])
            if error:
                self._say(event["t"], f"its row failed: {error}", event["step"])
        if any(id == self.request for id, *_ in event["suspended"]):
            self._leaving = False

    def _meanwhile(self, chapter: Chapter, event: Event) -> None:
        rows = [n_tokens for id, n_tokens, _ in event.get("rows", ()) if id != self.request]
        chapter.others = chapter.others[0] + len(rows), chapter.others[1] + sum(rows)

    def _chapter(self, what: str, time: float, step: int | None, text: str = "") -> Chapter:
        """The one that goes on, or a new one; what waited until now has waited until ``time``."""
        last = self.chapters[-1]
        if last.what == "waits":
            last.end = time
        if (last.what, last.text) != (what, text):
            last = Chapter(what, time, time, None if step is None else (step, step), text)
            self.chapters.append(last)
        elif step is not None:
            last.steps = (last.steps[0] if last.steps else step, step)
        return last

    def _say(self, time: float, text: str, step: int | None = None) -> None:
        if self.chapters and self.chapters[-1].what == "waits":
            self.chapters[-1].end = time
        self.chapters.append(Chapter("says", time, time, None if step is None else (step, step), text))


def chapters(log: Log, request: str) -> Iterator[Chapter]:
    """What a log tells of a request, in order."""
    story = Story(log, request)
    for event in log.events():
        story.take(event)
    yield from story.chapters
