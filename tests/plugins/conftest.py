"""Distributions that exist only for a test: metadata and modules in a folder on ``sys.path``."""

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., Path]


def write_distribution(
    site: Path, name: str, entry_points: dict[str, dict[str, str]], source: str = "", version: str = "1.0",
) -> Path:
    """Write what pip would leave of a distribution with one module, ``name`` with underscores."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines: list[str] = []
    for group, points in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    module = site / f"{name.replace('-', '_')}.py"
    module.write_text(textwrap.dedent(source))
    return module


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """``install(name, entry_points, source)`` makes a distribution importable for the test."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    modules = set(sys.modules)
    yield lambda *args, **kwargs: write_distribution(site, *args, **kwargs)
    for name in set(sys.modules) - modules:
        if getattr(sys.modules[name], "__file__", None) and str(site) in str(sys.modules[name].__file__):
            del sys.modules[name]
    importlib.invalidate_caches()
