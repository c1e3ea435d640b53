"""``KEY=VALUE`` on the command line, and keys that do not belong there."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from hotswap.core.config.files import ParseError, parse_yaml
from hotswap.core.errors import ConfigError

ASSIGNMENT = "KEY=VALUE"


def assignments(option: str, texts: Iterable[str], *, as_text: bool = False) -> dict[str, Any]:
    """Values are YAML, or stay as they are. ConfigError names the ``option`` that they were given with."""
    values = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigError(f"{text!r} should be {ASSIGNMENT}, such as scheduler=continuous", option)
        try:
            values[key] = value if as_text else parse_yaml(value)
        except ParseError as error:
            raise ConfigError(f"{text!r}: the value is no YAML ({error})", option) from error
    return values


def read_key(file: Path, option: str = "--key-file") -> str:
    """The API key in a file; ``-`` is stdin."""
    try:
        with click.open_file(str(file), encoding="utf-8") as opened:
            return str(opened.read()).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{file} cannot be read: {reason}", option) from error
