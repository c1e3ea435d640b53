"""Builds engine loops on the fake device, and runs traffic through them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

from hotswap.core.engine.clock import ManualClock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.parts import Parts
from hotswap.core.engine.setup import CacheRoom, EngineSetup, references
from hotswap.core.engine.transfers import Transfers
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.kv_transfer import KVTransfer, TransferLayout, TransferWorker
from hotswap.core.interfaces.kvcache import CacheConstraints, KVCacheManager
from hotswap.core.interfaces.parallel import RankPlan, WorkerFactory
from hotswap.core.interfaces.scheduler import Scheduler
from hotswap.core.live import ObserverHub
from hotswap.core.registry import Registry
from hotswap.core.request import Request, RequestOutput, SamplingParams
from hotswap.core.testing.fakes import FakeWorker, LateExecutor, continuation
from hotswap.core.testing.watched import Watched

REGISTRY = Registry()


def build(kind: str, use: str, **options: Any) -> Any:
    return REGISTRY.build(kind, ComponentRef(use=use, **options), kind)


@dataclass
class Client:
    """Collects what the loop delivers."""

    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)

    def sink(self, output: RequestOutput) -> None:
        self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.token_ids]

    def endings(self, request_id: str) -> list[str]:
        return [output.finish_reason.value for output in self.outputs.get(request_id, []) if output.finish_reason]

    def last(self, request_id: str) -> RequestOutput:
        return self.outputs[request_id][-1]


@dataclass
class Rig:
    loop: EngineLoop
    worker: FakeWorker
    executor: LateExecutor
    clock: ManualClock
    client: Client
    setup: EngineSetup

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, **fields.pop("sampling", {}))
        request = Request(request_id, prompt, sampling, **fields)
        self.loop.add(request, self.client.sink)
        return request

    def start_observers(self, config: dict[str, Any] | None = None, replica: str = "") -> None:
        """Tell them that the engine is complete, as an assembly does."""
        self.loop.parts.observers.notify(
            "hotswap_engine_started", versions={"hotswap": "test"}, config=config or {}, replica=replica,
            setup=self.setup, time=self.clock.now())

    def run(self, most: int = 5000) -> int:
        """Until nothing is left to do; returns the number of turns."""
        for turn in range(most):
            if not self.loop.turn() and not self.loop.in_flight and not self.loop.pool.states:
                return turn
            self.clock.advance(0.001)
        raise AssertionError(f"no end after {most} turns: {self.loop.pool.snapshot()}")


def make_rig(
    scheduler: Scheduler | str = "chunked", kv: KVCacheManager | str = "prefix", *, windows: Any = None,
    num_pages: int = 64, page_size: int = 4, max_model_len: int = 128, max_batch_tokens: int = 64, max_running: int = 8,
    depth: int = 1, chained: bool = True, lookahead: int = 0, reuse_tail: int = 0, skill: float = 0.6, seed: int = 0,
    observers: ObserverHub | None = None, wrap_worker: Callable[[FakeWorker], FakeWorker] = lambda worker: worker,
    transfer: KVTransfer | None = None,
    wrap_transfer: Callable[[TransferWorker], TransferWorker] = lambda worker: worker, wait_s: float = 0.0,
) -> Rig:
    """``transfer`` moves the fake's slots; ``wrap_transfer`` stands between it and its worker half, which may wait for
    ``wait_s`` in a step without rows."""
    scheduler = build("scheduler", scheduler) if isinstance(scheduler, str) else scheduler
    kv = build("kvcache", kv) if isinstance(kv, str) else kv
    mover = wrap_transfer(transfer.worker()) if transfer is not None else None
    worker = wrap_worker(FakeWorker(
        windows, lookahead=lookahead, skill=skill, max_model_len=max_model_len, seed=seed, transfer=mover,
        wait_s=wait_s))
    executor, clock = LateExecutor(seed), ManualClock()
    info = executor.launch(cast(WorkerFactory, lambda plan, rank: worker), RankPlan())
    constraints = CacheConstraints(max_model_len, max_running, page_size=page_size, num_pages=num_pages)
    plan = kv.configure(info.cache_specs, 0, constraints)
    known = references([scheduler, kv, transfer])
    if transfer is not None:
        transfer = Watched(transfer, executor)
        plan = replace(plan, transfer=transfer.configure(TransferLayout(info.cache_specs, plan, 1, clock.now)))
    executor.allocate(plan)
    limits = Limits(max_batch_tokens, max_running, max_model_len, lookahead, reuse_tail)
    setup = EngineSetup(
        known, limits, depth, chained, 1, CacheRoom(tuple(info.cache_specs), 0, constraints), plan.groups)
    loop = EngineLoop(Parts(scheduler, kv, executor, observers or ObserverHub()), limits, clock, depth, chained,
        Transfers(transfer))
    return Rig(loop, worker, executor, clock, Client(), setup)


def assert_clean(rig: Rig) -> None:
    """Nothing is held, nothing waits for a fence, the worker knows no request."""
    rig.loop.parts.kv.check()
    usage = rig.loop.parts.kv.usage()
    assert (usage.held, usage.fenced) == (0, 0), usage
    assert usage.free + usage.cached == usage.total
    assert not rig.worker.sequences
    assert not rig.loop.pool.states
    assert not rig.loop.pool.running
    transfer = rig.loop.transfers.component
    if transfer is not None:
        transfer.check()
        assert not transfer.pending
        assert not transfer.leaks()
        if isinstance(transfer, Watched):
            assert not transfer.errors, transfer.errors[0]


def expected(request: Request) -> list[int]:
    stop = frozenset(request.sampling.stop_token_ids) | request.eos_token_ids
    return continuation(request.prompt_token_ids, request.sampling.max_tokens or 0, request.seed, stop)


def finish(rig: Rig, requests: Iterable[Request]) -> None:
    """Run to the end: every plan was good, everybody got what an undisturbed engine gives, nothing is held."""
    rig.run()
    assert rig.loop.last_plan_error is None
    for request in requests:
        assert rig.client.tokens(request.id) == expected(request), request.id
    assert_clean(rig)


def random_prompt(rng: random.Random, longest: int, shared: list[int]) -> list[int]:
    own = [rng.randrange(13) for _ in range(rng.randrange(1, longest))]
    return (shared + own) if rng.random() < 0.6 else own
