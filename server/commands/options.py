"""What subcommands that read a config have in common."""

from collections.abc import Callable, Iterable
from typing import Any

import click

from hotswap.core.config import ResolvedConfig, load_config

Command = Callable[..., Any]


def reads_config(command: Command) -> Command:
    """Adds the argument CONFIG and the option --set."""
    command = click.option(
        "--set", "sets", multiple=True, metavar="KEY=VALUE",
        help="Set one value, as in --set scheduler.use=continuous; beats the environment and the file.",
    )(command)
    return click.argument("config", metavar="CONFIG")(command)


def read_config(config: str, sets: Iterable[str]) -> ResolvedConfig:
    """The config with environment and flags on top; warnings go to stderr."""
    resolved = load_config(config, sets)
    for warning in resolved.warnings:
        click.echo(f"hotswap: warning: {warning}", err=True)
    return resolved
