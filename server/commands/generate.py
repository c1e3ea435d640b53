"""``hotswap generate``."""

from pathlib import Path

import click

from hotswap.core.config import load_config
from hotswap.server.commands.options import log_to_stderr, reads_config, warn


@click.command("generate")
@reads_config
@click.option("--input", "source", required=True, type=click.Path(path_type=Path), help="Requests, one JSON a line.")
@click.option("--output", "target", required=True, type=click.Path(path_type=Path), help="Answers, one JSON a line.")
@click.pass_context
def command(ctx: click.Context, config: str, sets: tuple[str, ...], source: Path, target: Path) -> None:
    """Answer every request of a file, without a server. Exit code 1 where some could not be answered."""
    resolved = load_config(config, sets)
    warn(resolved)
    log_to_stderr()
    from hotswap.server.generate import generate_file

    failed = generate_file(resolved, source, target)
    if failed:
        click.echo(f"hotswap: {failed} requests failed; their lines in {target} say why", err=True)
        ctx.exit(1)
