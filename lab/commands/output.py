"""The JSON file that a command writes what it measured into."""

import json
from pathlib import Path
from typing import Any

import click

from hotswap.core.errors import ConfigError


def writable(file: Path, option: str) -> Path:
    """``file``, which is there from now on. ConfigError that names ``option`` where it cannot be written: found out
    before anything is measured."""
    try:
        with file.open("a", encoding="utf-8"):
            return file
    except OSError as error:
        raise ConfigError(_refusal(file, error), option) from error


def write(file: Path, values: dict[str, Any], indent: int | None = None) -> None:
    """ClickException where it cannot be written any more: what was measured has been told by then."""
    try:
        file.write_text(json.dumps(values, indent=indent, default=str) + "\n", "utf-8")
    except OSError as error:
        raise click.ClickException(_refusal(file, error)) from error


def _refusal(file: Path, error: OSError) -> str:
    return f"{file} cannot be written: {error.strerror or error}"
