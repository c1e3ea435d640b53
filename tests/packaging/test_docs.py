"""What the documentation says of the surface is what the code says."""

import inspect
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from hotswap.core.config.schema import Config, Section
from hotswap.core.config.units import parse_bytes
from hotswap.core.hooks import HookSpecs

ROOT = Path(__file__).parents[2]
HOOKS = [name for name in vars(HookSpecs) if name.startswith("hotswap_")]


def keys():
    """Every key of core's, dotted, with its field; sections that name a component or hold keys are opened."""
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from ((f"{name}.{key}", inner) for key, inner in field.annotation.model_fields.items())
        else:
            yield name, field


KEYS = dict(keys())


def rows(page):
    """The cells of every table row of a page."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]


@pytest.mark.parametrize(("key", "field"), list(KEYS.items()), ids=list(KEYS))
def test_each_key_of_the_config_is_documented_with_its_default(key, field):
    [(default, meaning)] = [cells[1:3] for cells in rows("configuration.md") if cells[0] == f"`{key}`"]
    expected = field.get_default(call_default_factory=True)
    if isinstance(expected, list):
        expected = [getattr(item, "use", item) for item in expected]
    written = None if default == "–" else yaml.safe_load(default.strip("`"))
    assert expected in (written, parse_bytes(written) if isinstance(written, str) and "iB" in written else written)
    assert meaning


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_documented_with_its_arguments(hook):
    documented = [cells[1].strip("`") for cells in rows("kinds/observer.md") if cells[0] == f"`{hook}`"]
    arguments = list(inspect.signature(vars(HookSpecs)[hook]).parameters)[1:]
    assert documented == [", ".join(arguments)]


def test_no_hook_is_documented_that_does_not_exist():
    named = set(re.findall(r"\bhotswap_[a-z_]+\b", "".join(p.read_text() for p in ROOT.glob("docs/**/*.md"))))
    modules = {"hotswap_shortest_first", "hotswap_my_scheduler", "hotswap_mine"}  # of packages in examples and tutorial
    assert named - modules <= set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_each_hook_is_called_by_the_engine_or_the_server(hook):
    sources = [path.read_text() for folder in ("core/engine", "server") for path in (ROOT / folder).rglob("*.py")]
    assert any(f'"{hook}"' in source for source in sources)


@pytest.mark.parametrize("key", list(KEYS))
def test_no_key_of_the_config_is_read_by_nobody(key):
    name = key.rpartition(".")[2]
    if name in ("use", "name", "path"):
        return  # read through ``ref`` and ``source``
    folders = (ROOT / folder for folder in ("core", "plugins", "server"))
    readers = [
        path for folder in folders for path in folder.rglob("*.py")
        if path.parent != ROOT / "core" / "config" and re.search(rf"\b{name}\b", path.read_text())
    ]
    assert readers


def test_the_line_that_the_readme_tells_people_to_paste_is_what_ci_runs():
    readme = (ROOT / "README.md").read_text()
    lines = [line for line in readme.splitlines() if re.search(r"&& \.venv/bin/pytest( |$)", line)]
    assert len(lines) == 1
    for part in ("python3 -m venv .venv", "-c constraints-cpu.txt", "-e '.[dev]'"):
        assert part in lines[0]
    subprocess.run(["bash", "-n", ROOT / ".ci" / "run"], check=True)
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
