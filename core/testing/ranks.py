"""What the ranks of executors and launchers run in the kit: functions that a child process can import.

A toy worker does as it is told by its faults, a JSON object: ``seconds`` a step takes, ``raise``: the step in which it
raises, ``die``: the step in which its thread or process ends, ``refuse``: a message for a ConfigError at the start,
``closed``: a file that it writes when it is closed.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec
from hotswap.core.interfaces.messages import RowVerdict, StepMessage, Verdict
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import RankPlan, RankReport, Take, WorkerInfo, WorkerRecipe

if TYPE_CHECKING:
    from hotswap.core.modeling.mesh import Mesh

FACTS = ModelFacts("Toy", 1, 8, 16, 64)


class ToyWorker:
    """Implements ``Worker``. Each row keeps one token: the number of the step."""

    def __init__(self, faults: dict[str, Any], rank: int) -> None:
        if message := faults.get("refuse"):
            raise ConfigError(message, "model.path")
        self.faults, self.rank = faults, rank
        self.pages = 0

    def info(self) -> WorkerInfo:
        return WorkerInfo(FACTS, (CacheSpec("full", (0,), 1, 8, 64),), None, 0, 0, 1 << 20, 64)

    def allocate(self, plan: CachePlan) -> None:
        self.pages = plan.groups["full"].num_pages

    def execute(self, message: StepMessage) -> Verdict:
        time.sleep(self.faults.get("seconds", 0.0))
        if message.step_id == self.faults.get("raise"):
            raise RuntimeError("planted in a step")
        if message.step_id == self.faults.get("die"):
            raise SystemExit("planted")
        return Verdict(message.step_id, [RowVerdict(row.request, [message.step_id], 1) for row in message.rows])

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        return self.info()

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        self.allocate(plan)

    def settle(self) -> None:
        """Nothing is kept of what was before."""

    def join(self) -> None:
        """Nothing to take part in."""

    def report(self) -> RankReport:
        return RankReport(self.rank, "cpu", 1, self.pages)

    def close(self) -> None:
        if path := self.faults.get("closed"):
            Path(path).write_text(str(self.rank))


def toy_workers(faults: dict[str, Any]) -> "ToyFactory":
    return ToyFactory(faults)


class ToyFactory:
    """Implements ``WorkerFactory``: a toy worker here, or in a process that calls :func:`toy_workers`."""

    def __init__(self, faults: dict[str, Any]) -> None:
        self.faults = faults

    def __call__(self, plan: RankPlan, rank: int, mesh: "Mesh | None" = None) -> ToyWorker:
        return ToyWorker(self.faults, rank)

    def recipe(self) -> WorkerRecipe:
        return WorkerRecipe(f"{__name__}:toy_workers", self.faults, "cpu")


def note(arguments: dict[str, Any]) -> None:
    """The life of a process that a launcher has started. Writes what it was told to the file ``path``, and whether the
    ``secret`` can be seen from outside; then sleeps ``seconds``, writes "end" behind it, and ends with ``code``."""
    seen = arguments["secret"] in " ".join([*sys.argv, *os.environ.values()])
    partial = Path(f"{arguments['path']}.part")
    partial.write_text(json.dumps({**arguments, "pid": os.getpid(), "secret_is_visible": seen}))
    partial.rename(arguments["path"])
    time.sleep(arguments.get("seconds", 0.0))
    Path(f"{arguments['path']}.end").touch()
    raise SystemExit(arguments.get("code", 0))
