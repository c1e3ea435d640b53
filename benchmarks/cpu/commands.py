"""The command line."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from benchmarks.cpu.figures import Run
from benchmarks.cpu.loads import LOADS
from benchmarks.cpu.peers import OURS, ROOT, Engine, read_peers
from benchmarks.cpu.rounds import Plan, run
from benchmarks.cpu.table import as_json, shown_run, tables
from hotswap.core.errors import ConfigError, HotswapError
from hotswap.lab.commands.assignments import assignments
from hotswap.lab.commands.output import writable, write
from hotswap.lab.environment import environment
from hotswap.lab.statistics.signed_rank import QUAD

RESULTS = ROOT / "benchmarks" / "results"
PEERS, CONFIG = (Path(__file__).with_name(name) for name in ("peers.yaml", "hotswap.yaml"))
DEFAULT_LOADS = "single,batch8,mixed,prefix,http"
INDENT = 1
"""Stored results are compared line by line."""


def main() -> None:
    try:
        command(prog_name="benchmarks/cpu")
    except HotswapError as error:
        click.echo(f"benchmarks/cpu: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 1)


def in_turns(function: Callable[..., Any]) -> Callable[..., Any]:
    """What commands that run engines in turns have in common."""
    for option in (
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="A config key of hotswap's engines."),
        click.option("--threads", type=click.IntRange(min=1), help="Of the engines. By default one a core."),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the order of engines."),
        click.option("--quick", is_flag=True, help="A few short requests: does all of it run?"),
        click.option("--out", type=click.Path(path_type=Path), help="For the JSON; by default in benchmarks/results."),
    ):
        function = option(function)
    return function


def of_a_comparison(function: Callable[..., Any]) -> Callable[..., Any]:
    loads = click.option("--loads", default=DEFAULT_LOADS, show_default=True, help=f"Of: {', '.join(LOADS)}.")
    return in_turns(loads(function))


@click.group(invoke_without_command=True)
@click.option("--engines", metavar="NAME,…", help="Of the peers file; by default all that are installed.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--peers", type=click.Path(path_type=Path, exists=True), default=PEERS, help="Which file.")
@click.option("--home", help="Where the peers' environments and weights are, in place of the peers file's.")
@click.option("--peer", "pythons", multiple=True, metavar="NAME=PYTHON", help="An engine's or adapter's own Python.")
@of_a_comparison
@click.pass_context
def command(
    ctx: click.Context, engines: str | None, rounds: int, peers: Path, home: str | None, pythons: Sequence[str],
    **given: Any,
) -> None:
    """Hotswap and its peers on this machine's processor, in turns; or, as a subcommand, something about hotswap alone.

    Prints a table a load: medians and ranges over the rounds. JSON with every run lies beside it.
    """
    if ctx.invoked_subcommand is not None:
        return
    found = read_peers(
        peers, home=home, pythons=assignments("--peer", pythons, as_text=True),
        sets=assignments("--set", given["sets"]), threads=given["threads"])
    chosen = found.chosen(None if engines is None else engines.split(","))
    if engines is None:
        for name, reason in found.missing.items():
            click.echo(f"left out: {name}, since {reason}", err=True)
    runs = measure(chosen, rounds, given)
    click.echo(tables(runs, chosen[0].name))
    ctx.exit(1 if any(run.error is not None for run in runs) else 0)


@command.command("compare")
@click.argument("base")
@click.argument("changed")
@click.option("--rounds", type=click.IntRange(min=2), default=12, show_default=True, help="Taken by twos.")
@of_a_comparison
@click.pass_context
def compare(ctx: click.Context, base: str, changed: str, rounds: int, **given: Any) -> None:
    """Two commits of hotswap against each other; "." is the tree as it lies there."""
    from benchmarks.cpu.compare import HERE, HERE_NAME, arm, checked_out, compared, verdicts

    if base == changed:
        raise ConfigError(f"both are {base!r}: give two commits, or a commit and '.' for the tree as it is", "compare")
    found = read_peers(sets=assignments("--set", given["sets"]), threads=given["threads"])
    ours = found.chosen([OURS])[0]
    names = [HERE_NAME if commit == HERE else commit for commit in (base, changed)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotswap-compare-")))
        arms = [
            arm(ours, name, stack.enter_context(checked_out(commit, folder / place)), folder / f"{place}-metadata")
            for place, commit, name in zip(("base", "changed"), (base, changed), names, strict=True)]
        runs = measure(arms, rounds + rounds % QUAD, given, QUAD)
    click.echo(tables(runs, names[1]))
    click.echo("\n" + verdicts(compared(runs, *names), *names))
    ctx.exit(1 if any(run.error is not None for run in runs) else 0)


@command.command("server")
@click.option("--config", type=click.Path(path_type=Path), default=CONFIG)
@click.option("--arm", "arms", multiple=True, metavar="NAME:KEY=VALUE,…", help="A config to compare; repeat it.")
@click.option("--tiny", is_flag=True, help="A model of next to no size: what is left is the server.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@in_turns
@click.pass_context
def server(
    ctx: click.Context, config: Path, arms: Sequence[str], tiny: bool, rounds: int, **given: Any,
) -> None:
    """What our server gives of the engine's speed, and what it costs; configs in turns, for which is the best."""
    from benchmarks.cpu.server import IDLE_S, LOADS, arms_of, summary, tiny_model, told

    found = read_peers(sets=assignments("--set", given["sets"]), threads=given["threads"])
    with tiny_model(tiny) as folder:
        engines = arms_of(found.chosen([OURS])[0], arms, config, folder)
        runs = measure(engines, rounds, {**given, "loads": LOADS}, idle_s=IDLE_S)
    click.echo(f"{tables(runs, engines[0].name)}\n\n{told(summary(runs))}")
    ctx.exit(1 if any(run.error is not None for run in runs) else 0)


