"""Where values come from: defaults < file < environment < flags, merged key by key, each key's source remembered.

The environment names a key by its path, ``HOTSWAP_SERVER__PORT=9002``; a flag does so with dots, ``server.port=9003``.
Their values are YAML, so numbers, lists and ``null`` can be given. A mapping is merged with the one before it, as if
each of its keys had been given alone; a list is replaced as a whole.
"""

import copy
import os
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from hotswap.core.config.check import wrong_components
from hotswap.core.config.files import ParseError, parse_yaml, read_file
from hotswap.core.config.inherit import hand_on
from hotswap.core.config.schema import SECTIONS, Config, known_keys
from hotswap.core.errors import ConfigError
from hotswap.core.explain import SECRET_KEY, Problem, explain, join, public, raise_problems, redact
from hotswap.core.registry import Registry

ENVIRONMENT_PREFIX = "HOTSWAP_"

RENAMED: dict[str, str] = {}
"""Old path -> new path. An entry stays for two minor releases, in which the old name works with a warning."""

ALTERNATIVES = (("model.name", "model.path"), ("kvcache.memory", "kvcache.num_blocks"))
"""Keys that exclude each other: one from a flag takes the place of the other from a file."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A valid config, and where each of its values came from.

    ``sources``: dotted path of every value given -> "file NAME", "environment NAME", "flag" or "argument"; a path that
    is missing is a default. ``warnings``: what the operator should read.
    """

    config: Config
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def source(self, path: str) -> str:
        """The source of the value at ``path``, or of the section or list that holds it."""
        while path and path not in self.sources:
            path = path[:max(path.rfind("."), path.rfind("["), 0)]
        return self.sources.get(path, "default")

    def effective(self) -> dict[str, Any]:
        """Every value, core's defaults included, as JSON; secrets are hidden."""
        plain: dict[str, Any] = redact(self.config.model_dump(mode="json"))
        return plain


class Assignment(NamedTuple):
    """One value from the environment or a flag."""

    path: tuple[str, ...]
    value: Any
    source: str


