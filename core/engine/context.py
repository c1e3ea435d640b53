"""One plan: the façade that a scheduler uses, and the journal that takes everything back if the plan fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hotswap.core.engine.forks import has_prompt, shareable
from hotswap.core.engine.pool import RUNNING, SUSPENDING, WAITING, FlyingRow, RequestPool, RequestState
from hotswap.core.engine.transfers import Transfers
from hotswap.core.interfaces.kvcache import NOTHING, Fence, Grant, KVCacheManager, Match
from hotswap.core.interfaces.messages import NewRequest, Resume, StepMessage
from hotswap.core.interfaces.scheduler import (
    GONE,
    GRANTED,
    LATER,
    Answer,
    Probe,
    Row,
    StepPlan,
    SuspendMode,
    Suspension,
)

Hold = tuple[str, str]

READING = "what it could read is still being written"
"""Why a waiting request is held: a KV transfer that keeps its pages elsewhere has not ended."""

COMPUTED_BY = "its prefix is being computed by "
"""Why a waiting request is held; the other one's id follows."""


class PlanError(Exception):
    """A scheduler's plan breaks a rule; the message says which. ``request``: of the row that does, where one does."""

    def __init__(self, message: str, request: str | None = None) -> None:
        super().__init__(message)
        self.request = request


@dataclass(frozen=True, slots=True)
class Limits:
    """Greatest sizes of a step. ``reuse_tail`` and ``lookahead`` are the speculator's."""

    max_batch_tokens: int
    max_running: int
    max_model_len: int
    lookahead: int = 0
    reuse_tail: int = 0


