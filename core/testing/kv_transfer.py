"""The conformance kit of KV transfers. A test module of a transfer's author::

    class TestMine(KVTransferSuite):
        def make(self, **options):
            return Mine(Mine.Options(**options))

The suite drives whole engine loops on the fake device, which runs late, poisons pages and checks every slot it reads,
with requests that are suspended in every mode, aborted in every state, and plans that fail half-way and are undone.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from hotswap.core.engine.pool import RequestState
from hotswap.core.interfaces.kv_transfer import REUSE, SWAP, KVTransfer, TransferWorker
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.interfaces.scheduler import Answer, PlanContext, Scheduler, StepPlan, SuspendMode
from hotswap.core.request import Request, SamplingParams
from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig, random_prompt
from hotswap.core.testing.wrapping import Wrapped

PAGE = 4


class PlantedError(RuntimeError):
    """Ends a plan half-way."""


class Restless(Wrapped):
    """Suspends running requests for no reason, in modes of its own, and raises in the middle of plans."""

    def __init__(self, inner: Scheduler, rng: random.Random, modes: list[SuspendMode], seen: Counter[str]) -> None:
        super().__init__(inner)
        self.rng, self.modes, self.seen = rng, modes, seen
        self.failed = False

    def plan(self, ctx: PlanContext) -> StepPlan:
        fuse = None if self.failed else self.rng.choice([None] * 5 + [1, 2, 3, 4])
        busy = _Busy(ctx, self, fuse)
        try:
            if self.rng.random() < 0.1 and ctx.running:
                busy.suspend(self.rng.choice(ctx.running).id, reason="for no reason")
            plan = self.inner.plan(busy)
        except PlantedError:
            self.failed = True
            self.seen["plans undone"] += 1
            raise
        self.failed = False
        return plan


class _Busy:
    def __init__(self, ctx: PlanContext, owner: Restless, fuse: int | None) -> None:
        self._ctx, self._owner, self._fuse = ctx, owner, fuse
        self._gone: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def running(self) -> list[Any]:
        return [view for view in self._ctx.running if view.id not in self._gone]

    def reserve(self, *arguments: Any) -> Any:
        answer = self._ctx.reserve(*arguments)
        self._burn()
        return answer

    def suspend(self, request_id: str, mode: SuspendMode = SuspendMode.AUTO, reason: str = "no room") -> None:
        self._gone.add(request_id)
        self._ctx.suspend(request_id, self._owner.rng.choice(self._owner.modes), reason)
        self._burn()

    def _burn(self) -> None:
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse == 0:
                raise PlantedError("planted")


class LateWorker(TransferWorker):
    """A worker half between the fake device and the real one that does nothing in its step, but some time later: each
    time that it is asked, it goes on with probability 1 - ``patience``. Only for transfers behind a fence."""

    def __init__(self, inner: TransferWorker, rng: random.Random, patience: float = 0.4) -> None:
        self.inner, self.rng, self.patience = inner, rng, patience
        self.waiting: list[Any] = []

    def register(self, cache: Any, terms: Any) -> None:
        self.inner.register(cache, terms)

    def begin(self, message: Any) -> None:
        self.waiting.append(message)

    def report(self, wait_s: float) -> list[EndedTransfer]:
        while self.waiting and self.rng.random() > self.patience:
            self.inner.begin(self.waiting.pop(0))
        return self.inner.report(wait_s)

    def close(self) -> None:
        self.inner.close()


@dataclass
class Traffic:
    """Random requests through one rig until nothing is left to do."""

    rig: Rig
    rng: random.Random
    seen: Counter[str]
    longest: int
    aborts: int = 8
    requests: list[Request] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    def run(self, count: int = 12, resets: bool = True) -> None:
        shared = [self.rng.randrange(13) for _ in range(17)]
        arrivals = sorted(self.rng.randrange(60) for _ in range(count))
        aborts = {self.rng.randrange(5, 90): f"r{self.rng.randrange(count)}" for _ in range(self.aborts)}
        for turn in range(6000):
            while arrivals and arrivals[0] <= turn:
                arrivals.pop(0)
                self._arrive(shared)
            if aborts.get(turn) in self.rig.loop.pool.states:
                self._abort(self.rig.loop.pool.states[aborts[turn]])
            if resets and self.rng.random() < 0.01:
                self.rig.loop.parts.kv.reset()
                self.rig.loop.transfers.reset()
            did = self.rig.loop.turn()
            self._look()
            self.rig.clock.advance(0.001)
            if not (did or arrivals or self.rig.loop.in_flight or self.rig.loop.pool.states):
                return
        raise AssertionError(f"no progress: {self.rig.loop.pool.snapshot()}")

    def _arrive(self, shared: list[int]) -> None:
        prompt, parent = random_prompt(self.rng, 40, shared), None
        key = CacheKey(salt=self.rng.choice(["", "", "other"]))
        if self.requests and self.rng.random() < 0.25:
            model = self.requests[-1]
            prompt, parent, key = list(model.prompt_token_ids), model.fork_of or model.id, model.cache_key
        self.requests.append(self.rig.add(
            f"r{len(self.requests)}", prompt, self.rng.randrange(1, self.longest - len(prompt)),
            seed=self.rng.randrange(3), priority=self.rng.randrange(3),
            sampling={"prompt_logprobs": 0} if self.rng.random() < 0.1 else {},
            cache_key=key, fork_of=parent,
            eos_token_ids=frozenset(self.rng.choice([(), (5,), (1, 2)]))))

    def _abort(self, state: RequestState) -> None:
        self.seen[f"abort {state.status.value}"] += 1
        self.seen["abort filling"] += state.filling is not None
        self.seen["abort swapped"] += state.status.value == "waiting" and state.preemptions > 0
        self.aborted.add(state.id)
        self.rig.loop.abort(state.id)

    def _look(self) -> None:
        loop = self.rig.loop
        loop.parts.kv.check()
        assert loop.transfers.component is not None
        loop.transfers.component.check()
        self.seen["filling"] += bool(loop.transfers.filling)

    def check(self) -> None:
        client = self.rig.client
        for request in self.requests:
            if request.id not in self.aborted:
                assert client.tokens(request.id) == expected(request)
            assert len(client.endings(request.id)) == 1
        assert_clean(self.rig)
        for message in self.rig.executor.messages:
            self.seen.update(f"suspended by {mode.value}" for _, mode in message.suspensions)
        self.seen["two steps in flight"] += self.rig.loop.max_depth_seen >= 2
        self.seen["accepted drafts"] += self.rig.worker.accepted
        for name, count in self.rig.loop.transfers.counters().items():
            self.seen[name] += count


def traffic(
    make: Callable[[], KVTransfer], seed: int, seen: Counter[str], modes: list[SuspendMode],
    wrap: Callable[[TransferWorker, random.Random], TransferWorker] = lambda worker, rng: worker,
) -> Traffic:
    """A rig with parts and sizes drawn by ``seed``, not run yet."""
    rng, transfer = random.Random(seed), make()
    page_size, longest = rng.choice([1, 2, 4, 8]), 96
    kv = rng.choice(["prefix", "radix", "paged"])
    windows: dict[str, int | None] = {"full": None}
    if rng.random() < 0.5:
        windows["window"] = rng.choice([1, 3, 6, 13])
    depth, chained = rng.choice([(1, True), (2, True), (2, True), (3, False)])
    inner = build("scheduler", rng.choice(["chunked", "continuous"]), policy=rng.choice(["fcfs", "priority"]))
    rig = make_rig(
        Restless(inner, rng, modes, seen), kv, windows=windows, page_size=page_size, max_model_len=longest,
        num_pages=1 + -(-int(longest * rng.uniform(1.0, 2.5)) // page_size), max_batch_tokens=rng.choice([9, 16, 40]),
        max_running=rng.choice([3, 6]), depth=depth, chained=chained, lookahead=rng.choice([0, 0, 3]), seed=seed,
        reuse_tail=rng.choice([0, 0, 1, 5]),
        transfer=transfer, wrap_transfer=lambda worker: wrap(worker, rng))
    return Traffic(rig, rng, seen, longest)


class OnDemand(Wrapped):
    """Suspends ``victim`` in the next plan in which it runs."""

    def __init__(self, inner: Scheduler) -> None:
        super().__init__(inner)
        self.victim: str | None = None
        self.mode = SuspendMode.SWAP

    def plan(self, ctx: PlanContext) -> StepPlan:
        if self.victim is not None and self.victim in [view.id for view in ctx.running]:
            ctx.suspend(self.victim, self.mode, "on demand")
            self.victim = None
            return StepPlan()
        return self.inner.plan(ctx)


class KVTransferSuite:
    """What every KV transfer keeps. ``make(**options)`` gives a new component; ``late`` are options with which
    everything runs behind fences, None where it cannot."""

    late: dict[str, Any] | None = None
    trials = 20

    def make(self, **options: Any) -> KVTransfer:
        raise NotImplementedError

    def late_worker(self, worker: TransferWorker, rng: random.Random) -> TransferWorker:
        """The worker half of a transfer with the options ``late``, which does things some time later."""
        return LateWorker(worker, rng)

    def rig(self, *, late: bool = False, **settings: Any) -> Rig:
        """An engine whose scheduler suspends on demand."""
        if late and self.late is None:
            pytest.skip("it does everything within the step")
        rng, options = random.Random(7), (self.late or {}) if late else {}
        return make_rig(
            OnDemand(build("scheduler", "chunked")), page_size=PAGE, transfer=self.make(**options),
            wrap_transfer=(lambda worker: self.late_worker(worker, rng)) if late else lambda worker: worker, **settings)

    def needs(self, offer: str) -> None:
        if offer not in self.make().describe().offers:
            pytest.skip(f"it does not offer {offer!r}")

    def test_a_worker_half_that_was_never_registered_can_be_closed(self) -> None:
        """As where an engine's start fails before its pages have been divided."""
        self.make().worker().close()

    # ------------------------------------------------------------------ random traffic

    def test_random_traffic_reads_only_what_it_wrote_and_gives_everything_back(self) -> None:
        seen: Counter[str] = Counter()
        for seed in range(self.trials):
            run = traffic(self.make, seed, seen, list(SuspendMode))
            run.run()
            run.check()
        self._met(seen)

    def test_transfers_that_run_late_change_nothing(self) -> None:
        if self.late is None:
            pytest.skip("it does everything within the step")
        options, seen = self.late, Counter[str]()
        for seed in range(self.trials):
            run = traffic(lambda: self.make(**options), seed, seen, list(SuspendMode), self.late_worker)
            run.run()
            run.check()
        self._met(seen)
        assert seen["filling"]

    def _met(self, seen: Counter[str]) -> None:
        wanted = ["plans undone", "two steps in flight", "accepted drafts", "abort running", "abort waiting"]
        if SWAP in self.make().describe().offers:
            wanted += ["suspended by swap", "suspended by recompute"]
        assert all(seen[what] for what in wanted), seen

    # ------------------------------------------------------------------ reuse

    @pytest.mark.parametrize("field", ["model_revision", "dtype", "adapter", "salt"])
    def test_each_part_of_the_cache_key_counts(self, field: str) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(), list(range(12))
        key = CacheKey("revision", "float32", "adapter", "salt")
        rig.add("a", prompt, 4, cache_key=key)
        rig.run()
        assert look_up(rig, prompt, key) == 12
        assert look_up(rig, prompt, replace(key, **{field: "other"})) == 0

    def test_what_is_found_is_a_prefix(self) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(), list(range(12))
        rig.add("a", prompt, 8)
        rig.run()
        tokens = prompt + rig.client.tokens("a")
        assert look_up(rig, tokens[:-1]) == 16
        for place, length in ((0, 0), (3, 0), (4, 4), (11, 8), (13, 12)):
            other = [*tokens[:place], 99, *tokens[place + 1:-1]]
            assert look_up(rig, other) == length, f"another token at {place}"

    @pytest.mark.parametrize("late", [False, True])
    def test_a_prompt_comes_back_after_the_cache_has_forgotten_it(self, late: bool) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(late=late), list(range(12)) * 2
        requests = [rig.add("a", prompt, 4)]
        rig.run()
        rig.loop.parts.kv.reset()
        requests.append(rig.add("b", prompt, 4))
        rig.run()
        assert [rig.client.tokens(request.id) for request in requests] == [expected(request) for request in requests]
        assert rig.client.last("b").cached_tokens == 20  # whole pages, and never the last token
        assert_clean(rig)

    def test_nothing_is_found_before_its_copy_has_ended(self) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(late=True), list(range(12))
        mover = rig.worker.transfer
        assert isinstance(mover, LateWorker), "late_worker() returns a LateWorker"
        mover.patience = 1.0
        rig.add("a", prompt, 2)
        for _ in range(50):
            rig.loop.turn()
        assert rig.client.endings("a")
        assert look_up(rig, prompt) == 0
        mover.patience = 0.0
        rig.run()
        assert look_up(rig, prompt) == 12

    @pytest.mark.parametrize("late", [False, True])
    def test_two_requests_that_each_need_most_of_the_pool_run_one_after_the_other(self, late: bool) -> None:
        self.needs(REUSE)
        rig, rng = self.rig(late=late, num_pages=11, max_model_len=40), random.Random(1)
        heads = [[rng.randrange(13) for _ in range(16)] for _ in range(2)]
        for number, head in enumerate(heads):
            rig.add(f"first{number}", head, 2)
            rig.run()
        rig.loop.parts.kv.reset()
        requests = [rig.add(f"r{number}", [*head, *range(10)], 3) for number, head in enumerate(heads)]
        rig.run()
        for request in requests:
            assert rig.client.tokens(request.id) == expected(request)
            assert rig.client.last(request.id).cached_tokens == 16
        assert_clean(rig)

    # ------------------------------------------------------------------ on its way

    def filling(self, **settings: Any) -> tuple[Rig, LateWorker, Request]:
        """A rig in which request "b" has started and waits for the pages of its prompt, which do not come."""
        self.needs(REUSE)
        rig, prompt = self.rig(late=True, **settings), [*range(13), *range(7)]
        mover = rig.worker.transfer
        assert isinstance(mover, LateWorker), "late_worker() returns a LateWorker"
        rig.add("a", prompt, 2)
        rig.run()
        rig.loop.parts.kv.reset()
        mover.patience = 1.0
        request = rig.add("b", prompt, 4)
        while not rig.loop.transfers.filling:
            rig.loop.turn()
        return rig, mover, request

    def test_a_request_whose_pages_are_on_their_way_shares_nothing(self) -> None:
        """It is suspended, and another with its prompt comes: nothing of it may be found in the cache."""
        rig, mover, request = self.filling()
        self.suspend(rig, "b", after=0)
        for _ in range(20):
            rig.loop.turn()
        mover.patience = 0.0
        other = rig.add("c", request.prompt_token_ids, 4)
        rig.run()
        assert rig.client.tokens("b") == rig.client.tokens("c") == expected(other)
        assert_clean(rig)

    def test_pages_that_are_still_being_filled_go_to_nobody(self) -> None:
        """The request is aborted, and another needs the room."""
        rig, mover, _ = self.filling(num_pages=11, max_model_len=40)
        rig.loop.abort("b")
        other = rig.add("c", list(range(9, 0, -1)) * 2, 20)
        for _ in range(60):
            rig.loop.turn()
        assert not rig.client.endings("c"), "there was no room for it"
        mover.patience = 0.0
        rig.run()
        assert rig.client.tokens("c") == expected(other)
        assert_clean(rig)

    # ------------------------------------------------------------------ swap

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("windows", [{"full": None}, {"full": None, "window": 3}, {"window": 6}])
    def test_a_request_that_was_swapped_goes_on_where_it_was(self, windows: Any, late: bool) -> None:
        """Though it was suspended with a step in flight, whose length the host did not know."""
        rig = self.swapping(late, windows=windows, depth=2)
        request = rig.add("a", list(range(9)), 12)
        self.suspend(rig, "a", after=5)
        rig.run()
        assert rig.client.tokens("a") == expected(request)
        resumes = [resume.computed for message in rig.executor.messages for resume in message.resumes]
        suspended = [message for message in rig.executor.messages if message.suspensions]
        assert [mode for message in suspended for _, mode in message.suspensions] == [SuspendMode.SWAP]
        again = next(m for m in rig.executor.messages if m.rows and m.step_id > suspended[0].step_id)
        assert resumes[0] == 0 and resumes[1] >= 9 + 5
        assert [row.n_tokens for row in again.rows] == [1], "its tokens are computed again"
        assert_clean(rig)

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("turns", range(8))
    def test_an_abort_gives_everything_back_whatever_the_state(self, turns: int, late: bool) -> None:
        """So many turns after its suspension: suspending, swapped out, being filled, running again."""
        rig = self.swapping(late, depth=2)
        rig.add("a", list(range(9)), 12)
        self.suspend(rig, "a", after=3)
        for _ in range(turns):
            rig.loop.turn()
        rig.loop.abort("a")
        other = rig.add("b", list(range(9)), 3)
        rig.run()
        assert rig.client.endings("a") == ["abort"]
        assert rig.client.tokens("b") == expected(other)
        assert_clean(rig)

    def swapping(self, late: bool, **settings: Any) -> Rig:
        self.needs(SWAP)
        return self.rig(late=late, kv="paged", **settings)

    def suspend(self, rig: Rig, request_id: str, after: int) -> None:
        """Suspend a request once so many of its tokens have come."""
        scheduler = rig.loop.parts.scheduler
        assert isinstance(scheduler, OnDemand)
        while len(rig.client.tokens(request_id)) < after:
            rig.loop.turn()
        scheduler.victim = request_id
        while scheduler.victim is not None:
            rig.loop.turn()


def look_up(rig: Rig, tokens: list[int], key: CacheKey | None = None) -> int | Answer:
    """How many tokens a stranger would find elsewhere."""
    transfer = rig.loop.transfers.component
    assert transfer is not None
    request = Request("stranger", tokens, SamplingParams(), cache_key=key or CacheKey())
    return transfer.lookup(request, tokens, 0, len(tokens))
