"""Reads config files: YAML (JSON is YAML, too) and TOML, into plain values."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from hotswap.core.errors import ConfigError

_TOO_DEEP = "it is nested too deeply"
_QUOTED = re.compile(r"""(['"(]).*?['")]""")
_HARMLESS = re.compile(r"""(['"])(<[a-z ]+>|[^\w]{1,3}|\\t)\1""")


class ParseError(Exception):
    """What is wrong with a text and at which line and column. Never shows the text: it may be a secret."""


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML, JSON or TOML file. ConfigError says where it cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file '{path}': {reason}.") from error
    try:
        values = _parse_toml(text) if path.suffix == ".toml" else parse_yaml(text)
    except ParseError as error:
        raise ConfigError(f"cannot parse the config file '{path}': {error}.") from None
    if values is None:
        raise ConfigError(f"the config file '{path}' is empty; at least a model is needed ('model: NAME').")
    if not isinstance(values, dict):
        what = "a list" if isinstance(values, list) else "a single value"
        raise ConfigError(f"the config file '{path}' should hold keys and values ('model: NAME'), not {what}.")
    return values


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what, _, where = str(error).partition(" (at ")
        raise ParseError(_unquoted(what) + (f", {where.rstrip(')')}" if where else "")) from None
    except ValueError:
        raise ParseError("a number has too many digits") from None
    except RecursionError:
        raise ParseError(_TOO_DEEP) from None


def parse_yaml(text: str) -> Any:
    """The value of a YAML document, plain types only. A key given twice is an error; ``1e-5`` is a number.

    Raises ParseError, for whatever is wrong.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        raise ParseError(f"the character at position {error.position} cannot stand in YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ParseError(_unquoted(error.problem or error.context or "it is no YAML") + where) from None
    except RecursionError:
        raise ParseError(_TOO_DEEP) from None


def _unquoted(problem: str) -> str:
    """A parser's words up to where they quote the text; names of tokens ("<scalar>") and punctuation may stay."""
    kept = 0
    for quoted in _QUOTED.finditer(problem):
        if not _HARMLESS.fullmatch(quoted[0]):
            return problem[:quoted.start()].rstrip(" (:").removesuffix(", but found")
        kept = quoted.end()
    return problem if not set("'\"") & set(problem[kept:]) else problem[:kept]


class _Loader(yaml.SafeLoader):
    """Builds depth first, so that a value that contains itself is an error; PyYAML would tie the knot."""

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # a 13th month; ``!!bool x``
            problem = "what looks like a number, a date or a truth value is none; quote it"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: Any, deep: bool = True) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "a key is given twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping

    def construct_sequence(self, node: Any, deep: bool = True) -> list[Any]:
        return super().construct_sequence(node, deep)


_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.construct_sequence)
# YAML 1.1, which PyYAML reads, wants a dot in every number with an exponent.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789"))
