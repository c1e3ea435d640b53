"""The ``hotswap`` command. Each subcommand's module is imported when it is called. Torch comes with a model, or with a
component that is named and needs it; listing the plugins imports neither."""

import importlib
from typing import Any

import click

from hotswap import __version__
from hotswap.core.errors import ConfigError, EngineStoppedError, LoopTimeoutError

COMMANDS = {
    **{name: f"hotswap.server.commands.{name}" for name in ("serve", "generate", "exchange", "config", "plugins")},
    **{name: f"hotswap.lab.commands.{name}" for name in ("ab", "bench", "explain", "replay")},
}


class LazyGroup(click.Group):
    """Knows its subcommands by name only. A ConfigError, wherever it comes from, is one message and exit code 2;
    workers that end while they start, or do not answer, are one message, beside what they wrote, and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name]).command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            click.echo(f"hotswap: {error}", err=True)
            ctx.exit(2)
        except (EngineStoppedError, LoopTimeoutError) as error:
            click.echo(f"hotswap: {error}", err=True)
            ctx.exit(1)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hotswap", message="%(prog)s %(version)s")
def main() -> None:
    """An LLM serving engine whose parts can be exchanged."""
