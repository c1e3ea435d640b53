"""Records this machine's noise: the same engine serves short blocks of the same kind of requests, for a long time.

    python benchmarks/experiment/record_noise.py [--minutes 12] [--out benchmarks/experiment/data/noise.json.gz]

To be run on a quiet machine, as experiments are. What `null.py` and `power.py` resample is, for each step, how long it
took (seconds in the worker), beside how many rows and tokens it had; latencies of the requests are kept to compare the
fake engine with. The load is that of ``hotswap ab BASE --arm …``: four requests in flight, 64 tokens in, 16 out.
"""

import argparse
import contextlib
import gzip
import json
import statistics
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hotswap.core.config import load_config
from hotswap.core.engine.build import build_engine
from hotswap.core.engine.clock import SystemClock
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.workload import WorkItem
from hotswap.core.registry import Registry
from hotswap.lab.environment import environment
from hotswap.lab.load import ClosedLoop, run_load
from hotswap.lab.processes import Neighbours
from hotswap.lab.requests import context_of, endless
from hotswap.lab.targets.engine import EngineTarget

HERE = Path(__file__).parent
CONFIG = HERE.parents[1] / "examples" / "quickstart.yaml"
WORKLOAD = {"use": "synthetic", "prompt": 64, "output": 16}
SAMPLING = {"temperature": 0.0, "ignore_eos": True}
CONCURRENCY = 4
BLOCK_S = 1.0


class Steps(Observer):
    """[time, rows, tokens, seconds in the worker] of each step since the last `take`."""

    def __init__(self) -> None:
        super().__init__()
        self._tokens: dict[int, int] = {}
        self._steps: list[list[float]] = []

    @hookimpl
    def hotswap_step_planned(self, message: StepMessage) -> None:
        self._tokens[message.step_id] = sum(row.n_tokens for row in message.rows)

    @hookimpl
    def hotswap_step_finished(self, verdict: Verdict, time: float) -> None:
        tokens = self._tokens.pop(verdict.step_id, 0)
        self._steps.append([time, len(verdict.rows), tokens, round(sum(verdict.durations.values()), 7)])

    def take(self) -> list[list[float]]:
        steps, self._steps = self._steps, []
        return steps


def blocks(minutes: float) -> Iterator[dict[str, Any]]:
    config = load_config(CONFIG, ["kvcache.memory=256MiB"])
    registry, clock = Registry(), SystemClock()
    context, _ = context_of(0, [config], [], True)
    items: Iterator[tuple[int, WorkItem]] = enumerate(
        endless(registry.build("workload", ComponentRef(**WORKLOAD), "workload"), context))
    built = build_engine(config)
    try:
        target, steps = EngineTarget(built, SAMPLING, clock.now), Steps()
        built.engines[0].engine.call(lambda: built.engines[0].components.add(steps))
        warm_up = run_load(target, list(islice(items, 24)), ClosedLoop(CONCURRENCY), clock.now, name="warm-up")
        size = max(2 * CONCURRENCY, round(BLOCK_S * 24 / warm_up.wall))
        begin, number = clock.now(), 0
        while (at := clock.now() - begin) < 60 * minutes:
            target.reset()
            steps.take()
            neighbours = Neighbours(clock.now)
            stretch = run_load(
                target, list(islice(items, size)), ClosedLoop(CONCURRENCY), clock.now, name=f"block {number}")
            yield {
                "at": round(at, 4), "wall": stretch.wall, "disturbed": neighbours.cores(),
                "requests": [[r.sent, r.chunks[0][0], r.ended, r.prompt_tokens, r.output_tokens]
                             for r in stretch.records if r.error is None and r.chunks],
                "steps": [[round(time - begin, 5), *rest] for time, *rest in steps.take()],
            }
            number += 1
            print(f"\r{at / 60:5.1f} of {minutes:g} minutes, {number} blocks", end="", flush=True)
    finally:
        print()
        built.engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=12.0)
    parser.add_argument("--out", type=Path, default=HERE / "data" / "noise.json.gz")
    arguments = parser.parse_args()
    measured: list[dict[str, Any]] = []
    with contextlib.suppress(KeyboardInterrupt):  # what there is until then is kept
        for block in blocks(arguments.minutes):
            measured.append(block)
    recorded = {
        "environment": environment(), "config": str(CONFIG.name), "workload": WORKLOAD, "concurrency": CONCURRENCY,
        "blocks": measured}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(arguments.out, "wt", encoding="utf-8") as file:
        json.dump(recorded, file, separators=(",", ":"))
    share = statistics.median([block["disturbed"] or 0.0 for block in measured] or [0.0])
    print(f"{arguments.out}: {len(measured)} blocks, median of cores used by others {share:.2f}")


if __name__ == "__main__":
    main()
