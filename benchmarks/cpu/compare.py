"""Two commits of hotswap on the same loads, in turns: what has become faster, and by how much.

Each commit is checked out into a folder of its own. Its modules are taken from there, and so are its components: beside
it lies what an installation of that commit would tell of its entry points.
"""

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isnan
from pathlib import Path

from benchmarks.cpu.figures import FIGURES, HEADLINES, Run
from benchmarks.cpu.peers import ROOT, Engine, environment
from benchmarks.cpu.table import NOTHING
from hotswap.core.errors import ConfigError
from hotswap.core.testing.installed import write_metadata
from hotswap.lab.records import Comparison, MetricSpec, Pair
from hotswap.lab.statistics import Settings, analyse
from hotswap.lab.statistics.signed_rank import QUAD

HERE, HERE_NAME = ".", "this tree"
"""In place of a commit: the tree as it lies there, changes included; and how it is called."""


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """``commit`` in ``folder``, for as long as this lasts. ConfigError where there is no such commit."""
    if commit == HERE:
        yield ROOT
        return
    made = _git("worktree", "add", "--detach", str(folder), commit)
    if made.returncode:
        raise ConfigError(f"{commit!r} cannot be checked out: {made.stderr.strip().splitlines()[-1]}", "compare")
    try:
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def arm(ours: Engine, name: str, tree: Path, metadata: Path) -> Engine:
    """``ours``, of the commit in ``tree``."""
    write_metadata(tree, metadata)
    return replace(ours, name=name, env=environment(tree, metadata))


def compared(runs: Sequence[Run], base: str, changed: str) -> dict[str, Comparison]:
    """Per load, its headline figure: effect, simultaneous interval over all loads, and verdict."""
    specs = {}
    for load, name in HEADLINES.items():
        if any(run.load == load for run in runs):
            specs[load] = MetricSpec(f"{load} {name}", "", FIGURES[name].better, FIGURES[name].title)
    pairs = _pairs(runs, base, changed, list(specs))
    if not pairs:
        return {}
    found = analyse({changed: pairs}, list(specs.values()), Settings())
    by_name = {comparison.metric: comparison for comparison in found}
    return {load: by_name[spec.name] for load, spec in specs.items()}


def _pairs(runs: Sequence[Run], base: str, changed: str, loads: Sequence[str]) -> list[Pair]:
    """Rounds by twos, in which the order of the two was turned round. A run that does not count is absent."""
    order = {number: [run.engine for run in runs if run.round == number] for number in {run.round for run in runs}}
    pairs = []
    for number in sorted(order):
        values: Mapping[str, dict[str, float]] = {base: {}, changed: {}}
        for run in runs:
            if run.round == number and run.counts and run.load in loads:
                values[run.engine][f"{run.load} {HEADLINES[run.load]}"] = run.figures[HEADLINES[run.load]]
        pairs.append(Pair(values[base], values[changed], bool(order[number]) and order[number][0] == base))
    return pairs[: len(pairs) // QUAD * QUAD]


def verdicts(found: Mapping[str, Comparison], base: str, changed: str) -> str:
    """One line a load."""
    lines = [f"### {changed} against {base}", "", "| load | figure | base | changed | effect (95 %) | verdict |",
             "|---|---|---|---|---|---|"]
    for load, one in found.items():
        values = [NOTHING] * 3
        if not isnan(one.effect):
            values = [f"{one.base_value:.4g}", f"{one.arm_value:.4g}",
                      f"{one.effect:+.1%} ({one.low:+.1%} to {one.high:+.1%})"]
        lines.append(f"| {load} | {FIGURES[HEADLINES[load]].title} | {' | '.join(values)} | {one.outcome.value} |")
    return "\n".join(lines)
