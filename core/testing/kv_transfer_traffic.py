"""Traffic over an engine with a restless scheduler and a KV transfer that is late: what the transfers' kits drive."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotswap.core.engine.pool import RequestState
from hotswap.core.interfaces.kv_transfer import KVTransfer, TransferWorker
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.interfaces.scheduler import PlanContext, Scheduler, StepPlan, SuspendMode
from hotswap.core.request import Request
from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig, random_prompt
from hotswap.core.testing.wrapping import Wrapped


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
