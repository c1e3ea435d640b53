"""``hotswap bench``: one engine or server under load."""

from math import isfinite
from pathlib import Path
from typing import Any

import click

from hotswap.core.config import load_config
from hotswap.core.interfaces.component import ComponentRef
from hotswap.lab.commands.assignments import ASSIGNMENT, assignments, read_key
from hotswap.lab.commands.output import writable, write
from hotswap.server.commands.options import log_to_stderr

REQUESTS = 64


@click.command("bench")
@click.argument("config", metavar="[CONFIG]", required=False)
@click.option("--set", "sets", multiple=True, metavar=ASSIGNMENT, help="Set one value of CONFIG.")
@click.option("--url", help="A server with OpenAI's routes. CONFIG, if given, then only names its model's tokenizer.")
@click.option("--model", help="As the server calls it; by default none is named.")
@click.option("--key-file", type=click.Path(path_type=Path, allow_dash=True), help="Its API key; - is stdin.")
@click.option("--reset", is_flag=True, help="Its prefix cache may be emptied; else prompts begin as none before.")
@click.option("--chat", is_flag=True, help="Send the prompts as text to /v1/chat/completions; needs CONFIG.")
@click.option("--workload", default="synthetic", show_default=True, metavar="NAME", help="The workload component.")
@click.option("--option", "options", multiple=True, metavar=ASSIGNMENT, help="One of the workload's options.")
@click.option("--requests", type=click.IntRange(min=1), help="How many. By default 64.")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), help="A window of time instead of a number.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Requests in flight: a closed loop. By default 8.")
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), help="Requests a second: an open loop.")
@click.option("--arrivals", type=click.Choice(["poisson", "constant", "bursty", "workload"]), help="Of an open loop.")
@click.option("--sampling", multiple=True, metavar=ASSIGNMENT, help="A field of every request. No other is sent.")
@click.option("--slo", "slos", multiple=True, metavar="LATENCY=TIME", help="As in ttft=500ms: for goodput.")
@click.option("--warm-up", type=click.IntRange(min=0), default=4, show_default=True, help="Requests not counted.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the workload and the arrivals.")
@click.option("--output", type=click.Path(path_type=Path), help="Write everything measured there, as JSON.")
@click.pass_context
def command(ctx: click.Context, /, output: Path | None, **given: Any) -> None:
    """Put load on the engine that CONFIG describes, or on the server at --url, and tell how it fared.

    Exit code 1 where it ended before its time, or a request failed.
    """
    log_to_stderr()
    bench = _bench(given)
    if output is not None:
        writable(output, "--output")
    from hotswap.core.engine.clock import SystemClock
    from hotswap.lab.bench import BenchError, as_json
    from hotswap.lab.environment import environment
    from hotswap.lab.metrics import failed
    from hotswap.lab.summary import describe

    try:
        measured = bench.run(SystemClock().now, lambda words: click.echo(words, err=True))
    except BenchError as error:
        raise click.ClickException(str(error)) from error
    click.echo(describe([measured.block], bench.slo))
    if output is not None:
        write(output, {"settings": bench.told(), "environment": environment(), **as_json(measured, bench.slo)})
    if measured.shortfall is not None:
        click.echo(f"hotswap: {measured.shortfall}", err=True)
    if measured.shortfall is not None or failed(measured.block.requests):
        ctx.exit(1)


def _bench(given: dict[str, Any]) -> Any:
    from hotswap.lab.bench import Bench
    from hotswap.lab.settings import load_part
    from hotswap.lab.targets.openai import Endpoint

    if given["requests"] is not None and given["seconds"] is not None:
        raise click.UsageError("--requests and --seconds say both how long it lasts; keep one of them.")
    if given["seconds"] is not None and not isfinite(given["seconds"]):
        raise click.UsageError(f"--seconds should be a length of time, not {given['seconds']}.")
    load, slo = load_part({
        "load": {key: given[key] for key in ("concurrency", "rate", "arrivals") if given[key] is not None},
        "slo": assignments("--slo", given["slos"], as_text=True)})
    config = load_config(given["config"], given["sets"]) if given["config"] else None
    sampling = assignments("--sampling", given["sampling"])
    endpoint = None
    if given["url"] is not None:
        key = None if given["key_file"] is None else read_key(given["key_file"])
        endpoint = Endpoint(
            given["url"], given["model"], sampling, chat=given["chat"], api_key=key, reset=given["reset"])
    elif config is None:
        raise click.UsageError("give CONFIG or --url.")
    elif given["model"] or given["chat"] or given["key_file"] or given["reset"]:
        raise click.UsageError("--model, --chat, --key-file and --reset are for servers, which --url names.")
    if given["chat"] and config is None:
        raise click.UsageError("--chat needs CONFIG, whose tokenizer makes text of tokens.")
    if given["sets"] and config is None:
        raise click.UsageError("--set changes CONFIG, and there is none.")
    return Bench(
        config, endpoint, _workload(given), load, given["requests"] or REQUESTS, given["seconds"], sampling, slo,
        given["seed"], given["warm_up"])


def _workload(given: dict[str, Any]) -> ComponentRef:
    options = assignments("--option", given["options"])
    if "use" in options:
        raise click.UsageError("which workload it is says --workload; --option gives its options.")
    return ComponentRef(use=given["workload"], **options)
