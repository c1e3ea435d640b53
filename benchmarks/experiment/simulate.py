"""Whole experiments on the fake engine: interleaved, watched by the monitor, stopped early, all metrics together.

What is real in them: the order of the arms, the metrics and their formulas, the statistics; the noise, where it was
recorded. What is not: the steps.
"""

import argparse
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from fake_engine import CONCURRENCY, Schedule, block, schedule
from noise import SYNTHETIC, Recording, Source, nominal

from hotswap.lab.interleave import ROUNDS, orders
from hotswap.lab.metrics import COMPARED, Slo, spec_of, values_of
from hotswap.lab.records import Comparison, Outcome, Pair
from hotswap.lab.statistics import Monitor, Settings

HERE = Path(__file__).parent
DATA = HERE / "data"
BETWEEN_BLOCKS_S = 0.05
SCHEDULES = 16
SLO = Slo({"ttft": 0.3, "tpot": 0.05})
METRICS = [spec_of(name) for name in COMPARED]


@dataclass(frozen=True)
class Run:
    """One experiment's end. ``minutes`` of the simulated machine; ``verdicts``: those that name a direction."""

    noise: str
    seed: int
    slowdown: float
    stopped: str
    minutes: float
    pairs: int
    verdicts: dict[str, str]
    comparisons: list[dict[str, Any]]


@cache
def recording(path: Path) -> Recording:
    return Recording(path)


def machine(name: str, path: Path) -> tuple[Source, Callable[[int, int], float]]:
    """Its noise, and what steps cost on it."""
    if name == "recorded":
        return recording(path).source, recording(path).cost
    return SYNTHETIC[name], nominal


@cache
def schedules(cost: Callable[[int, int], float], seconds: float) -> list[Schedule]:
    """Blocks of about so many seconds."""
    one = schedule(0, 16, cost)
    size = max(2 * CONCURRENCY, round(16 * seconds / one.costs.sum()))
    return [schedule(seed, size, cost) for seed in range(SCHEDULES)]


def experiment(
    seed: int, noise: str, slowdown: float, minutes: float, block_s: float, settings: Settings, path: Path,
) -> Run:
    random = np.random.default_rng([seed, round(1e6 * slowdown), *noise.encode()])
    source, cost = machine(noise, path)
    stream, plans = source(random), schedules(cost, block_s)
    monitor = Monitor(["arm"], METRICS, settings)
    elapsed, position, limit = 0.0, 0, 60 * minutes
    stopped: str | None = None
    for number, order in enumerate(orders(["base", "arm"], int(random.integers(2**31)))):
        found = {}
        for name in order:
            one = block(
                plans[number % SCHEDULES], stream, slowdown if name == "arm" else 0.0, name, number, position)
            found[name] = values_of(one, SLO, COMPARED)
            elapsed, position = elapsed + one.wall + BETWEEN_BLOCKS_S, position + 1
        monitor.add("arm", Pair(found["base"], found["arm"], order[0] == "base"))
        if (pairs := number + 1) % ROUNDS == 0:
            share = 1.0 if elapsed * (1 + ROUNDS / pairs) > limit else elapsed / limit
            if (stopped := monitor.enough(share)) is not None:
                break
    comparisons = monitor.finish(share)
    named = {found.metric: found.outcome.value for found in comparisons
             if found.outcome in (Outcome.BETTER, Outcome.WORSE)}
    return Run(noise, seed, slowdown, str(stopped), round(elapsed / 60, 3), pairs, named,
               [_kept(found) for found in comparisons if found.n_pairs])


def _kept(found: Comparison) -> dict[str, Any]:
    values = asdict(found)
    return {name: values[name] for name in ("metric", "effect", "low", "high", "p", "outcome")}


def run_all(noises: Sequence[str], count: int, slowdown: float, arguments: argparse.Namespace) -> Iterator[Run]:
    settings = Settings.model_validate_json(arguments.settings)
    with ProcessPoolExecutor(arguments.processes) as pool:
        for name in noises:
            one = partial(
                experiment, noise=name, slowdown=slowdown, minutes=arguments.minutes, block_s=arguments.block_s,
                settings=settings, path=arguments.recording)
            seeds = range(arguments.seed, arguments.seed + count)
            for index, run in enumerate(pool.map(one, seeds, chunksize=4), 1):
                print(f"\r{name}: {index} of {count}", end="", flush=True)
                yield run
            print()


def arguments_of(description: str, experiments: int, out: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--recording", type=Path, default=DATA / "noise.json.gz", help="of record_noise.py")
    parser.add_argument("--experiments", type=int, default=experiments)
    parser.add_argument("--noise", default=",".join(["recorded", *SYNTHETIC]), help="which, with commas between")
    parser.add_argument("--minutes", type=float, default=10.0, help="planned length of an experiment")
    parser.add_argument("--block-s", type=float, default=1.0, help="length of a block")
    parser.add_argument("--settings", default="{}", help="of the statistics, as JSON")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=DATA / out, help="raw results, packed")
    return parser


def write(runs: Sequence[Run], arguments: argparse.Namespace) -> None:
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    told = {key: str(value).replace(f"{HERE}/", "") for key, value in vars(arguments).items()}
    values = json.dumps({"arguments": told, "runs": [asdict(run) for run in runs]}, default=str)
    values = values.replace("-Infinity", '"-inf"').replace("Infinity", '"inf"').replace("NaN", '"nan"')
    arguments.out.write_bytes(gzip.compress(values.encode(), mtime=0))


def spread(numbers: Sequence[float]) -> str:
    low, middle, high = np.percentile(numbers, [10, 50, 90])
    return f"{middle:.1f} ({low:.1f} … {high:.1f})"


def most_named(runs: Sequence[Run], count: int = 4) -> str:
    names = Counter(name for run in runs for name in run.verdicts)
    return ", ".join(f"{name} {times}" for name, times in islice(names.most_common(), count)) or "–"
