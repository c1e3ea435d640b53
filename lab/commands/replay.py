"""``hotswap replay``: makes the decisions of a log again, and says whether they are the same."""

import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from hotswap.lab.decisions.again import Outcome, replay
from hotswap.lab.decisions.log import open_logs
from hotswap.server.commands.table import counted

WHAT = {"plan": "another plan is made for", "cache": "the cache is filled otherwise after",
        "endings": "requests end otherwise in"}

STOPPED = 3
"""Exit code of a replay that found no difference and did not come to the end."""


@click.command("replay")
@click.argument("paths", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def command(ctx: click.Context, paths: tuple[Path, ...], as_json: bool) -> None:
    """Feed what a decision log recorded to the same scheduler and KV manager, without the model, and compare.

    Exit code 0: every decision is the same. 1: one is not; the first is shown. 2: the log or a part that it names
    cannot be used, or the log is cut in the middle of a line, though all before that is the same. 3: the decisions are
    the same as far as they can be made again, which is not to the log's end.
    """
    ours = logging.getLogger("hotswap")
    ctx.call_on_close(partial(ours.setLevel, ours.level))
    ours.setLevel(logging.CRITICAL)  # what the parts raised then, they raise again
    logs = open_logs(paths)
    outcomes = [replay(log) for log in logs]
    if as_json:
        click.echo(json.dumps([_plain(outcome) for outcome in outcomes]))
    else:
        for outcome in outcomes:
            click.echo("\n".join(_text(outcome)))
    if not all(outcome.equal for outcome in outcomes):
        ctx.exit(1)
    if any(log.cut for log in logs):
        ctx.exit(2)
    ctx.exit(STOPPED if any(outcome.stopped is not None for outcome in outcomes) else 0)


def _text(outcome: Outcome) -> Iterator[str]:
    where = f"engine {outcome.replica}: " if outcome.replica else ""
    told = f"{counted(outcome.steps, 'step')} of {counted(outcome.requests, 'request')}"
    if (divergence := outcome.divergence) is not None:
        yield f"{where}after {told} that came out the same, {WHAT[divergence.what]} step {divergence.step}:"
        for key in dict.fromkeys([*divergence.logged, *divergence.replayed]):
            logged, replayed = divergence.logged.get(key), divergence.replayed.get(key)
            if logged != replayed:
                yield f"  {key}\n    logged    {json.dumps(logged)}\n    replayed  {json.dumps(replayed)}"
    elif outcome.broke is not None:
        yield f"{where}after {told} that came out the same, a part raised what it did not raise then, {outcome.broke}"
    else:
        until = "" if outcome.until is None else f" up to event {outcome.until}"
        yield f"{where}{told}{until}: every decision is the same"
    if outcome.stopped is not None:
        yield f"  {outcome.stopped}"
    for note in outcome.notes:
        yield f"  note: {note}"


def _plain(outcome: Outcome) -> dict[str, Any]:
    divergence = outcome.divergence
    return {
        "engine": outcome.replica, "equal": outcome.equal, "steps": outcome.steps, "requests": outcome.requests,
        "divergence": None if divergence is None else divergence._asdict(), "broke": outcome.broke,
        "stopped": outcome.stopped, "until": outcome.until, "notes": list(outcome.notes)}
