"""Executors whose ranks run a worker of these tests, without a model: real processes, channels and process groups."""

import os
import signal
import time

import pytest

from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, WorkerRecipe
from hotswap.core.registry import Registry

PLANTED = '''
import os, time
import torch
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.messages import RowVerdict, Verdict
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.kvcache import CacheSpec
from hotswap.core.interfaces.parallel import RankReport, WorkerInfo


class Planted:
    def __init__(self, arguments, rank, mesh):
        self.faults = arguments.get(str(rank), {})
        self.rank, self.mesh, self.heard = rank, mesh, []
        if "refuse" in self.faults:
            raise ConfigError(self.faults["refuse"], "model.path")
        if "exit" in self.faults:
            os._exit(self.faults["exit"])

    def info(self):
        layers = (self.rank,)
        spec = CacheSpec("full", layers, 1, 8, self.faults.get("bytes_per_token", 64))
        return WorkerInfo(ModelFacts("Planted", 1, 8, 16, 64), (spec,), None, 0, 0, self.faults.get("free", 10**9), 64)

    def allocate(self, plan):
        if "allocate" in self.faults:
            raise MemoryError(self.faults["allocate"])
        if "break" in self.faults:
            raise RuntimeError(self.faults["break"])
        if "vanish" in self.faults:
            os._exit(self.faults["vanish"])
        if "layout" in self.faults:
            raise ConfigError(self.faults["layout"], "kv_transfer")

    def execute(self, message):
        self.heard += message.news
        time.sleep(self.faults.get("seconds", 0))
        if message.step_id == self.faults.get("raise"):
            raise RuntimeError("planted in a step")
        for _ in range(self.faults.get("reduce", 0)):
            self.mesh.reduce("heads", torch.ones(4))
        return Verdict(message.step_id, [RowVerdict(row.request, [self.rank], 1) for row in message.rows])

    def report(self):
        return RankReport(self.rank, "cpu", 1, 2, statistics={"heard": [len(self.heard)]})

    def close(self):
        pass


def make(arguments):
    return lambda plan, rank, mesh: Planted(arguments, rank, mesh)
'''


class PlantedFactory:
    def __init__(self, faults):
        self.faults = faults

    def recipe(self):
        return WorkerRecipe("planted_ranks:make", self.faults, "cpu")


def plan(stages=1, width=2):
    dims = (MeshDim("tensor", width, ("heads",)),)
    if stages > 1:
        dims = (MeshDim("pipeline", stages, ("layers",)), *dims)
    return RankPlan(dims)


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.fixture
def secret():
    return bytes(range(32))


@pytest.fixture
def scratch(tmp_path, monkeypatch, children):
    """Where executors make their directories: nothing may be left of them after the test."""
    place = tmp_path / "t"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    before = set(children(os.getpid()))
    shared = set(os.listdir("/dev/shm"))
    yield place
    until(lambda: not set(children(os.getpid())) - before, 5)
    assert not list(place.iterdir())
    assert not {name for name in set(os.listdir("/dev/shm")) - shared if name.startswith("torch_")}


@pytest.fixture
def launch(tmp_path, monkeypatch, scratch):
    """``launch(faults, stages, width)`` -> (executor, what launching returned). ``faults`` by rank: see ``PLANTED``."""
    (tmp_path / "planted_ranks.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    started = []

    def start(faults=None, stages=1, width=2, **options):
        executor = Registry().build("executor", ComponentRef(use="processes", **options), "execution")
        started.append(executor)
        return executor, executor.launch(PlantedFactory(faults or {}), plan(stages, width))

    yield start
    for executor in started:
        executor.stop()


@pytest.fixture
def kill():
    return lambda pid: os.kill(pid, signal.SIGKILL)
