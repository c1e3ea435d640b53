"""``hotswap config check``, ``show`` and ``schema``."""

import json

import click

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.config.describe import rows
from hotswap.core.config.json_schema import json_schema
from hotswap.core.registry import Registry
from hotswap.server.commands.options import reads_config, sets_values, warn
from hotswap.server.commands.table import table


@click.group("config")
def command() -> None:
    """Check, show or describe a config."""


@command.command()
@reads_config
def check(config: str, sets: tuple[str, ...]) -> None:
    """Say whether CONFIG can work, before any memory is used."""
    from hotswap.core.execution.device import check_device  # here, since it imports torch

    resolved = load_config(config, sets)
    check_device(resolved.config.device)
    components = check_config(resolved.config, Registry())
    for note in (*resolved.warnings, *components.notes):
        click.echo(f"note: {note}")
    listed = [(path, part.label, part.origin.distribution if part.origin else "") for path, part in components.walk()]
    click.echo(table(["path", "component", "package"], listed))
    click.echo("No problem found. What depends on the checkpoint is checked when it is loaded.")


@command.command()
@reads_config
@click.option("--json", "as_json", is_flag=True, help="One object a value: path, value, source.")
def show(config: str, sets: tuple[str, ...], as_json: bool) -> None:
    """Print every value of CONFIG and where it came from: default, file, environment or flag."""
    resolved = load_config(config, sets)
    warn(resolved)
    shown = list(rows(resolved, Registry()))
    if as_json:
        click.echo(json.dumps([row._asdict() for row in shown], indent=2))
    else:
        click.echo(table(["key", "value", "source"], [(r.path, json.dumps(r.value), r.source) for r in shown]))


@command.command()
@click.argument("config", metavar="[CONFIG]", required=False)
@sets_values
@click.option("--all", "everything", is_flag=True, help="With the options of every installed component.")
def schema(config: str | None, sets: tuple[str, ...], everything: bool) -> None:
    """Print the JSON schema of a config, with the options of the components that CONFIG names."""
    if (config is None) == (not everything):
        raise click.UsageError("give CONFIG or --all.")
    if sets and config is None:
        raise click.UsageError("--set needs a CONFIG; --all takes every component as it is.")
    chosen = None if config is None else load_config(config, sets).config
    click.echo(json.dumps(json_schema(Registry(), chosen), indent=2))
