"""An experiment from its plan to its report."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hotswap.core.engine.clock import SystemClock
from hotswap.core.explain import redact
from hotswap.lab.arms import started
from hotswap.lab.environment import environment
from hotswap.lab.journal import FILE, Journal
from hotswap.lab.metrics import spec_of
from hotswap.lab.plan import Plan
from hotswap.lab.records import Result
from hotswap.lab.report import render_table, write_report
from hotswap.lab.run import Arm, Measured, Run
from hotswap.lab.statistics import Monitor

BAR = "{desc:24.24} {percentage:3.0f}%|{bar}| {remaining} left"


def conduct(plan: Plan, say: Callable[[str], None], *, progress: bool = True) -> Result:
    """Start, measure, judge, report. ConfigError or HotswapError where an arm does not start."""
    experiment, now = plan.experiment, SystemClock().now
    told, machine = description(plan), environment()
    folder = None if experiment.out is None else Path(experiment.out)
    specs = [spec_of(name) for name in experiment.metrics]
    monitor = Monitor(experiment.compared, specs, experiment.statistics)
    with Journal(None if folder is None else folder / FILE) as journal:
        journal.header(told, machine)
        with started(plan, now, progress=progress) as arms, _settled():
            for note in (*plan.notes, *_bodies(arms)):
                say(note)
            measured, share = _measure(plan, arms, now, journal, monitor, progress)
    configs = {arm.name: arm.told() for arm in plan.arms}
    result = Result(
        told, machine, specs, measured.blocks, monitor.finish(share), measured.stopped, measured.partial,
        measured.divergences, configs, measured.pairs, monitor.looks,
        dict(measured.outputs_compared))
    say(render_table(result))
    if folder is not None:
        report = write_report(result, folder)
        say(f"written: {', '.join(str(path) for path in (folder / FILE, report.data, report.page) if path)}")
        if report.note:
            say(report.note)
    return result


@contextlib.contextmanager
def _settled() -> Iterator[None]:
    """What is loaded lives as long as the run: between two blocks the collector need not look at it."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def description(plan: Plan) -> dict[str, Any]:
    """The experiment with every default spelled out, and which config each arm had; secrets hidden."""
    plain: dict[str, Any] = redact(plan.experiment.model_dump(mode="json"))
    return {**plain, "hashes": {arm.name: arm.hash() for arm in plan.arms}}


def _bodies(arms: list[Arm]) -> list[str]:
    """What requests say, for every arm once: where all say the same, only once."""
    bodies = {arm.name: dict(arm.target.effective()) for arm in arms}
    distinct = {repr(body): name for name, body in reversed(bodies.items())}
    return [f"a request to {name} says: {body}" for body, name in reversed(distinct.items())]


def _measure(
    plan: Plan, arms: list[Arm], now: Callable[[], float], journal: Journal, monitor: Monitor, progress: bool,
) -> tuple[Measured, float]:
    """What was measured, and the share of the planned run that it is."""
    bar = tqdm(total=1.0, disable=None if progress else True, bar_format=BAR, desc="starting")

    def show(done: float, words: str) -> None:
        bar.set_description(words, refresh=False)
        bar.update(done - bar.n)

    with bar:
        run = Run(plan.experiment, arms, plan.items(), now, journal, monitor, show, plan.text)
        measured = run.run()
        show(run.share, "ended")
        return measured, run.share
