"""The request pool: core's own state of every live request, the sets of those that run and wait, and the steps in
flight."""

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import Any

from hotswap.core.errors import RequestError
from hotswap.core.interfaces.kvcache import Fence, KVCacheManager, Match
from hotswap.core.interfaces.parallel import Ticket
from hotswap.core.request import FinishReason, OutputSink, Request, TokenLogprob


class Status(Enum):
    """WAITING holds no pages. SUSPENDING has lost them in a plan whose step was not collected yet."""

    WAITING = "waiting"
    RUNNING = "running"
    SUSPENDING = "suspending"
    DONE = "done"


WAITING, RUNNING, SUSPENDING, DONE = Status  # looking up a member by attribute is slow


FlyingRow = tuple[int, int]
"""A submitted row: at most so many tokens computed, and so many kept (0 where it stops short of the last token).
A plain tuple, since one is made for every row of every step."""


class RequestState:
    """One live request. Schedulers see it as a ``RequestView``; only core changes it.

    Token counts: ``tokens`` are known (prompt, then output). ``computed`` is the upper bound of what lies in the cache
    once everything in flight is done, ``verified`` what is certain, ``end`` the most there can ever be. Of ``told`` the
    KV manager has heard; it has nothing to do before ``commit_due`` are verified.
    """

    __slots__ = (
        "arrival", "attrs", "cached_tokens", "commit_due", "computed", "deadline", "detokenizer", "draft_limit", "end",
        "filling", "finish_reason", "finished_at", "first_scheduled_at", "first_token_at", "flying", "hands_over",
        "held", "id", "kept_in_flight", "max_new", "min_tokens", "on_worker", "parent", "preemptions", "priority",
        "prompt_length", "prompt_logprobs", "ready", "request", "reusable", "sequence", "sink", "status", "stop_ids",
        "tenant", "tokens", "tokens_in_flight", "told", "verified",
    )

    def __init__(self, request: Request, sink: OutputSink, arrival: float, sequence: int, max_new: int) -> None:
        sampling = request.sampling
        self.request, self.sink, self.detokenizer = request, sink, request.detokenizer
        self.id, self.arrival, self.sequence = request.id, arrival, sequence
        self.priority, self.tenant, self.deadline, self.attrs = (
            request.priority, request.tenant, request.deadline, request.attrs,
        )
        self.tokens = list(request.prompt_token_ids)
        self.hands_over = request.hands_over and max_new > 1
        self.prompt_length, self.max_new = len(self.tokens), 1 if self.hands_over else max_new
        self.end, self.min_tokens = self.prompt_length + self.max_new, sampling.min_tokens
        eos = frozenset[int]() if sampling.ignore_eos else request.eos_token_ids
        self.stop_ids = eos.union(sampling.stop_token_ids) if sampling.stop_token_ids else eos
        self.status = WAITING
        self.computed = self.verified = self.told = self.commit_due = 0
        self.ready = self.draft_limit = self.reusable = self.preemptions = self.kept_in_flight = 0
        self.flying = self.tokens_in_flight = 0  # rows submitted and not collected, and their tokens
        self.on_worker = False
        self.filling: str | None = None  # the transfer that brings tokens into its pages; it cannot step before
        self.parent: RequestState | None = None  # whose pages it shares at its first start, if they are there then
        self.held: list[RequestState] = []  # of its children: those that the scheduler has not been told of
        self.cached_tokens: int | None = None
        self.first_scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.prompt_logprobs: list[TokenLogprob | None] | None = (
            None if sampling.prompt_logprobs is None else [None] * self.prompt_length
        )
        if request.continued is not None:
            self.tokens += request.continued.tokens
            self.first_token_at, self.prompt_logprobs = arrival, None  # the client has them

    @property
    def running(self) -> bool:
        return self.status is RUNNING

    @property
    def in_flight(self) -> int:
        return self.flying

    @property
    def output_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    def refresh_running(self, lookahead: int, chained: bool) -> int:
        """Bring the counts of a running request up to date; returns ``ready``.

        Once everything in flight could end the request, it is not ready: a row beyond ``max_new`` would write past the
        room that admission promised.
        """
        known = len(self.tokens)
        left = self.end - known - self.kept_in_flight
        if left <= 0 or (self.flying and not chained) or self.filling is not None:
            self.ready = 0
            return 0
        self.ready = ready = 1 if self.kept_in_flight else known - self.computed
        self.draft_limit = lookahead if lookahead < left else left - 1
        return ready

    def refresh_waiting(self, match: Match, lookahead: int) -> None:
        """A waiting request could compute everything that the cache does not have."""
        self.reusable = match.cached + match.pending
        self.ready = len(self.tokens) - self.reusable
        self.draft_limit = max(0, min(lookahead, self.max_new - self.output_length - 1))

    def launch(self, n_tokens: int, draft_slots: int) -> FlyingRow:
        """A row has been planned. It samples when everything before it and itself reaches the last known token."""
        samples = self.kept_in_flight or self.computed + n_tokens >= len(self.tokens)
        kept = 1 + draft_slots if samples else 0
        width = n_tokens + draft_slots
        self.computed += width
        self.flying += 1
        self.tokens_in_flight += width
        self.kept_in_flight += kept
        return width, kept

    def land(self, row: FlyingRow) -> None:
        """The oldest row in flight has been collected."""
        width, kept = row
        self.flying -= 1
        self.tokens_in_flight -= width
        self.kept_in_flight -= kept

    def settle(self, computed: int, lag: int) -> None:
        """The worker has told the true length: correct the bound, without which a rejection would livelock the loop."""
        self.computed, self.verified = computed + self.tokens_in_flight, computed - lag

    def commit(self, kv: KVCacheManager) -> None:
        """Tell the KV manager what has become known and sure since it was told last."""
        self.commit_due = kv.commit(self.id, self.tokens[self.told :], self.verified)
        self.told = len(self.tokens)


