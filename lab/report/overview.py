"""Several experiments in one table: a line for each arm, a column for each metric. In Markdown, for documents."""

from collections.abc import Mapping, Sequence

from hotswap.lab.records import Outcome, Result
from hotswap.lab.report import words
from hotswap.lab.report.content import Row, base_of, divergence_lines, rows, tallies, uncompared

LEGEND = (
    "Effects are changes against the base, with intervals that hold together. **Bold**: better (↑) or worse (↓). "
    "Plain with =: no difference larger than the margin. With ?: not enough data to say.")
_MARKS = {Outcome.BETTER: "↑", Outcome.WORSE: "↓", Outcome.NO_DIFFERENCE: "=", Outcome.NOT_ENOUGH_DATA: "?"}
_OTHERS = "others"


def render_overview(results: Mapping[str, Result]) -> str:
    """A Markdown table of ``results`` by title. Metrics that all of them have get a column, the others share the last
    one."""
    shared = _shared(list(results.values()))
    header = ["experiment", "base", "arm", *shared, _OTHERS]
    lines = [header, ["---"] * len(header)]
    for title, result in results.items():
        for arm, found in rows(result).items():
            cells = {row.metric: _cell(row) for row in found}
            others = "<br>".join(f"{name}: {cell}" for name, cell in cells.items() if name not in shared)
            lines.append([
                _named(title, result), f"`{base_of(result)}`", f"`{arm}`",
                *(cells.get(name, words.NONE) for name in shared), others or words.NONE])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    notes = [note for title, result in results.items() for note in _notes(title, result)]
    return "\n\n".join([LEGEND, table, *(["\n".join(f"- {note}" for note in notes)] if notes else [])]) + "\n"


def _shared(results: Sequence[Result]) -> list[str]:
    """Names of the metrics that every experiment compares, in the order of the first."""
    if not results:
        return []
    names = [{spec.name for spec in result.metrics} for result in results]
    return [spec.name for spec in results[0].metrics if all(spec.name in other for other in names)]


def _named(title: str, result: Result) -> str:
    return f"{title} (partial)".replace("|", r"\|") if result.partial else title.replace("|", r"\|")


def _cell(row: Row) -> str:
    if row.found.outcome is Outcome.NOT_ENOUGH_DATA and row.interval == words.NONE:
        return "?"
    text = f"{row.effect} ({row.interval}) {_MARKS[row.found.outcome]}"
    return f"**{text}**" if row.found.outcome in (Outcome.BETTER, Outcome.WORSE) else text


def _notes(title: str, result: Result) -> list[str]:
    """What one has to know to trust a line: what failed, and outputs that differ."""
    found = [f"{title}: {tally.arm}: failed: {tally.failures}" for tally in tallies(result) if tally.statuses]
    found += [f"{title}: {line}" for line in (*uncompared(result), *divergence_lines(result, 0))]
    if result.partial:
        found.append(f"{title}: partial: {result.stopped}")
    return found
