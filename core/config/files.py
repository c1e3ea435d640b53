"""Reads config files: YAML (JSON is YAML, too) and TOML, into plain values."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from hotswap.core.errors import ConfigError


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML, JSON or TOML file. ConfigError says where it cannot be parsed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the config file '{path}': {reason}.") from error
    try:
        values = tomllib.loads(text) if path.suffix == ".toml" else parse_yaml(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot parse the config file '{path}': {one_line(error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the config file '{path}' should hold keys and values ('model: NAME'), not {values!r:.60}.")
    return values


def parse_yaml(text: str) -> Any:
    """The value of a YAML document, plain types only. A key given twice is an error; ``1e-5`` is a number.

    Raises yaml.YAMLError, for whatever is wrong.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except (ValueError, RecursionError) as error:  # a 13th month; brackets without end
        raise yaml.YAMLError(str(error)) from error


class _Loader(yaml.SafeLoader):
    """Builds depth first, so that a value that contains itself is an error; PyYAML would tie the knot."""

    def construct_mapping(self, node: Any, deep: bool = True) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                problem = f"the key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
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


def one_line(error: Exception) -> str:
    """A parser's message, which may have drawn a picture."""
    return " ".join(str(error).split())
