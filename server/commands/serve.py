"""``hotswap serve``."""

import json

import click

from hotswap.core.config import load_config
from hotswap.server.commands.options import log_to_stderr, reads_config


@click.command("serve")
@reads_config
@click.option("--host", help="The same as --set server.host=HOST.")
@click.option("--port", type=int, help="The same as --set server.port=PORT.")
def command(config: str, sets: tuple[str, ...], host: str | None, port: int | None) -> None:
    """Answer OpenAI clients with the model that CONFIG names."""
    if host is not None:
        sets = (*sets, f"server.host={json.dumps(host)}")
    if port is not None:
        sets = (*sets, f"server.port={port}")
    resolved = load_config(config, sets)
    log_to_stderr()
    from hotswap.server.run import serve

    serve(resolved)
