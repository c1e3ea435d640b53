"""Round after round: every engine once, alone on the machine, in an order drawn by lot and then turned round."""

import re
import time
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
from hotswap.lab.processes import Neighbours, cpu_of

START = {"offline": "start", "http": "start-http"}
"""What the start itself is called among the loads, by face."""
SETTLE_S = 0.5
"""From the end of a load until an engine is idle."""


@dataclass(frozen=True)
class Plan:
    """``quick``: hardly any work, to see whether all of it runs. ``logs``: a folder for what the engines print.
    ``idle_s``: how long a server is watched that has nothing to do; 0: not at all."""

    engines: Sequence[Engine]
    loads: Sequence[str]
    rounds: int
    logs: Path
    quick: bool = False
    seed: int = 0
    idle_s: float = 0.0

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
            if face == "http" and plan.idle_s:
                yield _idle(plan, engine, number, subject)
    except RunError as error:
        left = loads[loads.index(doing):] if doing in loads else [START[face], *loads]
        for load in left:
            yield Run(engine.name, face, load, number, error=f"{doing}: {error}")


def _measured(plan: Plan, engine: Engine, face: str, load: str, number: int, subject: Subject) -> Run:
    neighbours, used = _neighbours(), cpu_of([subject.pid])
    block = subject.measure(load, number, plan.quick)
    used, others = cpu_of([subject.pid]) - used, neighbours.cores()
    tokens = sum(request.output_tokens for request in block.requests)
    figures = {
        **figures_of(block), "cpu_us_tok": 1e6 * used / tokens, "memory_mib": peak_of([subject.pid]) / 2**20,
        **({"client_us_tok": 1e6 * subject.client_s / tokens} if face == "http" else {})}
    return Run(engine.name, face, load, number, figures, others)


def _idle(plan: Plan, engine: Engine, number: int, subject: Subject) -> Run:
    """Of one core, in percent."""
    time.sleep(SETTLE_S)
    neighbours, used, begun = _neighbours(), cpu_of([subject.pid]), time.perf_counter()
    time.sleep(plan.idle_s)
    percent = 100 * (cpu_of([subject.pid]) - used) / (time.perf_counter() - begun)
    return Run(engine.name, "http", "idle", number, {"idle_percent": percent}, neighbours.cores())


def _neighbours() -> Neighbours:
    return Neighbours(SystemClock().now)
