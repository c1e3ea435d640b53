"""``hotswap generate``."""

from pathlib import Path

import click

from hotswap.server.commands.options import read_config, reads_config


@click.command("generate")
@reads_config
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Requests, one JSON a line.")
@click.option("--output", "target", required=True, type=click.Path(path_type=Path), help="Answers, one JSON a line.")
def command(config: str, sets: tuple[str, ...], source: Path, target: Path) -> None:
    """Answer every request of a file, without a server."""
    resolved = read_config(config, sets)
    from hotswap.server.generate import run

    run(resolved, source, target)
