"""Says what is wrong with given values: pydantic's errors as sentences with config paths and nearest names."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from hotswap.core.errors import ConfigError

SECRET_KEY = re.compile(r"^(?!(max|min|num)_)(.*_)?(api_keys?|admin_key|tokens?|secrets?|passwords?|credentials?)$")
"""Keys whose text is never shown; ``max_batch_tokens`` is none, but a number of tokens."""

HIDDEN = "<hidden>"

Location = TypeVar("Location", str, str | int)


class Problem(NamedTuple):
    """One thing that is wrong, at one config path."""

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigProblems(ConfigError):
    """Several things are wrong at once."""

    def __init__(self, problems: list[Problem]) -> None:
        lines = "\n".join(f"  {problem}" for problem in problems)
        super().__init__(f"{len(problems)} problems:\n{lines}")
        self.problems = problems


def raise_problems(problems: list[Problem]) -> None:
    """Raise one ConfigError that tells all ``problems``; nothing where there are none."""
    if len(problems) == 1:
        raise ConfigError(problems[0].message, problems[0].path)
    if problems:
        raise ConfigProblems(problems)


def problems_of(error: ConfigError) -> list[Problem]:
    """What ``error`` tells, one by one."""
    return error.problems if isinstance(error, ConfigProblems) else [Problem(error.path, error.message)]


def nearest(name: str, candidates: Iterable[str], cutoff: float = 0.7) -> str | None:
    """The candidate most like ``name``, whatever hyphens and case. None where none is as like as ``cutoff``, of 1."""
    plain = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    found = difflib.get_close_matches(name.lower().replace("-", "_"), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def join(prefix: str, *parts: str | int) -> str:
    """A config path: ``scheduler.policy``, ``parallel[0].size``."""
    path = prefix
    for part in parts:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def redact(value: Any, key: str = "") -> Any:
    """``value`` with the text under secret keys replaced; numbers stay (``max_batch_tokens`` is no secret)."""
    if SECRET_KEY.search(key) and value and not isinstance(value, (int, float)):
        return HIDDEN
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [redact(item) for item in value]
    return value


def unknown_key(key: str, section: str, valid: Iterable[str], known: Mapping[str, str] | None = None) -> str:
    """Why ``key`` cannot stand in ``section``, and what was probably meant.

    ``valid``: the section's own keys. ``known``: names that somebody may type anywhere -> the path that is meant.
    """
    known = known or {}
    beside = {path.rpartition(".")[2] for path in known.values() if path.rpartition(".")[0] == section}
    valid = sorted({*valid, *beside} or {"use"})  # a component without options
    if key in known:
        meant = known[key]
    elif near := nearest(key, valid):
        meant = join(section, near)
    else:
        meant = known.get(nearest(key, known, cutoff=0.85) or "", "")  # in another section: hardly a typo, if unlike
    hint = f" Did you mean '{meant}'?" if meant else ""
    return f"unknown key.{hint} Valid here: {', '.join(valid)}."


def explain(
    error: ValidationError, model: type[BaseModel], prefix: str = "", known: Mapping[str, str] | None = None,
) -> list[Problem]:
    """Every problem in ``error``, which validating ``model`` for the config path ``prefix`` has raised."""
    problems = []
    for detail in error.errors(include_url=False, include_context=False):
        path = join(prefix, *public(detail["loc"]))
        if detail["type"] == "extra_forbidden":
            *outer, key = detail["loc"]
            message = unknown_key(str(key), join(prefix, *outer), _keys(model, outer), known)
        elif detail["type"] == "missing":
            message = "is required."
        else:
            message = _sentence(detail["msg"], detail["loc"], detail["input"])
        problems.append(Problem(path, message))
    return problems


def public(location: tuple[Location, ...]) -> tuple[Location, ...]:
    """``location`` up to a secret key: what lies below it may be the secret itself."""
    for depth, part in enumerate(location, 1):
        if SECRET_KEY.search(str(part)):
            return location[:depth]
    return location


def _sentence(message: str, location: tuple[str | int, ...], given: Any) -> str:
    if message.startswith("Input should be a valid dictionary or instance of"):
        message = "Input should be a name, or keys and values"
    if message.startswith("Value error, "):  # our own words, which say what was given where that helps
        return message.removeprefix("Value error, ")
    secret = any(SECRET_KEY.search(str(part)) for part in location) and not isinstance(given, (int, float))
    shown = HIDDEN if secret else repr(redact(given))
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return f"{message.replace('Input should be', 'should be')}, not {shown}."


def _keys(model: type[BaseModel], location: Iterable[str | int]) -> list[str]:
    """The keys of the model that lies at ``location`` inside ``model``."""
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue  # an index, or a union's tag
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if _is_model(t)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
