"""``hotswap ab``: arms of one base against each other."""

import shlex
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
@click.option("--minutes", type=click.FloatRange(min=0, min_open=True), help="No longer than this.")
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
    for file in files:
        folder = out / file.stem if out is not None and source.is_dir() else out
        values = short(file, arms, urls) if arms or urls else read_file(file)
        given = {**values, **changes, **({} if folder is None else {"out": str(folder)})}
        name = str(given.get("name") or file.stem)
        if name in plans:
            raise ConfigError(f"{file}: another experiment of the folder is called {name!r}, too", "name")
        plans[name] = _plan(given, file, len(files) > 1)
    results = {name: _run(plan) for name, plan in plans.items()}
    if source.is_dir():
        _tell_all(results, out)
    if any(result.partial for result in results.values()):
        ctx.exit(1)


def needs_extra() -> None:
    """ConfigError where what judges an experiment is not installed, before anything is measured."""
    if find_spec("scipy") is None:
        raise ConfigError("hotswap ab needs scipy, which the extra 'lab' brings: pip install 'hotswap[lab]'")


def short(base: Path, arms: tuple[str, ...], urls: tuple[str, ...] = ()) -> dict[str, Any]:
    """An experiment that needs no file."""
    named: dict[str, dict[str, Any]] = {
        "+".join(shlex.split(text)).replace("/", ":"): assignments("--arm", shlex.split(text)) for text in arms}
    named |= {_host(url): {"url": url} for url in urls}
    if len(named) < len(arms) + len(urls):
        raise ConfigError("an arm is given twice", "--arm")
    against = {"against": next(iter(named))} if len(named) > 1 else {}
    return {"base": base.name, "arms": named, **against, **SHORT}


def _host(url: str) -> str:
    return urlsplit(url).netloc or url


def _plan(given: dict[str, Any], file: Path, one_of_many: bool) -> "Plan":
    """Of several experiments each is refused before the first is run."""
    from hotswap.lab.experiment import load_experiment
    from hotswap.lab.plan import make_plan

    try:
        plan = make_plan(load_experiment(given, file.parent))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error if one_of_many else error
    click.echo(yaml.safe_dump(redact(given), sort_keys=False), err=True)
    return plan


def _run(plan: "Plan") -> "Result":
    from hotswap.lab.conduct import conduct

    try:
        return conduct(plan, click.echo)
    except ConfigError:
        raise
    except HotswapError as error:  # an arm's server did not start
        raise click.ClickException(str(error)) from error


def _tell_all(results: dict[str, "Result"], out: Path | None) -> None:
    """The table of all experiments; with a folder for the results, as a file there, too."""
    from hotswap.lab.report.overview import render_overview

    text = render_overview(results)
    click.echo(text)
    if out is not None:
        (out / OVERVIEW).write_text(text, "utf-8")
        click.echo(f"written: {out / OVERVIEW}")
