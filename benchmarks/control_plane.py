"""What a step costs outside the model: plan, message, layout, sampling, verdict, commit, text, delivery.

    python benchmarks/control_plane.py [--only decode256] [--repeats 5] [--json FILE]

Scenarios: steady decode with 64 and 256 running, then 256 with 10,000 waiting, then 256 with a pool of 1,000,000 pages;
and admission of prompts of 512 and 8,192 tokens, new and seen before. Everything is switched on that a server has on:
prefix cache with sha256 keys, chunked scheduler, undo journal. Making up the model's answer is not timed; nor are HTTP,
tokenizing and detokenizing. Times are microseconds of this thread's processor: median of the steps, then median and
range over the repeats.

``step64`` is a whole step of 64 greedy decodes: the loop, a real worker with a model and an attention backend that
compute nothing and give 49,152 logits a row in bfloat16, and text, where the tokenizer of smollm2-135m-instruct is
installed. ``worker_us`` is wall time, since torch may use several threads. ``sampled64`` has a temperature and top-p.
``step.py`` divides such a step into its stages.
"""

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from sampling import logits_like_a_model_s

from hotswap.core.engine.clock import SystemClock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.parts import Parts
from hotswap.core.errors import ConfigError
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.worker import ModelWorker
from hotswap.core.interfaces.attention import AttentionBackend, AttentionSupport, BatchLimits, GroupShape
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan, CacheSpec
from hotswap.core.interfaces.messages import RowVerdict, StepMessage, Verdict
from hotswap.core.interfaces.model import Model, ModelFacts
from hotswap.core.interfaces.parallel import Executor
from hotswap.core.live import ObserverHub
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.registry import Registry
from hotswap.core.request import Request, RequestOutput, SamplingParams
from hotswap.server.text.detokenizer import StreamDetokenizer

VOCABULARY = range(1000, 49000)  # beyond CPython's small-integer cache, as real ids mostly are
PAGE_SIZE = 16
VOCAB_SIZE = 49_152


class NoModel(Model):
    """Knows what it will say, at once."""

    @classmethod
    def facts(cls, config: dict[str, Any]) -> ModelFacts:
        return ModelFacts("NoModel", 1, 1, VOCAB_SIZE, 16_384)

    def build(self, config: Any, mesh: Any, dtype: Any, device: str) -> None:
        self.hidden = torch.zeros(4096, 1, dtype=dtype)
        self.logits = logits_like_a_model_s(64, VOCAB_SIZE).to(dtype)

    def load(self, weights: Any) -> None: ...

    def cache_specs(self) -> list[CacheSpec]:
        return [CacheSpec("full", (0,), 1, 64, 128)]

    def attention_shapes(self, page_sizes: dict[str, int]) -> dict[str, GroupShape]:
        return {"full": GroupShape(1, 1, 64, page_sizes.get("full", 0), 0.125)}

    def forward(self, inputs: torch.Tensor, positions: Any, attend: Any, taps: Any = None) -> torch.Tensor:
        return self.hidden[: len(inputs)]

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(rows)]


class NoAttention(AttentionBackend):
    def support(self) -> AttentionSupport:
        return AttentionSupport()

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(1), torch.zeros(1)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> None: ...

    def plan(self, state: Any, layout: Any) -> None: ...

    def run(self, state: Any, q: Any, k: Any, v: Any, cache: Any, out: Any) -> None: ...


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


class Worked(MadeUp):
    """Has a worker answer, when it is asked to."""

    def __init__(
        self, registry: Registry, model: NoModel | None = None, attention: AttentionBackend | None = None,
    ) -> None:
        super().__init__(random.Random(0))
        self.model = model = model or NoModel()
        processors = "penalties", "bias", "bad_words", "min_tokens"
        model.build({}, None, torch.bfloat16, "cpu")
        self.worker = ModelWorker(
            model, model.facts({}), attention or NoAttention(),
            registry.build("speculator", ComponentRef(use="none"), "speculator"),
            [registry.build("logits_processor", ComponentRef(use=use), "") for use in processors],
            WorkerSettings("bfloat16", "cpu", 16_384, 2048, 256), SystemClock().now)

    def allocate(self, plan: CachePlan) -> None:
        self.worker.allocate(plan)

    def answer(self) -> None:
        assert self.message is not None
        self.verdict = self.worker.execute(self.message)