@command.command("ceilings")
@click.option("--config", type=click.Path(path_type=Path), default=CONFIG, help="Whose model's shapes.")
@click.option("--rows", default="1,8,64,512", show_default=True, help="Tokens of a step.")
@click.option("--threads", type=click.IntRange(min=1), help="By default as many as cores.")
@click.option("--quick", is_flag=True, help="As short as can be.")
@click.option("--out", type=click.Path(path_type=Path), help="For the JSON.")
def ceilings(config: Path, rows: str, threads: int | None, quick: bool, out: Path | None) -> None:
    """What this machine can do at most: reading memory, multiplying matrices, all linear layers of a step."""
    from benchmarks.cpu.ceilings import measured, told

    out = writable(out or _result_file("ceilings"), "--out")
    found = measured(config, numbers("--rows", rows), threads, quick)
    click.echo(told(found))
    write(out, {"environment": environment(), "ceilings": found}, INDENT)


@command.command("profile")
@click.option("--config", type=click.Path(path_type=Path), default=CONFIG)
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="A config key.")
@click.option("--rows", default="1,8,64", show_default=True, help="Requests that decode together.")
@click.option("--context", type=click.IntRange(min=1), default=192, show_default=True, help="Tokens of each, about.")
@click.option("--server/--no-server", default=True, help="Whether to measure what the server adds.")
@click.option("--quick", is_flag=True, help="As few steps as can be.")
@click.option("--out", type=click.Path(path_type=Path), help="For the JSON.")
def profile(
    config: Path, sets: Sequence[str], rows: str, context: int, server: bool, quick: bool, out: Path | None,
) -> None:
    """Where the time of a decoding step goes, and how far it is from what the machine allows."""
    from benchmarks.cpu.steps import profiled, told

    out = writable(out or _result_file("profile"), "--out")
    found = profiled(config, sets, numbers("--rows", rows), context, server, quick)
    click.echo(told(found))
    write(out, {"environment": environment(), "profile": found}, INDENT)


@command.command("weights")
@click.option("--home", help="Where to; by default the peers file's.")
@click.option("--model", default="smollm2-135m-instruct", show_default=True, help="A catalogue name, or a .gguf file.")
def weights(home: str | None, model: str) -> None:
    """The model's weights in the forms that the peers read, all made from one file."""
    from benchmarks.cpu.peers import home_of
    from benchmarks.cpu.weights import convert

    for path in convert(model, home_of(home)):
        click.echo(path)


def measure(
    engines: Sequence[Engine], rounds: int, given: dict[str, Any], quick_rounds: int = 1, idle_s: float = 0.0,
) -> list[Run]:
    """All rounds, told as they come and written down after each run: what was measured is not lost."""
    loads = given["loads"].split(",")
    if unknown := [load for load in loads if load not in LOADS]:
        raise ConfigError(f"there is no load {unknown[0]!r}; there are {', '.join(LOADS)}", "--loads")
    out = writable(given["out"] or _result_file("engines"), "--out")
    logs = out.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    plan = Plan(
        engines, loads, quick_rounds if given["quick"] else rounds, logs, given["quick"], given["seed"], idle_s)
    about = {
        "environment": environment(), "rounds": plan.rounds, "quick": plan.quick,
        "engines": {
            engine.name: {"versions": dict(engine.versions), "model": Path(engine.setup.model).name,
                          "cpus": list(engine.setup.cpus), "options": dict(engine.setup.options)}
            for engine in engines}}
    runs: list[Run] = []
    try:
        with closing(run(plan)) as coming:
            for one in coming:
                runs.append(one)
                click.echo(shown_run(one), err=True)
                write(out, {**about, **as_json(runs)}, INDENT)
    except KeyboardInterrupt:
        click.echo("interrupted: the tables hold what was measured", err=True)
    click.echo(f"all runs: {out}; what the engines said: {logs}", err=True)
    return runs


def numbers(option: str, text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{text!r} should be numbers such as 1,8,64", option)
    return found


def _result_file(what: str) -> Path:
    RESULTS.mkdir(exist_ok=True)
    return RESULTS / f"cpu-{what}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json"
