"""Replays a decision log: the same scheduler and KV manager, no model, surrogate tokens for the logged page digests.

Given the logged verdicts and clock readings, the decisions must be the same: rows, resumes, drops, pages, suspensions
and reasons of every step, how full the cache is after each, how requests end. Where they differ, a decision depended on
something that was not logged, or the components differ from those of the server.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hotswap.core.engine.clock import ManualClock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.parts import Parts
from hotswap.core.engine.pool import RequestState
from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.engine.transfers import Transfers
from hotswap.core.engine.trial import Trial
from hotswap.core.interfaces.kv_transfer import KVTransfer
from hotswap.core.interfaces.kvcache import CacheKey, KVCacheManager
from hotswap.core.interfaces.messages import EndedTransfer, RowVerdict, StepMessage, Suspended, Verdict
from hotswap.core.interfaces.parallel import Executor, Ticket
from hotswap.core.interfaces.scheduler import Scheduler
from hotswap.core.request import FinishReason, Handoff, Request, SamplingParams, TextDelta

BEYOND = 1 << 31
"""Stands for tokens that a stop rule cut off, or of rows that were void; greater than every other."""

Event = dict[str, Any]


class Divergence(NamedTuple):
    """The first decision that came out otherwise. ``what``: "plan", or "cache" for its usage after the step."""

    step: int
    logged: Any
    replayed: Any
    what: str = "plan"


def read_log(path: Path) -> list[Event]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@dataclass
class _Recorded:
    """What the log knows of one request, from its arrival to its end. ``tokens``: those known and not kept yet."""

    arrival: Event
    content: list[Any] = field(default_factory=list)
    finish: Event | None = None
    n_kept: int = 0
    tokens: list[int] = field(default_factory=list)


class Replay:
    """Drives a loop through the events of a log. ``kv`` and ``transfer`` must be configured as the server's were;
    ``ranks``: how many report each transfer. ``clock``: for a transfer that reads one. ``make`` builds what an event
    "switch" has put in place."""

    def __init__(
        self, events: Sequence[Event], scheduler: Scheduler, kv: KVCacheManager, limits: Limits, depth: int,
        chained: bool, transfer: KVTransfer | None = None, ranks: int = 1, clock: ManualClock | None = None,
        make: Callable[[Event], Switch] | None = None,
    ) -> None:
        self.events, self._page_size, self._make = events, int(events[0]["page_size"]), make
        self.clock = clock or ManualClock()
        self.clock.time = events[0]["t"]
        self.steps = 0
        """Steps that have come out as logged, from plan to verdict."""
        self.executor, self._heard = _LoggedExecutor(), _Heard()
        self._recorded, self._heads = _recorded(events), dict[str, list[int]]()
        for recorded in self._recorded.values():
            recorded.tokens = self._tokens_of(recorded)
        self._left = iter(events)
        self._switched: Switch | None = None
        self._live: dict[str, _Recorded] = {}
        self._ended: dict[str, Event] = {}
        """Endings in the log that the replay has yet to show."""
        self.loop = EngineLoop(
            Parts(scheduler, kv, self.executor, self._heard), limits, self.clock, depth, chained,
            Transfers(transfer, ranks))

    def run(self) -> Divergence | None:
        """None when every decision came out as it was logged."""
        for event in self._left:
            self.clock.time = event["t"]
            if (divergence := self._replay(event)) is not None:
                return divergence
        return None

    def _replay(self, event: Event) -> Divergence | None:
        match event["event"]:
            case "arrival":
                recorded = self._live[event["id"]] = self._recorded[event["n"]]
                self.loop.add(self._request(recorded), lambda output: None)
            case "step" | "idle" | "plan_failed":
                return self._plan(event)
            case "verdict":
                return self._collect(event)
            case "finish":
                self._ended[event["id"]] = event
                if event["reason"] == FinishReason.ABORT:
                    self.loop.abort(event["id"])
                    return self._endings()
            case "reset":
                self.loop.parts.kv.reset()
                self.loop.transfers.reset()
            case "leak":
                self.loop.lifecycle.give_back_leaks()
            case "switch":
                return self._switch(event)
            case "exchange" if self._switched is not None:
                self._try(event)
        return None

    def _plan(self, event: Event) -> Divergence | None:
        logged = {key: event[key] for key in PLANNED} if event["event"] == "step" else {"event": event["event"]}
        trial = self.loop.lifecycle.trial
        if trial is not None and trial.steps_left <= 0:
            self.loop.lifecycle.trial = None
        self._heard.plan = {"event": "idle"}
        self.loop.plan_and_submit()
        replayed = _plain(self._heard.plan)
        return None if logged == replayed else Divergence(self.loop.submitted, logged, replayed)

    def _collect(self, event: Event) -> Divergence | None:
        self._answer(event)
        self.loop.collect()
        if (divergence := self._endings()) is not None:
            return divergence
        usage = self.loop.parts.kv.usage()
        logged, replayed = event["usage"], [usage.held, usage.fenced, usage.cached, usage.free]
        if logged != replayed:
            names = ("held", "fenced", "cached", "free")
            return Divergence(event["step"], dict(zip(names, logged, strict=True)),
                              dict(zip(names, replayed, strict=True)), "cache")
        self.steps += 1
        return None

    def _answer(self, event: Event) -> None:
        """The verdict that the executor gives next."""
        self.loop.in_flight[0].submitted_at = event["t"] - event["duration"]
        self.executor.verdict = self._verdict(event)

    def _switch(self, event: Event) -> Divergence | None:
        """Exchange parts as the server did. It collected what was in flight, and may have submitted steps of its own.
        """
        if self._make is None:
            raise ValueError("the log tells of an exchange of parts, and nobody here can build the new ones")
        self._switched, self.executor.more = self._make(event), self._next_verdict
        try:
            carry_out(self.loop, self._switched)
        except _OtherwiseError as error:
            return error.divergence
        finally:
            self.executor.more = None
        return self._endings()

    def _next_verdict(self) -> None:
        """Within an exchange: on to the next verdict of the log."""
        for event in self._left:
            self.clock.time = event["t"]
            match event["event"]:
                case "verdict":
                    self.steps += 1
                    return self._answer(event)
                case "finish":
                    self._ended[event["id"]] = event
                case "step":
                    logged, replayed = {key: event[key] for key in PLANNED}, _plain(self._heard.plan)
                    if logged != replayed:
                        raise _OtherwiseError(Divergence(event["step"], logged, replayed))
                case other:
                    told, step = {"event": other}, self.loop.submitted
                    raise _OtherwiseError(Divergence(step, told, {"event": "a step is awaited"}))
        raise _OtherwiseError(Divergence(self.loop.submitted, {"event": "end"}, {"event": "a step is awaited"}))

    def _try(self, event: Event) -> None:
        """Parts that are new are on trial, those that are back are not."""
        assert self._switched is not None
        kv, workers = self._switched.kv is not None, self._switched.workers is not None
        trial = Trial(lambda: None, lambda problem, lost: None, kv=kv, workers=workers)
        self.loop.lifecycle.trial, self._switched = None if event["problem"] else trial, None

    def _endings(self) -> Divergence | None:
        """Whether the requests that have ended are those of the log, in the same way."""
        logged = {id: {key: event[key] for key in ENDED} for id, event in self._ended.items()}
        replayed, self._heard.ended = self._heard.ended, {}
        for id in self._ended:
            self._live.pop(id, None)
        self._ended.clear()
        return None if logged == replayed else Divergence(self.loop.submitted, logged, replayed, "endings")

    def _request(self, recorded: _Recorded) -> Request:
        event, finish = recorded.arrival, recorded.finish
        reason = finish["reason"] if finish is not None else None
        prompt, recorded.tokens = _split(recorded.tokens, event["prompt_length"])
        continued, recorded.tokens = _split(recorded.tokens, event["continued"])
        hands_over = reason == FinishReason.HANDOFF
        sampling = SamplingParams(
            max_tokens=event["max_new"] + hands_over, prompt_logprobs=0 if event["prompt_logprobs"] else None)
        ends_early = finish is not None and reason in (FinishReason.STOP, FinishReason.ERROR)
        return Request(
            event["id"], prompt, sampling, priority=event["priority"], tenant=event["tenant"],
            deadline=event["deadline"], cache_key=CacheKey(salt=event["cache_key"]), fork_of=event["fork_of"],
            hands_over=hands_over, continued=Handoff(tuple(continued)) if continued else None,
            detokenizer=_LoggedEnding(self._ended, event, finish) if ends_early and finish else None)

    def _tokens_of(self, recorded: _Recorded) -> list[int]:
        """Surrogates of prompt and output: equal where the digests are equal, the rest by the request's own name."""
        event, finish, content = recorded.arrival, recorded.finish, recorded.content
        output = finish["output_length"] if finish is not None else event["continued"] + recorded.n_kept
        length, tokens = event["prompt_length"] + output, list[int]()
        for page in content:
            tokens += [page] if isinstance(page, int) else self._page(page)
        tokens += _surrogates(f"{event['n']}@{len(tokens)}", max(0, length - len(tokens)))
        if (parent := self._parent(recorded)) is not None:
            self._share_prompt(tokens, parent, recorded)
        return tokens[:length]

    def _page(self, digest: str) -> list[int]:
        head, own = self._heads.get(digest, []), _surrogates(digest, self._page_size)
        return head + own[len(head) :]

    def _parent(self, recorded: _Recorded) -> _Recorded | None:
        """The request whose prompt this one has, to the last token."""
        name, before = recorded.arrival["fork_of"], recorded.arrival["n"]
        if name is None:
            return None
        named = [other for n, other in self._recorded.items() if n < before and other.arrival["id"] == name]
        return named[-1] if named else None

    def _share_prompt(self, tokens: list[int], parent: _Recorded, recorded: _Recorded) -> None:
        """Put the parent's prompt in place of the same one. Of the page in which it ends, the head is now the parent's
        for whoever has that page."""
        length = recorded.arrival["prompt_length"]
        tokens[:length] = parent.tokens[:length]
        page, rest = divmod(length, self._page_size)
        if rest and page < len(recorded.content) and isinstance(recorded.content[page], str):
            self._heads[recorded.content[page]] = tokens[length - rest : length]

    def _verdict(self, event: Event) -> Verdict:
        rows, own = [], frozenset(event.get("own", ()))
        for id, n_kept, drafted, accepted, computed, error, lag in event["rows"]:
            kept = list[int]()
            if (recorded := self._live.get(id)) is not None:
                kept, recorded.tokens = _split(recorded.tokens, n_kept)
            kept += [BEYOND] * (n_kept - len(kept))
            rows.append(RowVerdict(id, kept, computed, drafted, accepted, lag, error=error, own=id in own))
        return Verdict(event["step"], rows, [Suspended(*suspended) for suspended in event["suspended"]],
                       finished_transfers=[EndedTransfer(*ended) for ended in event["transfers"]],
                       error=event["error"])