@dataclass
class Timer:
    clock: Callable[[], int] = time.thread_time_ns
    total_ns: int = 0

    def __call__(self, function: Callable[[], Any]) -> Any:
        begun = self.clock()
        result = function()
        self.total_ns += self.clock() - begun
        return result


def ignore(output: RequestOutput) -> None:
    """What a client's sink costs belongs to the server."""


class Bench:
    def __init__(
        self, scheduler: str, kv: str, num_pages: int, max_batch_tokens: int, seed: int, *,
        executor: MadeUp | None = None, sampling: dict[str, float] | None = None, tokenizer: Tokenizer | None = None,
    ) -> None:
        registry = Registry()
        self.rng, self.sampling, self.tokenizer = random.Random(seed), sampling or {"temperature": 0}, tokenizer
        self.executor = executor or MadeUp(self.rng)
        manager = registry.build("kvcache", ComponentRef(use=kv), "kvcache")
        self.executor.allocate(manager.configure([CacheSpec("full", (0,), 1, 64, 128)], 0, CacheConstraints(
            16_384, 256, page_size=PAGE_SIZE, num_pages=num_pages)))
        parts = Parts(registry.build("scheduler", ComponentRef(use=scheduler), "scheduler"), manager, self.executor,
                      ObserverHub())
        self.loop = EngineLoop(parts, Limits(max_batch_tokens, 256, 16_384), SystemClock())
        self.count = 0

    def prompt(self, length: int) -> list[int]:
        return self.rng.choices(VOCABULARY, k=length)

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self.count += 1
        text = StreamDetokenizer(self.tokenizer) if self.tokenizer is not None else None
        self.loop.add(Request(
            f"r{self.count}", prompt, SamplingParams(**self.sampling, max_tokens=max_tokens, seed=self.count),
            detokenizer=text), ignore)

    def begin(self, running: int, length: int = 512) -> None:
        """Until so many decode, their places in a page being spread over it."""
        for i in range(running):
            self.add(self.prompt(length + i % PAGE_SIZE), 4096)
        while any(state.output_length == 0 for state in self.loop.pool.states.values()):
            self.step()

    def step(self) -> tuple[int, int, int]:
        """(plan, worker, collect) nanoseconds."""
        plan, worker, collect = Timer(), Timer(time.perf_counter_ns), Timer()
        plan(self.loop.plan_and_submit)
        worker(self.executor.answer)
        collect(self.loop.collect)
        return plan.total_ns, worker.total_ns, collect.total_ns


def steady(
    running: int, waiting: int = 0, num_pages: int = 100_000, kv: str = "prefix", seed: int = 1,
) -> dict[str, float]:
    result = decoding(Bench("chunked", kv, num_pages, 2048, seed), running, waiting)
    result.pop("worker_us")
    return result | {"step_us": sum(result.values())}


def whole(running: int, sampling: dict[str, float]) -> dict[str, float]:
    bench = Bench(
        "chunked", "prefix", 100_000, 2048, 1, executor=Worked(Registry()), sampling=sampling, tokenizer=tokenizer())
    result = decoding(bench, running)
    return result | {"step_us": sum(result.values())}


@cache
def tokenizer() -> Tokenizer | None:
    try:
        return open_checkpoint("smollm2-135m-instruct", progress=False).tokenizer()
    except ConfigError:
        return None


def decoding(bench: Bench, running: int, waiting: int = 0) -> dict[str, float]:
    """Medians of the parts of a step with ``running`` decodes."""
    bench.begin(running)
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
    parts = (statistics.median(part) / 1e3 for part in zip(*steps, strict=True))
    return dict(zip(("plan_us", "worker_us", "collect_us"), parts, strict=True))


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
    "step64": lambda: whole(64, {"temperature": 0}),
    "sampled64": lambda: whole(64, {"temperature": 0.8, "top_p": 0.95}),
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