@dataclass(slots=True)
class StepInFlight:
    step_id: int
    ticket: Ticket
    states: list[RequestState]
    rows: list[FlyingRow]
    """One of each of ``states``."""
    submitted_at: float


class RequestPool:
    """Every live request by id. ``running`` is in order of admission; waiting ones are only counted and found by id,
    since their order is the scheduler's. ``in_flight``: the steps submitted and not collected, oldest first."""

    def __init__(self) -> None:
        self.states: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}
        self.in_flight: deque[StepInFlight] = deque()
        self._sequence = 0

    def add(self, request: Request, sink: OutputSink, arrival: float, max_new: int) -> RequestState:
        """RequestError where a request of that id lives already: everything is found by it."""
        if request.id in self.states:
            raise RequestError(f"a request with the id {request.id!r} lives already; give each its own")
        state = RequestState(request, sink, arrival, self._sequence, max_new)
        self._sequence += 1
        self.states[request.id] = state
        return state

    @property
    def waiting(self) -> int:
        return len(self.states) - len(self.running)

    def fences(self) -> set[Fence]:
        """The fence of everything submitted and not collected."""
        return {self.in_flight[-1].step_id} if self.in_flight else set()

    def start(self, state: RequestState) -> None:
        state.status = RUNNING
        self.running[state.id] = state

    def pause(self, state: RequestState, status: Status) -> None:
        state.status = status
        self.running.pop(state.id, None)

    def resume_order(self, order: list[str]) -> None:
        """Put the running set back into the order it had before a plan that was undone."""
        self.running = {key: self.running[key] for key in order if key in self.running}

    def remove(self, state: RequestState) -> None:
        state.status = DONE
        self.running.pop(state.id, None)
        del self.states[state.id]

    def snapshot(self) -> dict[str, Any]:
        """What a person needs to see why nothing moves."""
        return {
            "running": [(s.id, s.computed, len(s.tokens), s.ready) for s in self.running.values()],
            "waiting": [s.id for s in list(self.states.values())[:50] if s.status is not RUNNING],
        }
