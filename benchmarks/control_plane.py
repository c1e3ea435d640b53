"""What a step costs on the host, without a model: plan, message, verdict, commit, delivery.

    python benchmarks/control_plane.py [--only decode256] [--repeats 5] [--json FILE]

Scenarios: steady decode with 64 and 256 running, then 256 with 10,000 waiting, then 256 with a pool of 1,000,000 pages;
and admission of prompts of 512 and 8,192 tokens, new and seen before. Everything is switched on that a server has on:
prefix cache with sha256 keys, chunked scheduler, undo journal. Making up the model's answer is not timed; nor are HTTP,
tokenizing and detokenizing. Times are microseconds of this thread's processor: median of the steps, then median and
range over the repeats.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from hotswap.core.engine.clock import SystemClock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.parts import Parts
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.kvcache import CacheConstraints, CacheSpec
from hotswap.core.interfaces.messages import RowVerdict, StepMessage, Verdict
from hotswap.core.interfaces.parallel import Executor
from hotswap.core.live import ObserverHub
from hotswap.core.registry import Registry
from hotswap.core.request import Request, RequestOutput, SamplingParams

VOCABULARY = range(1000, 49000)  # beyond CPython's small-integer cache, as real ids mostly are
PAGE_SIZE = 16


class MadeUp(Executor):
    """Gives every request that reaches its last token a token; knows lengths and nothing else."""

    contract: ClassVar[str] = "executor/1"

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.rng, self.length, self.known = rng, dict[str, int](), dict[str, int]()
        self.message: StepMessage | None = None
        self.verdict: Verdict | None = None

    def launch(self, factory: Any, plan: Any, meeting: Any = None) -> Any:
        raise NotImplementedError

    def allocate(self, plan: Any) -> None: ...

    def submit(self, message: StepMessage) -> int:
        self.message = message
        return message.step_id

    def answer(self) -> None:
        """Not timed."""
        message = self.message
        assert message is not None
        for new in message.new:
            self.known[new.id] = len(new.tokens)
        self.length.update(message.resumes)
        rows = []
        for request, n_tokens, _ in message.rows:
            self.length[request] += n_tokens
            kept = [self.rng.choice(VOCABULARY)] if self.length[request] == self.known[request] else []
            self.known[request] += len(kept)
            rows.append(RowVerdict(request, kept, self.length[request]))
        self.verdict = Verdict(message.step_id, rows)

    def collect(self, ticket: int) -> Verdict:
        assert self.verdict is not None
        return self.verdict

    def done(self, ticket: int) -> bool:
        return True

    def health(self) -> str | None:
        return None

    def stop(self) -> None: ...


@dataclass
class Timer:
    total_ns: int = 0

    def __call__(self, function: Callable[[], Any]) -> Any:
        begun = time.thread_time_ns()
        result = function()
        self.total_ns += time.thread_time_ns() - begun
        return result


def ignore(output: RequestOutput) -> None:
    """What a client's sink costs belongs to the server."""


class Bench:
    def __init__(self, scheduler: str, kv: str, num_pages: int, max_batch_tokens: int, seed: int) -> None:
        registry = Registry()
        self.rng = random.Random(seed)
        self.executor = MadeUp(self.rng)
        manager = registry.build("kvcache", ComponentRef(use=kv), "kvcache")
        manager.configure([CacheSpec("full", (0,), 1, 64, 128)], 0, CacheConstraints(
            16_384, 256, page_size=PAGE_SIZE, num_pages=num_pages))
        parts = Parts(registry.build("scheduler", ComponentRef(use=scheduler), "scheduler"), manager, self.executor,
                      ObserverHub())
        self.loop = EngineLoop(parts, Limits(max_batch_tokens, 256, 16_384), SystemClock())
        self.count = 0

    def prompt(self, length: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=length)

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self.count += 1
        self.loop.add(Request(f"r{self.count}", prompt, SamplingParams(temperature=0, max_tokens=max_tokens)), ignore)

    def step(self) -> tuple[int, int]:
        """(plan, collect) nanoseconds."""
        plan, collect = Timer(), Timer()
        plan(self.loop.plan_and_submit)
        self.executor.answer()
        collect(self.loop.collect)
        return plan.total_ns, collect.total_ns


def steady(
    running: int, waiting: int = 0, num_pages: int = 100_000, kv: str = "prefix", seed: int = 1,
) -> dict[str, float]:
    bench = Bench("chunked", kv, num_pages, 2048, seed)
    for i in range(running):
        bench.add(bench.prompt(512 + i % PAGE_SIZE), 4096)
    while any(state.output_length == 0 for state in bench.loop.pool.states.values()):
        bench.step()
    bench.loop.lifecycle.limits = replace(bench.loop.limits, max_running=running)
    for _ in range(waiting):
        bench.add(bench.prompt(128), 64)
    for _ in range(48):
        bench.step()
    gc.collect()
    gc.freeze()
    steps = [bench.step() for _ in range(256)]
    gc.unfreeze()
    assert bench.loop.pool.waiting == waiting
    plan, collect = (statistics.median(part) / 1e3 for part in zip(*steps, strict=True))
    return {"plan_us": plan, "collect_us": collect, "step_us": statistics.median(sum(s) for s in steps) / 1e3}


def admission(length: int, batch: int, rounds: int, seed: int = 1) -> dict[str, float]:
    bench = Bench("chunked", "prefix", 100_000, batch * length, seed)
    prompts = [[bench.prompt(length) for _ in range(batch)] for _ in range(rounds)]
    result = {}
    for label in ("cold", "again"):
        costs = []
        for group in prompts:
            timer = Timer()
            for prompt in group:
                timer(lambda prompt=prompt: bench.add(prompt, 1))
            while bench.loop.pool.states:
                timer(bench.loop.plan_and_submit)
                bench.executor.answer()
                timer(bench.loop.collect)
            costs.append(timer.total_ns / batch / 1e3)
        result[f"{label}_us"] = statistics.median(costs)
    return result


SCENARIOS: dict[str, Callable[[], dict[str, float]]] = {
    "decode64": lambda: steady(64),
    "decode256": lambda: steady(256),
    "decode256_paged": lambda: steady(256, kv="paged"),
    "decode256_waiting10k": lambda: steady(256, waiting=10_000),
    "decode256_1Mpages": lambda: steady(256, num_pages=1_000_000),
    "admit512": lambda: admission(512, 64, 8),
    "admit8192": lambda: admission(8192, 8, 4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the scenarios whose name contains this")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [name for name in SCENARIOS if args.only in name]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    for _ in range(args.repeats):  # interleaved, so that a noisy minute does not fall on one scenario alone
        for name in chosen:
            samples[name].append(SCENARIOS[name]())
    for name, runs in samples.items():
        for metric in runs[0]:
            values = [run[metric] for run in runs]
            print(f"{name:22} {metric:12} {statistics.median(values):9.1f}  ({min(values):.1f} to {max(values):.1f})")
    if args.json:
        args.json.write_text(json.dumps(samples, indent=1))


if __name__ == "__main__":
    main()
