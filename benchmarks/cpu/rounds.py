"""Round after round: every engine once, alone on the machine, in an order drawn by lot and then turned round."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from benchmarks.cpu.figures import Run, figures_of
from benchmarks.cpu.loads import WARM_UP_SEED
from benchmarks.cpu.memory import peak_of
from benchmarks.cpu.peers import Engine
from benchmarks.cpu.subject import RunError, Subject, started
from hotswap.core.engine.clock import SystemClock
from hotswap.lab.interleave import orders
from hotswap.lab.processes import Neighbours

START = {"offline": "start", "http": "start-http"}
"""What the start itself is called among the loads, by face."""


@dataclass(frozen=True)
class Plan:
    """``quick``: hardly any work, to see whether all of it runs. ``logs``: a folder for what the engines print."""

    engines: Sequence[Engine]
    loads: Sequence[str]
    rounds: int
    logs: Path
    quick: bool = False
    seed: int = 0

    def turns(self, engine: Engine) -> dict[str, list[str]]:
        """The loads that an engine gets, by the face that it is asked by."""
        found: dict[str, list[str]] = {}
        for load in self.loads:
            if (face := engine.face(load)) is not None:
                found.setdefault(face, []).append(load)
        return found


def run(plan: Plan) -> Iterator[Run]:
    """Every run as it is done. An engine that has failed gets no further turn by that face: it would fail again, and
    cost minutes."""
    engines = {engine.name: engine for engine in plan.engines}
    failed = set[tuple[str, str]]()
    for number, order in enumerate(islice(orders(list(engines), plan.seed), plan.rounds), 1):
        for name in order:
            for face, loads in plan.turns(engines[name]).items():
                if (name, face) in failed:
                    continue
                for one in _turn(plan, engines[name], face, loads, number):
                    if one.error is not None:
                        failed.add((name, face))
                    yield one


def _turn(plan: Plan, engine: Engine, face: str, loads: Sequence[str], number: int) -> Iterator[Run]:
    log = plan.logs / f"{re.sub('[^a-zA-Z0-9._-]+', '-', engine.name)}-{face}.log"
    doing, neighbours = START[face], _neighbours()
    try:
        with started(face, engine.adapter, engine.setup, engine.python, engine.env, log) as subject:
            yield Run(engine.name, face, doing, number, {"ready_s": subject.ready_s}, neighbours.cores())
            doing = "warm-up"
            subject.measure(doing, WARM_UP_SEED + number, plan.quick)
            for doing in loads:
                yield _measured(plan, engine, face, doing, number, subject)
    except RunError as error:
        left = loads[loads.index(doing):] if doing in loads else [START[face], *loads]
        for load in left:
            yield Run(engine.name, face, load, number, error=f"{doing}: {error}")


def _measured(plan: Plan, engine: Engine, face: str, load: str, number: int, subject: Subject) -> Run:
    neighbours = _neighbours()
    block = subject.measure(load, number, plan.quick)
    others = neighbours.cores()
    figures = {**figures_of(block), "memory_mib": peak_of([subject.pid]) / 2**20}
    return Run(engine.name, face, load, number, figures, others)


def _neighbours() -> Neighbours:
    return Neighbours(SystemClock().now)
