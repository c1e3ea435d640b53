"""``hotswap explain``: what a decision log tells of a request, or of them all."""

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from hotswap.core.errors import ConfigError
from hotswap.lab.decisions.lives import Journey, Phase, journeys, lives
from hotswap.lab.decisions.log import Log, open_logs
from hotswap.lab.decisions.overview import Overview, overviews
from hotswap.lab.decisions.perfetto import write
from hotswap.lab.decisions.story import Chapter, chapters
from hotswap.server.commands.table import counted, table

COMPARED = 20_000
"""Of a log with more requests, an unknown id is compared with these first ones only."""


@click.command("explain")
@click.argument("paths", metavar="LOG...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--request", "request_id", metavar="ID", help="Tell what happened to this request, step by step.")
@click.option("--slowest", default=10, show_default=True, type=click.IntRange(1), help="How many requests to list.")
@click.option("--perfetto", "timeline", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Write a timeline for ui.perfetto.dev or chrome://tracing.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.pass_context
def command(
    ctx: click.Context, paths: tuple[Path, ...], request_id: str | None, slowest: int, timeline: Path | None,
    as_json: bool,
) -> None:
    """Say where the time of a request went, and why it waited.

    LOG is what the observer decision_log has written; several, where there are several replicas or a log was rotated.
    Without --request: the slowest requests, and where time went as a whole. Exit code 2 where the log cannot be used,
    or is cut in the middle of a line: what is before that is told.
    """
    logs = open_logs(paths)
    if timeline is not None:
        count = write(logs, timeline)
        click.echo(f"{count} events in {timeline}: open it in ui.perfetto.dev", err=True)
    if request_id is None and timeline is None:
        found = overviews(logs)
        ended = journeys(life for one in found for life in one.lives)
        click.echo(json.dumps(_plain_overview(found, ended)) if as_json else _overview_text(found, ended, slowest))
    elif request_id is not None:
        chosen = _choose(logs, request_id)
        told = [(journey, _told(logs, journey)) for journey in chosen]
        click.echo(json.dumps([_plain_journey(*each) for each in told]) if as_json
                   else "\n\n".join(_journey_text(*each) for each in told))
    _say_notes(logs)
    if any(log.cut for log in logs):
        ctx.exit(2)


def _say_notes(logs: Iterable[Log]) -> None:
    for log in logs:
        for note in log.notes():
            click.echo(f"note: {note}", err=True)


def _choose(logs: Sequence[Log], wanted: str) -> list[Journey]:
    """The journeys of that id; of "chatcmpl-1", which clients see, those of its choices, "chatcmpl-1-0" and so on."""
    known = journeys(life for log in logs for life in lives(log))
    found = [journey for journey in known if journey.id == wanted] or [
        journey for journey in known if journey.id.rpartition("-")[0] == wanted]
    if not found:
        near = get_close_matches(wanted, [journey.id for journey in known[:COMPARED]], n=3, cutoff=0.3)
        hint = f" Near to it: {', '.join(near)}." if near else ""
        raise ConfigError(f"no request {wanted!r} among the {len(known)} of the log.{hint}", "--request")
    return found


def _told(logs: Sequence[Log], journey: Journey) -> list[tuple[str, Chapter]]:
    """What each engine's log tells, in order of time, with the engine's name."""
    by_replica = {log.replica: log for log in logs}
    told = [(life.replica, chapter) for life in journey.lives
            for chapter in chapters(by_replica[life.replica], life.id)
            if life.arrived <= chapter.begin <= life.last]
    return sorted(told, key=lambda each: each[1].begin)


# one request

def _journey_text(journey: Journey, told: list[tuple[str, Chapter]]) -> str:
    where = f" in engine {journey.replica}" if journey.replica else ""
    state = f"ended with {journey.reason}" if journey.reason else "not ended when the log does"
    begin = journey.lives[0].arrived
    rows = [
        (f"+{_ms(chapter.begin - begin)}", _steps(chapter), *([replica] if journey.replica else []), _sentence(chapter))
        for replica, chapter in told]
    head = ("at", "step", *(["engine"] if journey.replica else []), "what")
    return "\n".join([
        f"request {journey.id}{where}: {_ms(journey.latency)}, {journey.prompt_length} prompt tokens, "
        f"{journey.output_length} generated, {state}", "", _split_text(journey.seconds(), journey.latency), "",
        table(head, rows)])


def _split_text(seconds: Mapping[Phase, float], latency: float) -> str:
    def share(phase: Phase) -> str:
        return f"{100 * seconds[phase] / latency:.1f} %" if latency else ""

    return table([phase.value for phase in Phase], [
        [_ms(seconds[phase]) for phase in Phase], [share(phase) for phase in Phase]])


def _steps(chapter: Chapter) -> str:
    if chapter.steps is None:
        return ""
    first, last = chapter.steps
    return str(first) if first == last else f"{first}-{last}"


def _sentence(chapter: Chapter) -> str:
    lasted = _ms(chapter.end - chapter.begin)
    match chapter.what:
        case "waits":
            rows, tokens = chapter.others
            meanwhile = f", meanwhile {counted(tokens, 'token')} of others in {counted(rows, 'row')}" if rows else ""
            return f"waits {lasted}: {chapter.text} ({counted(chapter.plans, 'plan')}{meanwhile})"
        case "computes":
            return (f"computes {counted(chapter.tokens, 'known token')} in {counted(chapter.n_steps, 'step')}, {lasted}"
                    f"{_kept(chapter)}")
        case "decodes":
            missed = "; ".join(f"{counted(plans, 'plan')} without it: {reason}"
                               for reason, plans in chapter.missed.most_common())
            return (f"decodes in {counted(chapter.n_steps, 'step')}, {lasted}{_kept(chapter)}"
                    f"{f'; {missed}' if missed else ''}")
        case _:
            return chapter.text


def _kept(chapter: Chapter) -> str:
    drafts = f", {chapter.accepted} of {chapter.drafted} drafts accepted" if chapter.drafted else ""
    return f": {counted(chapter.kept, 'new token')}{drafts}" if chapter.kept else ""


def _plain_journey(journey: Journey, told: list[tuple[str, Chapter]]) -> dict[str, Any]:
    begin = journey.lives[0].arrived
    return {
        **_plain_summary(journey),
        "chapters": [
            {"engine": replica, "what": chapter.what, "at_s": chapter.begin - begin, "until_s": chapter.end - begin,
             "steps": chapter.steps, "text": _sentence(chapter)} for replica, chapter in told]}


def _plain_summary(journey: Journey) -> dict[str, Any]:
    return {
        "id": journey.id, "engine": journey.replica, "latency_s": journey.latency, "ended": journey.reason,
        "prompt_tokens": journey.prompt_length, "output_tokens": journey.output_length,
        "preemptions": journey.preemptions,
        "seconds": {phase.value: seconds for phase, seconds in journey.seconds().items()}}


# all of them

def _overview_text(found: Sequence[Overview], ended: Sequence[Journey], slowest: int) -> str:
    if not ended:
        return "the log tells of no request"
    totals = {phase: sum(journey.seconds()[phase] for journey in ended) for phase in Phase}
    open_ones = sum(journey.reason is None for journey in ended)
    parts = [
        f"{counted(len(ended), 'request')}{f', {open_ones} of them without an end' if open_ones else ''}; where their "
        "time went:", _split_text(totals, sum(totals.values())), *(_engine_text(one) for one in found)]
    slow = sorted(ended, key=lambda journey: journey.latency, reverse=True)[:slowest]
    several = any(journey.replica for journey in slow)
    head = ["request", *(["engine"] if several else []), "latency", *(phase.value for phase in Phase), "prompt", "new",
            "end"]
    rows = []
    for journey in slow:
        seconds = journey.seconds()
        rows.append([
            journey.id, *([journey.replica] if several else []), _ms(journey.latency),
            *(_ms(seconds[phase]) for phase in Phase), str(journey.prompt_length), str(journey.output_length),
            journey.reason or "-"])
    return "\n\n".join([*parts, "the slowest:\n" + table(head, rows)])


def _engine_text(one: Overview) -> str:
    name = f"engine {one.replica}: " if one.replica else "the engine: "
    busy = 100 * one.busy / one.seconds if one.seconds else 0.0
    steps = max(1, one.steps)
    lines = [
        f"{name}{counted(one.steps, 'step')} in {one.seconds:.1f} s, busy {busy:.0f} % of it; a step has "
        f"{one.rows / steps:.1f} rows and {one.tokens / steps:.1f} tokens, planning takes {_ms(one.planning / steps)}"]
    if one.drafted:
        lines.append(f"  drafts: {one.accepted} of {one.drafted} accepted")
    if one.suspensions:
        told = ", ".join(f"{count} by {mode}" for mode, count in one.suspensions.most_common())
        lines.append(f"  suspended: {told}")
    if one.failed_plans:
        lines.append(f"  {counted(one.failed_plans, 'plan')} failed")
    if one.parts:
        told = ", ".join(f"{part} {_ms(seconds / steps)}" for part, seconds in one.parts.items())
        lines.append(f"  a step on the worker: {told}")
    if one.held:
        worst = sorted(one.held.items(), key=lambda each: each[1], reverse=True)[:5]
        lines.append("  held, summed over requests: " + "; ".join(
            f"{_ms(seconds)} {reason}" for reason, seconds in worst))
    return "\n".join(lines)


def _plain_overview(found: Sequence[Overview], ended: Sequence[Journey]) -> dict[str, Any]:
    engines = [
        {"engine": one.replica, "seconds": one.seconds, "busy": one.busy, "planning": one.planning, "steps": one.steps,
         "rows": one.rows, "tokens": one.tokens, "kept": one.kept, "drafted": one.drafted, "accepted": one.accepted,
         "suspensions": one.suspensions, "worker": one.parts, "held": one.held, "empty_plans": one.empty_plans,
         "failed_plans": one.failed_plans,
         "notes": one.notes} for one in found]
    return {"engines": engines, "requests": [_plain_summary(journey) for journey in ended]}


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms" if seconds < 10 else (
        f"{seconds:.1f} s")