class _OtherwiseError(Exception):
    """In the middle of an exchange something came out otherwise."""

    def __init__(self, divergence: Divergence) -> None:
        super().__init__(divergence.what)
        self.divergence = divergence


class _LoggedExecutor(Executor):
    """Answers each step with its logged verdict. ``more`` finds that of a step that the log has yet to come to."""

    contract: ClassVar[str] = "executor/1"
    verdict: Verdict | None = None
    more: Callable[[], None] | None = None

    def launch(self, *arguments: Any) -> Any:
        raise NotImplementedError("a replay has no workers")

    def allocate(self, plan: Any) -> None:
        raise NotImplementedError("a replay has no workers")

    def submit(self, message: StepMessage) -> Ticket:
        return message.step_id

    def collect(self, ticket: Ticket) -> Verdict:
        if self.more is not None:
            self.more()
        assert self.verdict is not None
        return self.verdict

    def done(self, ticket: Ticket) -> bool:
        return True

    def health(self) -> str | None:
        return None

    def stop(self) -> None:
        """Nothing to end."""


class _LoggedEnding:
    """A request's detokeniser: it has no text, and ends the request where the log says that a stop rule, or what its
    detokeniser raised, has ended it."""

    def __init__(self, endings: Mapping[str, Event], arrival: Event, finish: Event) -> None:
        self._endings, self._finish, self._output_length = endings, finish, arrival["continued"]

    def push(self, token_ids: list[int], search_stops_after: int = 0) -> TextDelta:
        before, self._output_length = self._output_length, self._output_length + len(token_ids)
        if self._endings.get(self._finish["id"]) is not self._finish:
            return TextDelta("")
        if self._finish["reason"] == FinishReason.ERROR:
            raise RuntimeError("the log says that the request ended here with an error")
        return TextDelta("", "stop", self._finish["output_length"] - before)

    def finish(self) -> str:
        return ""