class Context:
    """Implements ``PlanContext`` for one step. Reservations go to the KV manager at once and are undone as a unit."""

    def __init__(
        self, pool: RequestPool, kv: KVCacheManager, limits: Limits, step_id: int, now: float, *,
        chained: bool, slots: int, in_flight: int, transfers: Transfers,
    ) -> None:
        self.now, self.waiting = now, pool.waiting
        self.token_budget, self.nothing_in_flight = limits.max_batch_tokens, in_flight == 0
        self.message = StepMessage(step_id)
        self.holds: list[Hold] = []
        self.suspensions: list[Suspension] = []
        self.flying: list[FlyingRow] = []
        """What the plan's rows were booked as, once it is sealed."""
        self._pool, self._kv, self._limits, self._step_id, self._chained = pool, kv, limits, step_id, chained
        self._transfers = transfers
        self._journal: list[Callable[[], Any]] = []
        self._reserved: dict[str, tuple[RequestState | None, int, int]] = {}
        self._order: list[str] | None = None
        self._expecting: set[str] = set()
        kv.begin_plan()
        lookahead, ready = limits.lookahead, 0
        self.running: Sequence[RequestState] = list(pool.running.values())
        for state in self.running:
            ready += state.refresh_running(lookahead, chained) > 0
        self.row_limit = limits.max_running
        if not chained:
            # Rows are dealt out over the free slots, so that each step in flight gets its share.
            self.running = [state for state in self.running if state.ready]
            self.row_limit = min(self.row_limit, -(-(ready + pool.waiting) // max(1, slots - in_flight)))

    # what a scheduler may do

    @property
    def free_slots(self) -> int:
        return self._limits.max_running - len(self._pool.running)

    def view(self, request_id: str) -> RequestState:
        state = self._pool.states[request_id]
        if state.status is RUNNING:
            state.refresh_running(self._limits.lookahead, self._chained)
        elif state.status is WAITING:
            match, reason = self._find(state)
            state.refresh_waiting(match, self._limits.lookahead)
            if reason is not None:
                state.ready = 0
                self._expect(state, reason)
        else:
            state.ready = 0
        return state

    def probe(self, request_id: str) -> Probe:
        state = self._pool.states[request_id]
        match, _ = self._find(state)
        state.reusable = match.cached + match.pending
        return Probe(match.cached, match.pending)

    def reserve(self, request_id: str, n_tokens: int, drafts: int = 0) -> Answer:
        state = self._pool.states[request_id]
        if state.status is RUNNING:
            grant = self._kv.reserve(request_id, state.computed + n_tokens + drafts)
            if grant is not NOTHING:
                if isinstance(grant, Answer):
                    return grant
                self._journal.append(partial(self._kv.undo, grant.entry))
                self.message.grants.append((request_id, grant))
        elif state.status is WAITING:
            answer = self._start(state, n_tokens, drafts)
            if answer is not GRANTED:
                return answer
        else:
            return LATER
        self._reserved[request_id] = (state, n_tokens, drafts)
        return GRANTED

    def suspend(self, request_id: str, mode: SuspendMode = SuspendMode.AUTO, reason: str = "no room") -> None:
        state = self._pool.states[request_id]
        if state.status is not RUNNING:
            raise PlanError(f"suspend({request_id!r}): the request does not run", request_id)
        if request_id in self._reserved:
            raise PlanError(f"suspend({request_id!r}): this plan has reserved room for it", request_id)
        if self._order is None:
            self._order = list(self._pool.running)
        state.commit(self._kv)
        fences: set[Fence] = {self._step_id}
        mode = self._save(state, mode, fences)
        if state.filling is not None:
            fences.add(state.filling)
        entry = self._kv.release(request_id, fences)
        self._journal.append(partial(self._resume, state, entry, self._transfers.detach(state)))
        self._pool.pause(state, SUSPENDING)
        self.message.suspensions.append((request_id, mode))
        self.suspensions.append(Suspension(request_id, mode, reason))

    def hold(self, request_id: str, reason: str) -> None:
        if request_id not in self._expecting:  # else the better reason is known
            self.holds.append((request_id, reason))

    # what core does with it

    def seal(self, plan: StepPlan) -> list[RequestState]:
        """Check the plan against what was reserved, and book its rows. Raises PlanError before anything is booked."""
        rows = self._put_off(plan.rows) if self._transfers.filling else plan.rows
        states = self._checked(rows)
        self.flying = [
            state.launch(n_tokens, drafts) for state, (_, n_tokens, drafts) in zip(states, rows, strict=True)]
        self.message.rows = rows
        self._journal.clear()  # it knows this plan: a ring would keep both
        return states

    def undo(self) -> list[RequestState]:
        """Take everything back, last in first out, as if the plan had not been made; returns the requests that it had
        started, which wait again."""
        for step in reversed(self._journal):
            step()
        self._journal.clear()
        if self._order is not None:
            self._pool.resume_order(self._order)
        self._kv.begin_plan()
        return [self._pool.states[resume.request] for resume in self.message.resumes]

    def _put_off(self, rows: list[Row]) -> list[Row]:
        """Without those of requests that this plan has started, but whose pages have yet to arrive."""
        for row in rows:
            if self._is_filling(row):
                self.hold(row.request, "its pages are on their way")
        return [row for row in rows if not self._is_filling(row)]

    def _is_filling(self, row: Row) -> bool:
        state, _, _ = self._reserved.get(row.request, (None, 0, 0))
        return state is not None and state.filling is not None

    def _checked(self, rows: list[Row]) -> list[RequestState]:
        if len(rows) > self.row_limit:
            raise PlanError(f"{len(rows)} rows, but the limit of this step is {self.row_limit}")
        reserved, states, total = self._reserved, [], 0
        for request_id, n_tokens, drafts in rows:
            state, room, draft_room = reserved.pop(request_id, (None, 0, 0))
            if state is None or n_tokens > room or drafts > draft_room:
                raise PlanError(
                    f"row ({request_id!r}, {n_tokens} tokens, {drafts} drafts) is more than what this plan has "
                    f"reserved for it, {room} tokens and {draft_room} drafts, or is planned twice", request_id)
            if not 0 < n_tokens <= state.ready or drafts and not (
                0 <= drafts <= state.draft_limit and n_tokens == state.ready
            ):
                raise PlanError(
                    f"row ({request_id!r}, {n_tokens} tokens, {drafts} drafts): the view allows 1 to {state.ready} "
                    f"tokens and, behind the last of them, 0 to {state.draft_limit} drafts", request_id)
            total += n_tokens + drafts
            states.append(state)
        if total > self.token_budget:
            raise PlanError(f"{total} tokens planned, but the budget of this step is {self.token_budget}")
        return states

    def _forkable(self, state: RequestState) -> int:
        """How many tokens a request could share with its parent now. The last one of the prompt it computes itself."""
        tail = self._limits.reuse_tail
        return shareable(state, tail) if state.parent is not None and has_prompt(state.parent, tail) else 0

    def _find(self, state: RequestState) -> tuple[Match, str | None]:
        """What could be reused, from elsewhere too, and why it should wait for more, if it should."""
        if shared := self._forkable(state):
            return Match(shared, 0), None
        # Where prompt logprobs are asked, every prompt token must be computed. Else all but the last may be reused.
        limit, tail = 0 if state.prompt_logprobs is not None else len(state.tokens) - 1, self._limits.reuse_tail
        match = self._kv.match(state.tokens, state.request.cache_key, limit, tail)
        extended = self._transfers.extend(state, match, limit, tail)
        if extended is None:
            return match, READING
        return extended, self._awaited(state, extended)

    def _awaited(self, state: RequestState, match: Match) -> str | None:
        """Why a waiting request should let another one compute the beginning of its prompt, or None.

        It waits only for one that runs and has a row in flight or room in this plan: whoever is waited for gets on, and
        waits for nobody. Of a worse priority, only for what is in flight: the scheduler may serve that one last.
        """
        coming = match.coming
        if coming is None or coming.tokens <= match.cached + match.pending:
            return None
        maker = self._pool.running.get(coming.request)
        if maker is None or not (maker.flying or maker.filling is not None or maker.id in self._reserved):
            return None
        if maker.priority > state.priority and maker.computed < coming.tokens:
            return None
        return f"{COMPUTED_BY}{maker.id}"

    def _expect(self, state: RequestState, reason: str) -> None:
        if state.id not in self._expecting:
            self._expecting.add(state.id)
            self.holds.append((state.id, reason))

    def _start(self, state: RequestState, n_tokens: int, drafts: int) -> Answer:
        """Admit a waiting request: bind its match, give it room, send it to the workers."""
        if self.free_slots <= 0:
            return LATER
        (match, reason), known = self._find(state), len(state.tokens)
        if reason is not None:
            self._expect(state, reason)
            return LATER
        base = match.cached + match.pending
        if base + n_tokens > known or (drafts and base + n_tokens < known):
            return LATER
        shared = self._forkable(state)
        grants = self._take_pages(state, match, shared, base + n_tokens + drafts)
        if isinstance(grants, Answer):
            return grants
        if self._order is None:
            self._order = list(self._pool.running)
        state.refresh_waiting(match, self._limits.lookahead)
        self._journal.append(partial(
            self._unstart, state, [grant.entry for grant in grants], state.on_worker, state.cached_tokens,
            state.parent))
        if not state.on_worker:
            request = state.request
            self.message.new.append(NewRequest(
                state.id, list(state.tokens), state.prompt_length, request.sampling, request.seed,
                request.eos_token_ids, request.bad_words_token_ids,
            ))
        self.message.resumes.append(Resume(state.id, base))
        self.message.grants += [(state.id, grant) for grant in grants]
        # Of what is pending, nothing is sure before the worker has said so.
        state.on_worker, state.computed, state.verified = True, base, match.cached
        state.told, state.commit_due = shared or known, 0  # of a fork, the manager knows what is shared
        state.parent = None
        if state.cached_tokens is None:
            state.cached_tokens = base
        self._pool.start(state)
        if (attachment := self._transfers.attach(state, grants[0], match)) is not None:
            self._journal.append(partial(self._transfers.undo, attachment.entry))
        return GRANTED

    def _take_pages(self, state: RequestState, match: Match, shared: int, upto: int) -> list[Grant] | Answer:
        """Room for ``upto`` tokens of a request that starts: behind what matches, or behind what its parent shares."""
        if not shared:
            grant = self._kv.reserve(state.id, upto, match, state.request.cache_key, state.tokens)
            return grant if isinstance(grant, Answer) else [grant]
        parent = state.parent
        assert parent is not None
        parent.commit(self._kv)
        fork = self._kv.fork(parent.id, state.id, shared, self._step_id)
        if isinstance(fork, Answer):
            if fork is GONE:  # its window has moved on: this one starts as any other, in the next plan
                state.parent = None
                return LATER
            return fork
        grown = self._kv.reserve(state.id, upto)
        if isinstance(grown, Answer):
            self._kv.undo(fork.entry)
            return grown
        return [fork] if grown is NOTHING else [fork, grown]

    def _save(self, state: RequestState, mode: SuspendMode, fences: set[Fence]) -> SuspendMode:
        """Have the pages of a request saved that is being suspended, if that can be and should be."""
        saving = self._transfers.save(state, self._kv, mode)
        if saving is None:
            return SuspendMode.RECOMPUTE
        self._journal.append(partial(self._transfers.undo, saving.entry))
        if saving.fence is not None:
            fences.add(saving.fence)
        return SuspendMode.SWAP

    def _unstart(
        self, state: RequestState, entries: list[Any], on_worker: bool, cached_tokens: int | None,
        parent: RequestState | None,
    ) -> None:
        self._transfers.detach(state)
        for entry in reversed(entries):
            self._kv.undo(entry)
        self._pool.pause(state, WAITING)
        state.on_worker, state.cached_tokens, state.parent = on_worker, cached_tokens, parent
        state.computed = state.verified = 0

    def _resume(self, state: RequestState, entry: Any, filling: str | None) -> None:
        self._transfers.reattach(state, filling)
        self._kv.undo(entry)
        self._pool.start(state)
