"""What the subcommands that read a config have in common."""

import logging
from collections.abc import Callable
from typing import Any

import click

from hotswap.core.config import ResolvedConfig

Command = Callable[..., Any]


sets_values = click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE",
    help="Set one value, as in --set scheduler.use=continuous; beats the environment and the file.")


def reads_config(command: Command) -> Command:
    """Adds the argument CONFIG and the option --set."""
    return click.argument("config", metavar="CONFIG")(sets_values(command))


def warn(resolved: ResolvedConfig) -> None:
    """What the operator should read, on stderr; a server logs it."""
    for warning in resolved.warnings:
        click.echo(f"warning: {warning}", err=True)


def log_to_stderr() -> None:
    """Our own notices, and the warnings of everybody."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("hotswap").setLevel(logging.INFO)
