"""Projects that ``hotswap plugins new`` has written, one a kind, found as if pip had installed them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from hotswap.core.registry import INTERFACES
from hotswap.core.testing.installed import write_metadata
from hotswap.server.cli import main

ROOT = Path(__file__).parents[2]
KINDS = [interface.kind for interface in INTERFACES]


def name_of(kind):
    return "GroveForCausalLM" if kind == "model" else f"my_{kind}"


@pytest.fixture(scope="session")
def projects(tmp_path_factory):
    """kind -> the folder of a project for it."""
    home = tmp_path_factory.mktemp("projects")
    for kind in KINDS:
        written = CliRunner().invoke(main, ["plugins", "new", kind, name_of(kind), "--dir", str(home / kind)])
        assert written.exit_code == 0, written.output
    return {kind: home / kind for kind in KINDS}


@pytest.fixture(scope="session")
def site(projects, tmp_path_factory):
    """What pip would leave of all of them in an environment: metadata, and the folders with the modules."""
    home = tmp_path_factory.mktemp("site")
    for folder in projects.values():
        write_metadata(folder, home)
    return [str(home), *map(str, projects.values())]


@pytest.fixture(scope="session")
def run(site):
    """``run("pytest", ...)``: a module of Python in a process of its own that finds the projects."""

    def start(*command, cwd=None, timeout=600):
        environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *site]), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, cwd=cwd, env=environment,
            timeout=timeout, check=False)

    return start