def load_config(
    source: str | Path | Mapping[str, Any], sets: Iterable[str] = (), environ: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Read a .yaml, .yml, .json or .toml file (or take a mapping), and put the environment and then the flags ``sets``
    ("scheduler.use=continuous") on top. ``environ``: None for the process's own.

    Raises ConfigError, which tells every problem that was found.
    """
    if isinstance(source, Mapping):
        values, origin = copy.deepcopy(dict(source)), "argument"
    else:
        values, origin = read_file(Path(source)), f"file {source}"
    for section in SECTIONS:
        if isinstance(values.get(section), str):
            values[section] = _spelt_out(section, values[section])
    sources = {path: origin for path in _leaves(values)}
    warnings = _rename(values, sources)
    layers = [copy.deepcopy(values)]
    for assignments in (_environment(os.environ if environ is None else environ), [_flag(text) for text in sets]):
        _refuse_both_names({path for given in assignments for path in _paths(given)})
        for assignment in assignments:
            warnings += _assign(values, sources, assignment)
        layers.append(copy.deepcopy(values))
    warnings += hand_on(values, sources, layers, _layer)
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        problems = [*explain(error, Config, known=known_keys()), *wrong_components(values, Registry())]
        raise_problems([_with_source(problem, sources) for problem in problems])
        raise
    return ResolvedConfig(config, sources, tuple(warnings))


def _paths(assignment: Assignment) -> Iterator[str]:
    path = ".".join(assignment.path)
    yield path
    if isinstance(assignment.value, dict):
        yield from _leaves(assignment.value, path)


def _layer(source: str) -> int:
    """0 for the file, 1 for the environment, 2 for flags."""
    return {"environment": 1, "flag": 2}.get(source.partition(" ")[0], 0)


def _environment(environ: Mapping[str, str]) -> list[Assignment]:
    """HOTSWAP_SERVER__PORT=9002 -> server.port. Outer keys come first, so that inner ones change them."""
    found = []
    for name in sorted(environ):
        if name.startswith(ENVIRONMENT_PREFIX):
            parts = name.removeprefix(ENVIRONMENT_PREFIX).split("__")
            path = tuple(part.lower() for part in parts)
            shown = ENVIRONMENT_PREFIX + "__".join(parts[:len(public(path))])
            found.append(Assignment(path, _value(environ[name], shown), f"environment {shown}"))
    return found


def _flag(text: str) -> Assignment:
    key, equals, value = text.partition("=")
    if not equals or not key:
        path = tuple(key.split("."))
        shown = f" {_dotted(path)}" if path[0] in Config.model_fields else ""  # what is no key may be a secret
        raise ConfigError(f"--set{shown}: should be KEY=VALUE, such as scheduler.use=continuous.")
    path = tuple(key.strip().split("."))
    return Assignment(path, _value(value, f"--set {_dotted(path)}"), "flag")


def _value(text: str, where: str) -> Any:
    try:
        return parse_yaml(text)
    except ParseError as error:
        raise ConfigError(f"{where}: the value is no YAML; quote it. ({error})") from None


def _assign(values: dict[str, Any], sources: dict[str, str], assignment: Assignment) -> list[str]:
    """Set one value, replacing what lies at its path; a mapping for a mapping does so key by key. Returns warnings."""
    warnings, placed = [], []
    for single in _single(values, assignment):
        path, renamed = _current_path(single.path, single.source)
        warnings += renamed
        section = values
        for depth in range(1, len(path)):
            section = _section(section, path[:depth], assignment)
        if isinstance(single.value, str) and _names_component(path, section.get(path[-1])):
            section, path = _section(section, path, assignment), (*path, "use")  # the other keys beside it stay
        _make_way(section, sources, _dotted(path), single.source)
        placed.append((section, path, single.value))
    for section, path, value in placed:  # behind all the ways, so that a mapping that holds both of a pair is refused
        section[path[-1]] = value
        dotted = _dotted(path)
        for old in [key for key in sources if key.startswith((f"{dotted}.", f"{dotted}["))]:
            del sources[old]
        sources |= {dotted: assignment.source}
    return warnings


def _single(values: Mapping[str, Any], assignment: Assignment) -> Iterator[Assignment]:
    """Of a mapping one assignment a key, where a mapping, a component's bare name or nothing lies at its path; secret
    mappings count as one value."""
    path, value, source = assignment
    there: Any = values
    for key in path:
        there = there.get(key) if isinstance(there, dict) else None
    named = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if named and not SECRET_KEY.search(path[-1]) and (isinstance(there, (dict, str)) or (there is None and value)):
        for key, inner in value.items():
            yield from _single(values, Assignment((*path, key), inner, source))
    else:
        yield assignment


def _make_way(section: dict[str, Any], sources: dict[str, str], dotted: str, source: str) -> None:
    """Take out what a value at ``dotted`` excludes."""
    for pair in ALTERNATIVES:
        if dotted in pair:
            other = pair[1 - pair.index(dotted)]
            section.pop(other.rpartition(".")[2], None)
            sources.pop(other, None)
    if dotted in ALTERNATIVES[0] and _layer(sources.get("model.revision", "flag")) < _layer(source):
        section.pop("revision", None)  # it was that of another model
        sources.pop("model.revision", None)


def _names_component(path: tuple[str, ...], value: Any) -> bool:
    """Whether a bare name at ``path`` names the component there, where ``value`` lies until now."""
    if len(path) == 1:
        return path[0] in SECTIONS and path[0] != "model"
    return isinstance(value, dict) and "use" in value


def _section(parent: dict[str, Any], path: tuple[str, ...], assignment: Assignment) -> dict[str, Any]:
    """The mapping at the last key of ``path``, made where there is none; a bare name is spelt out."""
    value = parent.get(path[-1])
    if value is None:
        value = {}
    elif isinstance(value, str):
        value = _spelt_out(".".join(path), value)
    elif not isinstance(value, dict):
        what = "a list; give it whole" if isinstance(value, list) else "a single value"
        message = f"cannot be set by {assignment.source}: {_dotted(path)} is {what}."
        raise ConfigError(message, _dotted(assignment.path))
    parent[path[-1]] = value
    return value


def _dotted(path: tuple[str, ...]) -> str:
    """As a config path, up to a secret."""
    return join("", *public(path))


def _spelt_out(path: str, bare_name: str) -> dict[str, Any]:
    return {"name" if path == "model" else "use": bare_name}


def _rename(values: dict[str, Any], sources: dict[str, str]) -> list[str]:
    """Move values from renamed keys to the new ones, in place. Returns warnings."""
    _refuse_both_names(sources)
    warnings = []
    for old, new in RENAMED.items():
        source = sources.pop(old, None)
        if source is None:
            continue
        *outer, key = old.split(".")
        section = values
        for part in outer:
            section = section[part]
        value = section.pop(key)
        _assign(values, sources, Assignment(tuple(new.split(".")), value, source))
        warnings.append(_renamed(old, new, source))
    return warnings


def _refuse_both_names(given: Container[str]) -> None:
    """Of one source; between two, the later one wins."""
    for old, new in RENAMED.items():
        if old in given and new in given:
            raise ConfigError(f"is the old name of '{new}', which is given, too; keep the new one.", old)


def _current_path(path: tuple[str, ...], source: str) -> tuple[tuple[str, ...], list[str]]:
    old = ".".join(path)
    if old not in RENAMED:
        return path, []
    return tuple(RENAMED[old].split(".")), [_renamed(old, RENAMED[old], source)]


def _renamed(old: str, new: str, source: str) -> str:
    return f"'{old}' ({source}) is now called '{new}'; the old name will be refused after two minor releases"


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The dotted path of every value that is not a mapping itself; secret mappings count as one value."""
    for key, value in values.items():
        path = join(prefix, str(key))
        if isinstance(value, Mapping) and value and not SECRET_KEY.search(str(key)):
            yield from _leaves(value, path)
        else:
            yield path


def _with_source(problem: Problem, sources: Mapping[str, str]) -> Problem:
    """Say where a wrong value came from, unless it is in the file that the user has at hand."""
    path = problem.path
    given = {source for key, source in sources.items() if key == path or key.startswith(f"{path}.")}
    foreign = sorted(source for source in given if source.startswith("environment"))
    if not foreign:
        return problem
    meant = {key.replace(".", "_"): key for key in [*known_keys().values(), *(f"{name}.use" for name in SECTIONS)]}
    hint = ""
    if path in meant and meant[path] != path:
        hint = f"; two underscores are a dot: {ENVIRONMENT_PREFIX}{meant[path].replace('.', '__').upper()}"
    return Problem(path, f"{problem.message} (Given by {', '.join(foreign)}{hint}.)")