class _Heard:
    """What the loop tells its observers of the newest plan and of requests that have ended."""

    active = True

    def __init__(self) -> None:
        self.plan: dict[str, Any] = {}
        self.ended: dict[str, dict[str, Any]] = {}

    def notify(self, hook: str, **told: Any) -> None:
        match hook:
            case "hotswap_step_planned":
                message: StepMessage = told["message"]
                pages = [(request, {group: len(change.pages) for group, change in grant.groups.items()})
                         for request, grant in message.grants]
                self.plan = {
                    "step": message.step_id, "rows": message.rows, "resumes": message.resumes, "drops": message.drops,
                    "pages": pages, "suspensions": told["suspensions"], "holds": told["holds"]}
            case "hotswap_plan_failed":
                self.plan = {"event": "plan_failed"}
            case "hotswap_request_finished":
                request: RequestState = told["request"]
                self.ended[request.id] = {
                    "reason": told["reason"], "output_length": request.output_length,
                    "preemptions": request.preemptions, "cached_tokens": request.cached_tokens}


PLANNED = ("step", "rows", "resumes", "drops", "pages", "suspensions", "holds")
ENDED = ("reason", "output_length", "preemptions", "cached_tokens")


def _recorded(events: Iterable[Event]) -> dict[int, _Recorded]:
    """Every request, by the number of its arrival."""
    found: dict[int, _Recorded] = {}
    live: dict[str, _Recorded] = {}
    for event in events:
        match event["event"]:
            case "arrival":
                live[event["id"]] = found[event["n"]] = _Recorded(event, list(event["content"]))
            case "verdict":
                for id, n_kept, *_ in event["rows"]:
                    if id in live:
                        live[id].n_kept += n_kept
                for id, content in event["content"]:
                    if id in live:
                        live[id].content += content
            case "finish" if (ended := live.pop(event["id"], None)) is not None:
                ended.content += event["content"]
                ended.finish = event
    return found


def _split(tokens: list[int], count: int) -> tuple[list[int], list[int]]:
    return tokens[:count], tokens[count:]


def _surrogates(name: str, count: int) -> list[int]:
    data = hashlib.shake_256(name.encode()).digest(4 * count)
    return [int.from_bytes(data[4 * i : 4 * i + 4], "big") >> 1 for i in range(count)]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
