"""The tables of a comparison, in Markdown, and all that was measured as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.cpu.figures import FIGURES, HEADLINES, Run, Spread, ratio_of, share_of_offline, spread_of
from benchmarks.cpu.loads import LOADS
from hotswap.lab.processes import BUSY_CORES
from hotswap.lab.records import Better

COLUMNS: Mapping[str, Sequence[str]] = {
    "start": ("ready_s",),
    "start-http": ("ready_s",),
    "single": ("ttft_p50_ms", "tpot_p50_ms", "out_tok_s"),
    "batch8": ("decode_tok_s", "out_tok_s"),
    "mixed": ("out_tok_s", "wall_s", "total_tok_s"),
    "prefix": ("wall_s", "out_tok_s"),
    "offline16": ("out_tok_s", "itl_p50_ms", "itl_p99_ms", "cpu_us_tok"),
    "http": ("out_tok_s", "req_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "cpu_us_tok",
             "client_us_tok"),
    "idle": ("idle_percent",),
}
MEMORY = "memory_mib"
NOTHING = "–"


def tables(runs: Sequence[Run], base: str) -> str:
    """One table a load, the best engine first. The last column but one is how many times as good ``base`` is as each
    other."""
    parts = [_table(load, [run for run in runs if run.load == load], base) for load in COLUMNS]
    return "\n\n".join(part for part in [*parts, _servers(runs), _footnote(runs)] if part)


def _table(load: str, runs: Sequence[Run], base: str) -> str:
    engines = list(dict.fromkeys(run.engine for run in runs))
    if not engines:
        return ""
    columns = [*COLUMNS[load], *([MEMORY] if load in LOADS else [])]
    words = f": {LOADS[load].words}" if load in LOADS else ""
    titles = [FIGURES[column].title for column in columns]
    rows = [["engine", *titles, f"{base} is better by", "runs"]]
    rows += [_row(engine, base, load, columns, runs) for engine in ranked(engines, load, runs)]
    if len(engines) == 1:
        rows = [[*row[:-2], row[-1]] for row in rows]
    head, *rest = map(_line, rows)
    return "\n".join([f"### {load}{words}", "", head, "|" + "---|" * len(rows[0]), *rest])


def ranked(engines: Sequence[str], load: str, runs: Sequence[Run]) -> list[str]:
    """By the load's headline, the best first; those without a figure last."""
    figure = HEADLINES[load]
    sign = 1 if FIGURES[figure].better is Better.LOWER else -1

    def place(engine: str) -> tuple[bool, float]:
        spread = spread_of(runs, engine, load, figure)
        return spread is None, sign * spread.median if spread else 0.0

    return sorted(engines, key=place)


def _row(engine: str, base: str, load: str, columns: Sequence[str], runs: Sequence[Run]) -> list[str]:
    own = [run for run in runs if run.engine == engine]
    cells = [shown(spread_of(own, engine, load, column)) for column in columns]
    if errors := [run.error for run in own if run.error is not None]:
        cells[0] = f"{cells[0]} failed: {errors[0].splitlines()[-1][:80]}"
    ratio = NOTHING if engine == base else shown(ratio_of(runs, base, engine, load, HEADLINES[load]), "×")
    counted = sum(run.counts for run in own)
    return [engine, *cells, ratio, str(counted) if counted == len(own) else f"{counted} of {len(own)}"]


def shown(spread: Spread | None, unit: str = "") -> str:
    """Three digits; the range where there is one."""
    if spread is None:
        return NOTHING
    digits = 0 if spread.median >= 100 else 1 if spread.median >= 10 else 2
    median, low, high = (f"{value:.{digits}f}" for value in spread[:3])
    return f"{median}{unit}" + (f" ({low}–{high})" if spread.count > 1 else "")


def shown_run(run: Run) -> str:
    """One line, as it happens; ! marks what is left out."""
    mark = "!" if run.disturbed or run.error is not None else " "
    figures = "  ".join(f"{name} {value:.4g}" for name, value in run.figures.items())
    others = "" if run.others is None else f"  others {run.others:.2f} cores"
    return f"{mark} {run.round:2} {run.engine:14} {run.load:10} {run.error or figures}{others}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _servers(runs: Sequence[Run]) -> str:
    """Of engines that were asked for the same both ways."""
    shares = {engine: share_of_offline(runs, engine) for engine in dict.fromkeys(run.engine for run in runs)}
    return "\n".join(
        f"{engine}: its server gives {shown(share, '×')} the output tokens/s of the engine alone."
        for engine, share in shares.items() if share is not None)


def _footnote(runs: Sequence[Run]) -> str:
    disturbed = sum(run.disturbed for run in runs)
    failed = len({(run.engine, run.face, run.round) for run in runs if run.error is not None})
    told = [
        "Medians (ranges) of rounds in which every engine had its turn; ratios are paired by round.",
        f"{disturbed} runs beside neighbours that used over {BUSY_CORES} core are left out." if disturbed else "",
        f"{failed} engines' turns failed." if failed else ""]
    return " ".join(filter(None, told))


def as_json(runs: Sequence[Run]) -> dict[str, Any]:
    """``runs`` as they are, and what the tables say of them."""
    summary: dict[str, Any] = {}
    for engine, load in dict.fromkeys((run.engine, run.load) for run in runs):
        spreads = {name: spread_of(runs, engine, load, name) for name in FIGURES}
        summary.setdefault(load, {})[engine] = {
            name: spread._asdict() for name, spread in spreads.items() if spread is not None}
    return {
        "summary": summary,
        "runs": [{**asdict(run), "disturbed": run.disturbed} for run in runs],
    }
