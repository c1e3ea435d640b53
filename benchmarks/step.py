"""Where the time of a step outside the model goes, by stage.

    python benchmarks/step.py [--rows 64] [--temperature 0.8 --top-p 0.95] [--attention cpu]

The loop, its parts and a worker as in ``control_plane.py``, whose model computes nothing. Microseconds of one thread's
processor time, medians of the steps, each stage without those inside it. Two columns: one step right after the other,
so that code and data of all stages lie in the processor's caches; and behind a model that reads 256 MiB in each step,
as real ones read their weights, so that they do not. What the model itself takes is left out.

"dispatch" is what calls through interfaces cost in such a step, counted and priced as by ``dispatch.py``: those of the
stages, and those of a model of 30 layers.
"""

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from control_plane import Bench, NoModel, Worked, tokenizer
from dispatch import PER_STEP_IN_WORKER, call_ns, calls_on_the_host

from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry

WEIGHTS = 256 << 20
"""Bytes that a model reads in a step: about those of 135 million parameters in bfloat16."""
PAGES = 8_192
PROMPT = 200
MODEL = "model"
STAGES = {
    "loop: context, message": lambda bench: (bench.loop, "plan_and_submit"),
    "scheduler: plan, with room for each row": lambda bench: (bench.loop.parts.scheduler, "plan"),
    "worker: verdict, what is between its stages": lambda bench: (bench.executor, "answer"),
    "worker: page tables": lambda bench: (runner(bench), "_change_tables"),
    "worker: rows looked up": lambda bench: (runner(bench), "_gather"),
    "worker: layout, inputs": lambda bench: (runner(bench), "_lay_out"),
    "worker: the attention backend's plan": lambda bench: (runner(bench)._cache, "plan"),
    "worker: tokens chosen": lambda bench: (runner(bench)._chooser, "choose"),
    "worker: tokens kept": lambda bench: (runner(bench)._table, "append"),
    MODEL: lambda bench: (bench.executor.model, "forward"),
    f"{MODEL}'s head": lambda bench: (bench.executor.model, "head"),
    "loop: commit, outputs": lambda bench: (bench.loop, "collect"),
}
"""By name: whose method it is. Text is told apart by a bench that makes none."""


def runner(bench: Any) -> Any:
    return bench.executor.worker._runner


class Reading(NoModel):
    """Reads its weights, and writes its logits anew."""

    weights = torch.zeros(0)

    def forward(self, inputs: torch.Tensor, positions: Any, attend: Any, taps: Any = None) -> torch.Tensor:
        self.weights.sum()
        return super().forward(inputs, positions, attend, taps)

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return super().head(rows).clone()


class Stopwatch:
    """Nanoseconds by stage, since it was last read."""

    def __init__(self, bench: Bench) -> None:
        self._spent: dict[str, int] = defaultdict(int)
        self._inside = [0]
        for stage, find in STAGES.items():
            owner, method = find(bench)
            setattr(owner, method, self._timed(stage, getattr(owner, method)))

    def read(self) -> dict[str, int]:
        spent, self._spent = self._spent, defaultdict(int)
        return spent

    def _timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0)
            begun = time.thread_time_ns()
            try:
                return call(*args, **kwargs)
            finally:
                took = time.thread_time_ns() - begun
                self._spent[stage] += took - self._inside.pop()
                self._inside[-1] += took
        return timed


def benches(rows: int, sampling: dict[str, float], attention: str | None) -> list[Bench]:
    """One with text, one without, each with so many decodes."""
    made = []
    for text in (tokenizer(), None):
        registry = Registry()
        backend: AttentionBackend | None = None
        if attention is not None:
            backend = registry.build("attention", ComponentRef(use=attention), "attention")
        bench = Bench("chunked", "prefix", PAGES, 2048, 1, executor=Worked(registry, Reading(), backend),
                      sampling=sampling, tokenizer=text)
        bench.begin(rows, PROMPT)
        made.append(bench)
    return made


def stages(made: list[Bench], watches: list[Stopwatch], steps: int) -> dict[str, float]:
    """Microseconds by stage: medians of ``steps`` steps of each bench. Also of the whole step."""
    seen: list[list[dict[str, int]]] = []
    for bench, watch in zip(made, watches, strict=True):
        seen.append([])
        for _ in range(steps):
            bench.step()
            seen[-1].append(watch.read())
    texts, plain = seen
    found = {stage: statistics.median(step[stage] for step in texts) / 1e3 for stage in STAGES}
    commit = "loop: commit, outputs"
    without = statistics.median(step[commit] for step in plain) / 1e3
    found |= {commit: without, "text": found[commit] - without}
    found = {stage: us for stage, us in found.items() if not stage.startswith(MODEL)}
    whole = statistics.median(
        sum(ns for stage, ns in step.items() if not stage.startswith(MODEL)) for step in texts) / 1e3
    return found | {"**a step**": whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--attention", help="the backend that plans each step; none where it is not given")
    parser.add_argument("--steps", type=int, default=128)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    made = benches(asked.rows, {"temperature": asked.temperature, "top_p": asked.top_p}, asked.attention)
    calls = sum(calls_on_the_host(made[1]).values()) + sum(PER_STEP_IN_WORKER.values())
    dispatch = calls * call_ns() / 1e3
    watches = [Stopwatch(bench) for bench in made]
    gc.collect()
    gc.freeze()
    near = stages(made, watches, asked.steps)
    Reading.weights = torch.ones(WEIGHTS // 4)
    far = stages(made, watches, asked.steps)
    print("| µs a step | step after step | behind a model |\n| --- | --- | --- |")
    for stage, us in near.items():
        print(f"| {stage} | {us:.0f} | {far[stage]:.0f} |")
    print(f"\ndispatch, {calls:.0f} calls: {dispatch:.0f} µs")


if __name__ == "__main__":
    main()
