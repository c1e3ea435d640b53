"""Real experiments on the real engine through ``hotswap ab``: equal arms, and a slowdown that is planted.

    python benchmarks/experiment/real_runs.py null --runs 20 [--minutes 4]
    python benchmarks/experiment/real_runs.py power --runs 5 [--minutes 10] [--slowdown 0.03]

To be run alone on the machine. Each run is a process of its own and keeps its result, with all samples, in
``data/real-null/01`` and so on; runs that are there already are not run again. The table is made of all of them;
``python -m benchmarks.tables`` writes it into docs/statistics.md. The slowdown is the plugin in ``slowdown/``; it need
not be installed, since the runs find it through a folder of their own.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from hotswap.core.testing.installed import write_metadata
from hotswap.lab.processes import BUSY_CORES
from hotswap.lab.records import Outcome, Result

HERE = Path(__file__).parent
DATA = HERE / "data"
ROOT = HERE.parents[1]
if not __package__:  # run as a script
    sys.path.insert(0, str(ROOT))
from benchmarks.packed import pack, read_packed  # noqa: E402

PLUGIN = HERE / "slowdown"
WORKLOAD = {"use": "synthetic", "prompt": 64, "output": 16}
PACKED = "result.json.gz"


def experiment(arm: dict[str, object], minutes: float, seed: int, folder: Path) -> dict[str, object]:
    return {
        "base": os.path.relpath(ROOT / "examples" / "quickstart.yaml", folder), "arms": {"arm": arm},
        "workload": WORKLOAD, "load": {"concurrency": 4}, "sampling": {"temperature": 0.0, "ignore_eos": True},
        "slo": {"ttft": "300ms", "tpot": "50ms"}, "minutes": minutes, "seed": seed}


@contextmanager
def installed() -> Iterator[str]:
    """A folder in which the plugin is as if it were installed."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(PLUGIN / "hotswap_slowdown.py", folder)
        write_metadata(PLUGIN, Path(folder))
        yield folder


@dataclass(frozen=True)
class Run:
    folder: Path
    result: Result

    @property
    def verdicts(self) -> dict[str, str]:
        return {found.metric: found.outcome.value for found in self.result.comparisons
                if found.outcome in (Outcome.BETTER, Outcome.WORSE)}

    @property
    def minutes(self) -> float:
        return sum(block.wall for block in self.result.blocks) / 60


def run(kind: str, number: int, arm: dict[str, object], minutes: float, out: Path) -> Run:
    folder = out / f"real-{kind}" / f"{number:02}"
    if not (folder / PACKED).exists():
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "experiment.yaml"
        file.write_text(yaml.safe_dump(experiment(arm, minutes, number, folder)))
        with installed() as plugin:
            paths = [plugin, str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
            subprocess.run(
                [sys.executable, "-m", "hotswap", "ab", str(file), "--out", str(folder)], check=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))})
        plain = folder / "result.json"
        pack(plain, folder / PACKED, [ROOT])
        for other in (plain, folder / "records.jsonl", folder / "report.html"):  # of the same samples
            other.unlink()
    return Run(folder, read_packed(folder / PACKED))


def kept(kind: str, out: Path = DATA) -> list[Run]:
    """The runs that there are, by number."""
    return [Run(file.parent, read_packed(file)) for file in sorted((out / f"real-{kind}").glob(f"*/{PACKED}"))]


def table(runs: Sequence[Run]) -> str:
    """In Markdown, a line for each run; below it, how many of them named a direction."""
    lines = ["| run | minutes | pairs | ended | better or worse | step_time | disturbed blocks |",
             "|---|---:|---:|---|---|---|---:|"]
    for one in runs:
        steps = next(found for found in one.result.comparisons if found.metric == "step_time")
        busy = sum((block.disturbed or 0) > BUSY_CORES for block in one.result.blocks)
        ended = f"partial: {one.result.stopped}" if one.result.partial else one.result.stopped
        named = ", ".join(f"{metric} {word}" for metric, word in one.verdicts.items()) or "–"
        lines.append(
            f"| {one.folder.name} | {one.minutes:.1f} | {steps.n_pairs} | {ended} | {named} | "
            f"{steps.effect:+.2%} [{steps.low:+.2%}, {steps.high:+.2%}] | {busy} of {len(one.result.blocks)} |")
    found = sum(bool(one.verdicts) for one in runs)
    worse = sum("worse" in one.verdicts.values() for one in runs)
    return "\n".join([*lines, "", f"{found} of {len(runs)} runs with any better or worse, {worse} with any worse."])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n\n")[0])
    parser.add_argument("kind", choices=["null", "power"])
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--slowdown", type=float, default=0.03)
    parser.add_argument("--out", type=Path, default=DATA)
    arguments = parser.parse_args()
    slowed = {"attention": {"use": "slowed", "inner": "torch", "share": arguments.slowdown}}
    arm: dict[str, object] = slowed if arguments.kind == "power" else {}
    runs = [run(arguments.kind, number, arm, arguments.minutes, arguments.out)
            for number in range(1, arguments.runs + 1)]
    print(f"\n{table(runs)}")


if __name__ == "__main__":
    main()
