"""What the ranks of executors and launchers run in the kit: functions that a child process can import.

A toy worker does as it is told by its faults, a JSON object: ``seconds`` a step takes, ``raise``: the step in which it
raises, ``die``: the step in which its thread or process ends, ``refuse``: a message for a ConfigError at the start,
``short``: the rank that has no memory for pages, ``closed``: a file that it writes, with its rank behind the name, when
it is closed. Of new parts it knows a speculator, by its number of drafts: it takes ``prepare_s`` to prepare one, and on
the rank ``picky`` it refuses TOO_MANY of them, raises while it prepares BROKEN ones, and when BROKEN_LATER are put in
place.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec
from hotswap.core.interfaces.messages import RowVerdict, StepMessage, Verdict
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import RankPlan, RankReport, Take, WorkerInfo, WorkerRecipe
from hotswap.core.interfaces.speculator import Speculator

if TYPE_CHECKING:
    from hotswap.core.modeling.mesh import Mesh

FACTS = ModelFacts("Toy", 1, 8, 16, 64)
TOO_MANY, BROKEN, BROKEN_LATER = 13, 14, 15


class ToyWorker:
    """Implements ``Worker``. Each row keeps one token: the number of the step. ``report().counts`` tells the drafts of
    the speculators that are "placed", "prepared" and "former", and how often pages were "allocated"."""

    def __init__(self, faults: dict[str, Any], rank: int) -> None:
        if message := faults.get("refuse"):
            raise ConfigError(message, "model.path")
        self.faults, self.rank = faults, rank
        self.picky = rank == faults.get("picky")
        self.pages = self.allocated = self.placed = 0
        self.prepared: int | None = None
        self.former: int | None = None

    def info(self) -> WorkerInfo:
        spec = CacheSpec("full", (0,), 1, 8, 64)
        return WorkerInfo(FACTS, (spec,), None, self.placed, 0, 1 << 20, 64)

    def allocate(self, plan: CachePlan) -> None:
        if self.rank == self.faults.get("short"):
            raise MemoryError(f"planted: no room for pages on rank {self.rank}")
        self.pages = plan.groups["full"].num_pages
        self.allocated += 1

    def execute(self, message: StepMessage) -> Verdict:
        time.sleep(self.faults.get("seconds", 0.0))
        if message.step_id == self.faults.get("raise"):
            raise RuntimeError("planted in a step")
        if message.step_id == self.faults.get("die"):
            raise SystemExit("planted")
        return Verdict(message.step_id, [RowVerdict(row.request, [message.step_id], 1) for row in message.rows])

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        self.prepared = None
        if not parts:
            return self.info()
        speculator = cast(Speculator, parts["speculator"])
        drafts = speculator.needs().lookahead
        time.sleep(self.faults.get("prepare_s", 0.0))
        if self.picky and drafts == TOO_MANY:
            raise ConfigError("planted: too many drafts", "speculator.max_draft")
        if self.picky and drafts == BROKEN:
            raise RuntimeError("planted while parts are prepared")
        self.prepared = drafts
        return replace(self.info(), lookahead=drafts)

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        leaving, target = self.placed, self.placed
        if take is Take.FORMER:
            target = leaving if self.former is None else self.former
        elif take is Take.PREPARED:
            if self.prepared is None:
                raise RuntimeError("no parts were prepared for this exchange")
            target, self.prepared = self.prepared, None
        self.placed, self.former = target, leaving
        if self.picky and target == BROKEN_LATER:
            raise RuntimeError("planted in an exchange")
        if not keeps_pages:
            self.allocate(plan)

    def settle(self) -> None:
        self.former = None

    def join(self) -> None:
        """Nothing to take part in."""

    def report(self) -> RankReport:
        drafts = {"placed": self.placed, "prepared": self.prepared, "former": self.former}
        counts = {name: count for name, count in drafts.items() if count is not None}
        return RankReport(self.rank, "cpu", 1, self.pages, counts={**counts, "allocated": self.allocated})

    def close(self) -> None:
        if path := self.faults.get("closed"):
            Path(f"{path}{self.rank}").touch()


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
    ``secret`` can be seen from outside; waits for the file ``go``, if it was given one; then sleeps ``seconds``, writes
    "end" behind it, and ends with ``code``."""
    seen = arguments["secret"] in " ".join([*sys.orig_argv, *os.environ.values()])
    partial = Path(f"{arguments['path']}.part")
    partial.write_text(json.dumps({**arguments, "pid": os.getpid(), "secret_is_visible": seen}))
    partial.rename(arguments["path"])
    while "go" in arguments and not Path(arguments["go"]).exists():
        time.sleep(0.01)
    time.sleep(arguments.get("seconds", 0.0))
    Path(f"{arguments['path']}.end").touch()
    raise SystemExit(arguments.get("code", 0))
