"""Replays a decision log: the same scheduler and KV manager, no model, surrogate tokens for the logged page digests.

Given the logged verdicts and clock readings, the plans must be the same, row for row. Where they differ, a decision
depended on something that was not logged, or the components differ from those of the server.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from hotswap.core.engine.clock import ManualClock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop, Parts
from hotswap.core.engine.transfers import Transfers
from hotswap.core.interfaces.kv_transfer import KVTransfer
from hotswap.core.interfaces.kvcache import CacheKey, KVCacheManager
from hotswap.core.interfaces.messages import EndedTransfer, RowVerdict, StepMessage, Suspended, Verdict
from hotswap.core.interfaces.parallel import Executor, Ticket
from hotswap.core.interfaces.scheduler import Scheduler
from hotswap.core.live import ObserverHub
from hotswap.core.request import FinishReason, Request, SamplingParams

STOP = 1 << 31
"""The surrogate of a token that ended a request; greater than every other."""

Event = dict[str, Any]


class Divergence(NamedTuple):
    """The first plan that came out otherwise."""

    step: int
    logged: Any
    replayed: Any


def read_log(path: Path) -> list[Event]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class _LoggedExecutor(Executor):
    """Answers each step with its logged verdict."""

    contract: ClassVar[str] = "executor/1"

    def __init__(self, verdicts: dict[int, Verdict]) -> None:
        super().__init__()
        self.verdicts = verdicts
        self.messages: list[StepMessage] = []

    def launch(self, factory: Any, plan: Any, meeting: Any = None) -> Any:
        raise NotImplementedError("a replay has no workers")

    def allocate(self, plan: Any) -> None:
        raise NotImplementedError("a replay has no workers")

    def submit(self, message: StepMessage) -> Ticket:
        self.messages.append(message)
        return message.step_id

    def collect(self, ticket: Ticket) -> Verdict:
        return self.verdicts[ticket]

    def done(self, ticket: Ticket) -> bool:
        return True

    def health(self) -> str | None:
        return None

    def stop(self) -> None:
        """Nothing to end."""


class Replay:
    """Drives a loop through the events of a log. ``kv`` and ``transfer`` must be configured as the server's were."""

    def __init__(
        self, events: list[Event], scheduler: Scheduler, kv: KVCacheManager, limits: Limits, depth: int, chained: bool,
        transfer: KVTransfer | None = None,
    ) -> None:
        self.events, self.page_size = events, int(events[0]["page_size"])
        self.finished = {event["id"]: event for event in events if event["event"] == "finish"}
        self.arrivals = {event["id"]: event for event in events if event["event"] == "arrival"}
        self.clock = ManualClock(events[0]["t"])
        self._left = {id: self._output(event) for id, event in self.arrivals.items()}
        self.executor = _LoggedExecutor({e["step"]: self._verdict(e) for e in events if e["event"] == "verdict"})
        self.loop = EngineLoop(
            Parts(scheduler, kv, self.executor, ObserverHub()), limits, self.clock, depth, chained,
            Transfers(transfer))

    def run(self) -> Divergence | None:
        """None when every plan came out as it was logged."""
        for event in self.events:
            self.clock.time = event["t"]
            match event["event"]:
                case "arrival":
                    self.loop.add(self._request(event), lambda output: None)
                case "step":
                    self.loop.plan_and_submit()
                    message = self.executor.messages[-1] if self.executor.messages else StepMessage(0)
                    if (divergence := self._compare(event, message)) is not None:
                        return divergence
                case "verdict":
                    self.loop.collect()
                case "finish" if event["reason"] == FinishReason.ABORT:
                    self.loop.abort(event["id"])
        return None

    def _compare(self, event: Event, message: StepMessage) -> Divergence | None:
        logged = _normal(event["step"], event["rows"], event["resumes"], event["drops"],
                         [(request, mode) for request, mode, _ in event["suspensions"]])
        replayed = _normal(message.step_id, message.rows, message.resumes, message.drops,
                           [(request, mode.value) for request, mode in message.suspensions])
        return None if logged == replayed else Divergence(event["step"], logged, replayed)

    def _request(self, event: Event) -> Request:
        sampling = SamplingParams(
            max_tokens=event["max_new"], prompt_logprobs=0 if event["prompt_logprobs"] else None)
        parent = self.arrivals.get(event.get("fork_of"), event)  # those that fork have its prompt, to the last token
        prompt = self._tokens_of(parent)[: event["prompt_length"]]
        return Request(
            event["id"], prompt, sampling, eos_token_ids=frozenset([STOP]), priority=event["priority"],
            tenant=event["tenant"], deadline=event["deadline"], cache_key=CacheKey(salt=event["cache_key"]),
            fork_of=event.get("fork_of"))

    def _output(self, event: Event) -> list[int]:
        """The surrogate output; nothing is known of a request that had not ended."""
        tokens, finish = self._tokens_of(event)[event["prompt_length"]:], self.finished.get(event["id"])
        if finish is not None and finish["reason"] == FinishReason.STOP and tokens:
            tokens[-1] = STOP
        return tokens

    def _tokens_of(self, event: Event) -> list[int]:
        """Surrogates of prompt and output: pages that were full at the end by digest, that in which the prompt ends
        among them, the rest by the request's own name."""
        head = self._surrogates(event["id"], event["content"], event["prompt_length"])
        finish = self.finished.get(event["id"])
        if finish is None:
            return head
        prompt_length, length = event["prompt_length"], event["prompt_length"] + finish["output_length"]
        begin = prompt_length // self.page_size * self.page_size
        tail = self._surrogates(event["id"], finish["content"], length - begin, begin)
        return head[:begin] + tail

    def _surrogates(self, id: str, content: list[Any], length: int, begin: int = 0) -> list[int]:
        """Tokens that are equal where the digests are equal."""
        if content and isinstance(content[0], int):
            return list(content[:length])
        tokens: list[int] = []
        for digest in content:
            tokens += _tokens(str(digest), self.page_size)
        missing = length - len(tokens)
        return tokens[:length] + _tokens(f"{id}@{begin + len(tokens)}", max(0, missing))

    def _verdict(self, event: Event) -> Verdict:
        rows = []
        for id, n_kept, drafted, accepted, computed, error in event["rows"]:
            left = self._left.get(id, [])
            kept, self._left[id] = left[:n_kept], left[n_kept:]
            # Beyond the end of a request come tokens that a stop rule cut off, or rows that were void.
            kept += [STOP] * (n_kept - len(kept))
            rows.append(RowVerdict(id, kept, computed, drafted, accepted, error=error))
        return Verdict(event["step"], rows, [Suspended(*suspended) for suspended in event["suspended"]],
                       finished_transfers=[EndedTransfer(*ended) for ended in event.get("transfers", ())],
                       error=event["error"])


def _tokens(name: str, count: int) -> list[int]:
    data = hashlib.shake_256(name.encode()).digest(4 * count)
    return [int.from_bytes(data[4 * i : 4 * i + 4], "big") >> 1 for i in range(count)]


def _normal(*parts: Iterable[Any] | int) -> Any:
    return json.loads(json.dumps(parts))
