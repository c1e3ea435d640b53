"""What is shipped: the wheel's files, the entry points, the dependencies, the import contracts."""

import importlib
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

import hotswap
from hotswap.core.registry import INTERFACES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ("core", "plugins", "server", "lab")
GROUPS = PROJECT["entry-points"]
COMPONENTS = [
    (group.removeprefix("hotswap."), name, value)
    for group, points in GROUPS.items() if group != "hotswap.contract" for name, value in points.items()
]


def tree():
    """Every file of the package, as it is to be imported."""
    files = set()
    for folder in (ROOT / "src" / "hotswap", *(ROOT / name for name in FOLDERS)):
        prefix = "hotswap" if folder.name == "hotswap" else f"hotswap/{folder.name}"
        for path in folder.rglob("*"):
            inner = path.relative_to(folder)
            linked = folder.name == "hotswap" and inner.parts[0] in FOLDERS
            if path.is_file() and "__pycache__" not in inner.parts and not linked:
                files.add(f"{prefix}/{inner.as_posix()}")
    return files


def wheel_of(project, folder):
    [wheel] = WheelBuilder(str(project)).build(directory=str(folder), versions=["standard"])
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_exactly_the_files_of_the_tree(tmp_path):
    assert wheel_of(ROOT, tmp_path) == tree()


def test_a_wheel_made_from_the_source_archive_is_the_same(tmp_path):
    [archive] = SdistBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    [unpacked] = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert wheel_of(unpacked, tmp_path / "wheel") == tree()


@pytest.mark.parametrize(("kind", "name", "value"), COMPONENTS, ids=[f"{kind}:{name}" for kind, name, _ in COMPONENTS])
def test_every_entry_point_leads_to_a_finished_component_of_its_kind(kind, name, value):
    module, _, attribute = value.partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    [interface] = [base for base in INTERFACES if base.kind == kind]
    assert issubclass(cls, interface)
    assert not cls.__abstractmethods__
    assert cls.__doc__ and cls.__doc__ != interface.__doc__, "its docstring says when to choose it"


def test_the_declared_contracts_are_those_of_the_code():
    kinds = {kind for kind, _, _ in COMPONENTS}
    host = {cls.kind: f"v{cls.contract.rpartition('/')[2]}" for cls in INTERFACES}
    assert GROUPS["hotswap.contract"] == {kind: host[kind] for kind in kinds}


def test_the_version_is_one():
    assert PROJECT["version"] == hotswap.__version__


def test_each_dependency_says_why_it_is_there():
    text = (ROOT / "pyproject.toml").read_text()
    for requirement in PROJECT["dependencies"]:
        [line] = [line for line in text.splitlines() if line.strip().startswith(f'"{requirement}"')]
        assert line.partition("# ")[2], f"{requirement} has no reason beside it"


def test_the_import_contracts_hold():
    command = Path(sys.executable).with_name("lint-imports")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    checked = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert checked.returncode == 0, checked.stdout
    assert "4 kept, 0 broken" in checked.stdout
