"""An experiment from its file to its report."""

from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from hotswap.core.engine.clock import SystemClock
from hotswap.core.explain import redact
from hotswap.lab.arms import started
from hotswap.lab.environment import environment
from hotswap.lab.experiment import Experiment
from hotswap.lab.journal import FILE, Journal
from hotswap.lab.plan import Plan, make_plan
from hotswap.lab.records import Result
from hotswap.lab.run import Arm, Measured, Run
from hotswap.lab.summary import describe

BAR = "{desc:24.24} {percentage:3.0f}%|{bar}| {remaining} left"


def conduct(experiment: Experiment, say: Callable[[str], None], *, progress: bool = True) -> Result:
    """Plan, start, measure, judge, report. ConfigError before anything is loaded for whatever cannot work."""
    plan = make_plan(experiment, progress=progress)
    now = SystemClock().now
    told = {**redact(experiment.model_dump(mode="json")), "hashes": {arm.name: arm.hash() for arm in plan.arms}}
    machine = environment()
    path = None if experiment.out is None else Path(experiment.out) / FILE
    with Journal(path) as journal:
        journal.header(told, machine)
        with started(plan, now, progress=progress) as arms:
            for note in (*plan.notes, *_bodies(arms)):
                say(note)
            measured = _measure(plan, arms, now, journal, progress)
    for name in (experiment.against, *experiment.compared):
        blocks = [block for block in measured.blocks if block.arm == name]
        if blocks:
            say(f"\n{name}\n{describe(blocks, experiment.limits)}")
    say(f"\nended: {measured.stopped}{' (PARTIAL)' if measured.partial else ''}")
    return Result(told, machine, (), measured.blocks, (), measured.stopped, measured.partial, measured.divergences)


def _bodies(arms: list[Arm]) -> list[str]:
    """What requests say, for every arm once: where all say the same, only once."""
    bodies = {arm.name: dict(arm.target.effective()) for arm in arms}
    distinct = {repr(body): name for name, body in reversed(bodies.items())}
    return [f"a request to {name} says: {body}" for body, name in reversed(distinct.items())]


def _measure(plan: Plan, arms: list[Arm], now: Callable[[], float], journal: Journal, progress: bool) -> Measured:
    bar = tqdm(total=1.0, disable=None if progress else True, bar_format=BAR, desc="starting")

    def show(done: float, words: str) -> None:
        bar.set_description(words, refresh=False)
        bar.update(done - bar.n)

    with bar:
        run = Run(plan.experiment, arms, plan.items(), now, journal, progress=show)
        return run.run()
