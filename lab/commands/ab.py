"""``hotswap ab``: arms of one base against each other."""

import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click
import yaml

from hotswap.core.config.files import read_file
from hotswap.core.errors import ConfigError, HotswapError
from hotswap.core.explain import redact
from hotswap.lab.commands.assignments import assignments
from hotswap.server.commands.options import log_to_stderr

if TYPE_CHECKING:
    from hotswap.lab.plan import Plan
    from hotswap.lab.records import Result

OVERVIEW = "overview.md"
SHORT = {
    "workload": {"use": "synthetic", "prompt": 64, "output": 16},
    "load": {"concurrency": 4},
    "sampling": {"temperature": 0.0, "ignore_eos": True},
}
"""What an experiment without a file is made of, beside its base and its arms; printed, and kept with the results."""


@click.command("ab")
@click.argument("source", metavar="EXPERIMENT|BASE|FOLDER", type=click.Path(path_type=Path))
@click.option("--arm", "arms", multiple=True, metavar="KEY=VALUE",
              help="SOURCE is a base config, and this an arm: what --set would change, several in one quoted text. "
              "One arm is compared with the base as it is; of several, the others with the first.")
@click.option("--url", "urls", multiple=True, help="An arm that is a server with OpenAI's routes and the base's model.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="The folder for records and report.")
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True),
              help="No longer than this; by default the experiment's own, or 10.")
@click.pass_context
def command(
    ctx: click.Context, source: Path, arms: tuple[str, ...], urls: tuple[str, ...], out: Path | None,
    minutes: float | None,
) -> None:
    """Run an experiment: arms take turns at the same requests, and each metric gets a verdict.

    A FOLDER is run file by file, and ends in one table of all. Exit code 1 where a run ended before its time.
    """
    needs_extra()
    log_to_stderr()
    changes: dict[str, Any] = {} if minutes is None else {"minutes": minutes}
    if (arms or urls) and source.is_dir():
        raise click.UsageError("--arm and --url need a base config, and this is a folder.")
    files = sorted(source.glob("*.yaml")) if source.is_dir() else [source]
    if not files:
        raise ConfigError(f"there is no experiment (*.yaml) in {source}")
    plans = {}
    refused = []
    for file in files:
        folder = out / file.stem if out is not None and source.is_dir() else out
        values = short(file, arms, urls) if arms or urls else read_file(file)
        given = {**values, **changes, **({} if folder is None else {"out": str(folder)})}
        name = str(given.get("name") or file.stem)
        if name in plans:
            raise ConfigError(f"{file}: another experiment of the folder is called {name!r}, too", "name")
        try:
            plans[name] = _plan(given, file)
        except ConfigError as error:
            refused.append(f"{file}: {error}")
    if refused:
        raise ConfigError("\n".join(refused))
    results = _run_all(plans, out) if source.is_dir() else [_run(plan) for plan in plans.values()]
    if any(result.partial for result in results):
        ctx.exit(1)


def needs_extra() -> None:
    """ConfigError where what judges an experiment is not installed, before anything is measured."""
    if find_spec("scipy") is None:
        raise ConfigError("hotswap ab needs scipy, which the extra 'lab' brings: pip install 'hotswap[lab]'")


def short(base: Path, arms: tuple[str, ...], urls: tuple[str, ...] = ()) -> dict[str, Any]:
    """An experiment that needs no file."""
    named: dict[str, dict[str, Any]] = {
        "+".join(words).replace("/", ":"): assignments("--arm", words) for words in map(_words, arms)}
    named |= {_host(url): {"url": url} for url in urls}
    if len(named) < len(arms) + len(urls):
        raise ConfigError("an arm is given twice", "--arm")
    against = {"against": next(iter(named))} if len(named) > 1 else {}
    return {"base": base.name, "arms": named, **against, **SHORT}


def _words(arm: str) -> list[str]:
    """Its changes, as a shell would divide them."""
    try:
        return shlex.split(arm)
    except ValueError as error:
        raise ConfigError(f"{arm!r} cannot be divided into changes: {error}", "--arm") from error


def _host(url: str) -> str:
    try:
        return urlsplit(url).netloc or url
    except ValueError:  # it is refused later, with its reason
        return url


def _plan(given: dict[str, Any], file: Path) -> "Plan":
    """ConfigError for all that is wrong with it."""
    from hotswap.lab.experiment import load_experiment
    from hotswap.lab.plan import make_plan, refusals

    plan = make_plan(load_experiment(given, file.parent, refusals))
    click.echo(yaml.safe_dump(redact(given), sort_keys=False), err=True)
    return plan


def _run_all(plans: Mapping[str, "Plan"], out: Path | None) -> list["Result"]:
    """One after the other. What ends one of them, and the user's interruption, ends them all: what was measured until
    then is told in the table of them."""
    from hotswap.lab.load import INTERRUPTED

    results: dict[str, Result] = {}
    try:
        for name, plan in plans.items():
            results[name] = _run(plan)
            if results[name].stopped == INTERRUPTED:
                break
    finally:
        if results:
            _tell_all(results, out)
        if left := [name for name in plans if name not in results]:
            click.echo(f"hotswap: not run: {', '.join(left)}", err=True)
    return list(results.values())


def _run(plan: "Plan") -> "Result":
    from hotswap.lab.conduct import conduct

    try:
        return conduct(plan, click.echo)
    except ConfigError:
        raise
    except HotswapError as error:  # an arm's server did not start
        raise click.ClickException(str(error)) from error


def _tell_all(results: Mapping[str, "Result"], out: Path | None) -> None:
    """The table of all experiments; with a folder for the results, as a file there, too."""
    from hotswap.lab.report.overview import render_overview

    text = render_overview(results)
    click.echo(text)
    if out is None:
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / OVERVIEW).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{out / OVERVIEW} cannot be written: {error.strerror or error}", "--out") from error
    click.echo(f"written: {out / OVERVIEW}")
