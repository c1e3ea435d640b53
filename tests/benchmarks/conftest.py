"""The benchmarks are no package that is installed: they are found from the repository's root."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKES = Path(__file__).parent / "fakes"


@pytest.fixture(autouse=True)
def root(monkeypatch):
    """Behind all others: ``core`` and its like are found there, too."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT), str(FAKES)])


@pytest.fixture
def fake():
    """A function that makes an engine of the adapter ``fake_engine``."""
    from benchmarks.cpu.engine import Setup
    from benchmarks.cpu.peers import Engine

    def make(name="fake", faces=("offline", "http"), **options):
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKES), str(ROOT)])}
        return Engine(name, "fake_engine", Setup("weights", [0], options), sys.executable, env, faces)

    return make
