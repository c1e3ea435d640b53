"""Which engines there are: what ``peers.yaml`` says, held against what is installed."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from benchmarks.cpu.engine import Setup
from benchmarks.cpu.loads import LOADS
from hotswap.core.config.files import read_file
from hotswap.core.config.schema import Section
from hotswap.core.config.sources import ENVIRONMENT_PREFIX
from hotswap.core.errors import ConfigError
from hotswap.core.explain import explain, nearest, raise_problems

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ADAPTERS = "benchmarks.cpu.adapters"
OURS = "hotswap"
_ASK_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class EngineSection(Section):
    adapter: str
    """A module of ``adapters/``."""
    python: str | None = None
    """That of its environment, below home; by default the one that runs this."""
    model: str
    """Weights below home, or a file beside the peers file."""
    options: dict[str, Any] = {}
    """The adapter's own."""


class PeersFile(Section):
    home: str
    engines: dict[str, EngineSection]


@dataclass(frozen=True)
class Engine:
    """One that can be started. ``adapter``: the module. ``faces``: "offline", "http" or both."""

    name: str
    adapter: str
    setup: Setup
    python: str
    env: Mapping[str, str]
    faces: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)

    def face(self, load: str) -> str | None:
        """By which face it is asked for ``load``; None where it has not got the one that the load is about."""
        wanted = LOADS[load].face
        if wanted is None:
            return self.faces[0]
        return wanted if wanted in self.faces else None


@dataclass(frozen=True)
class Peers:
    """``missing``: why an engine of the file cannot be run, by its name."""

    engines: Mapping[str, Engine]
    missing: Mapping[str, str]

    def chosen(self, names: Sequence[str] | None) -> list[Engine]:
        """By name, in that order; None: all that can be run, ours first. ConfigError for what cannot."""
        if names is None:
            return sorted(self.engines.values(), key=lambda engine: not engine.name.startswith(OURS))
        for name in names:
            if name in self.missing:
                raise ConfigError(f"{name} cannot be run: {self.missing[name]}", "--engines")
            if name not in self.engines:
                raise ConfigError(_unknown("engine", name, [*self.engines, *self.missing]), "--engines")
        return [self.engines[name] for name in names]


def read_peers(
    file: Path = HERE / "peers.yaml", *, home: str | None = None, pythons: Mapping[str, str] | None = None,
    sets: Mapping[str, Any] | None = None, threads: int | None = None,
) -> Peers:
    """``home`` and ``pythons``, by engine or adapter, in place of the file's; ``sets``: config keys of ours.
    ConfigError for a file that says what it cannot mean."""
    told, pythons = _validated(file), dict(pythons or {})
    place = home_of(home, told)
    known = {name for pair in told.engines.items() for name in (pair[0], pair[1].adapter)}
    for name in pythons:
        if name not in known:
            raise ConfigError(_unknown("engine", name, known), "--peer")
    engines, missing = dict[str, Engine](), dict[str, str]()
    for name, section in told.engines.items():
        python = pythons.get(name) or pythons.get(section.adapter) or section.python
        try:
            engines[name] = _engine(name, section, python, place, file.parent, sets or {}, threads)
        except _Missing as problem:
            missing[name] = str(problem)
    return Peers(engines, missing)


def home_of(home: str | None, told: PeersFile | None = None) -> Path:
    """``home``, or else the one that the peers file names."""
    return Path(home or (told or _validated(HERE / "peers.yaml")).home).expanduser().absolute()


class _Missing(Exception):
    """Why an engine cannot be run."""


def _validated(file: Path) -> PeersFile:
    try:
        return PeersFile.model_validate(read_file(file))
    except ValidationError as error:
        raise_problems(explain(error, PeersFile))
        raise


def _engine(
    name: str, section: EngineSection, python: str | None, home: Path, beside: Path, sets: Mapping[str, Any],
    threads: int | None,
) -> Engine:
    adapter = f"{ADAPTERS}.{section.adapter}"
    if find_spec(adapter) is None:
        names = [path.stem for path in (HERE / "adapters").glob("*.py")]
        raise ConfigError(_unknown("adapter", section.adapter, names), f"engines.{name}.adapter")
    executable = sys.executable if python is None else str(home / Path(python).expanduser())
    if not Path(executable).exists():
        raise _Missing(f"there is no {executable}")
    model = next((place / section.model for place in (home, beside) if (place / section.model).exists()), None)
    if model is None:
        raise _Missing(f"there is no {home / section.model}")
    ours = section.adapter == OURS
    setup = Setup(
        str(model), cores()[:threads], {**section.options, **(sets if ours else {})})
    engine = Engine(name, adapter, setup, executable, environment(ROOT if ours else None), faces_of(adapter))
    return replace(engine, versions=versions_of(engine))


def cores(topology: Path = Path("/sys/devices/system/cpu")) -> list[int]:
    """The processors that may be used, the first of each core: two threads of a core have one multiplier."""
    found = dict[str, int]()
    for cpu in sorted(os.sched_getaffinity(0)):
        try:
            core = (topology / f"cpu{cpu}" / "topology" / "core_cpus_list").read_text()
        except OSError:
            core = str(cpu)
        found.setdefault(core, cpu)
    return list(found.values())


def faces_of(adapter: str) -> tuple[str, ...]:
    module = importlib.import_module(adapter)
    return tuple(face for face, what in (("offline", "Offline"), ("http", "serve")) if hasattr(module, what))


def environment(tree: Path | None = None, *before: Path) -> dict[str, str]:
    """Of an engine's process: ours is that of the checkout ``tree``, others find none of our modules."""
    kept = {
        name: value for name, value in os.environ.items()
        if not name.startswith(ENVIRONMENT_PREFIX) and name != "PYTHONPATH"}
    paths = [*map(str, before), *([str(tree / "src")] if tree else [])]
    own = {"PYTHONPATH": os.pathsep.join(paths)} if paths else {}
    return {**kept, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **own}


def versions_of(engine: Engine) -> dict[str, str]:
    names = importlib.import_module(engine.adapter).DISTRIBUTIONS
    told = subprocess.run(
        [engine.python, "-c", _ASK_VERSIONS, *names], env=dict(engine.env), capture_output=True, text=True)
    found: dict[str, str] = json.loads(told.stdout) if told.returncode == 0 else {}
    if names[0] not in found:
        raise _Missing(f"{engine.python} has no distribution {names[0]}")
    return found


def _unknown(kind: str, name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    near = nearest(name, known)
    hint = f"did you mean {near!r}? There are" if near else "there are"
    return f"there is no {kind} {name!r}; {hint} {', '.join(known)}"
