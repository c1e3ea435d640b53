"""The page: one file with everything in it, scripts included, that needs no network."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from hotswap.core.explain import redact
from hotswap.lab.metrics import STATISTICS
from hotswap.lab.processes import BUSY_CORES
from hotswap.lab.records import Outcome, Result
from hotswap.lab.report import content, plots, words
from hotswap.lab.report.content import Row
from hotswap.lab.report.plots import Figure

DIVERGENCES = 20
STRIP = 200
"""Width of the drawing of an interval, in its own units."""
CLASSES = {
    Outcome.BETTER: "better", Outcome.WORSE: "worse", Outcome.NO_DIFFERENCE: "same", Outcome.NOT_ENOUGH_DATA: "open"}


def render_page(result: Result) -> str:
    environment = Environment(
        loader=PackageLoader("hotswap.lab.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True)
    tables = content.rows(result)
    distributions, paired, timelines = plots.distributions(result), plots.paired(result), plots.timelines(result)
    figures = {**distributions, **paired, **({"timelines": timelines} if timelines else {})}
    return environment.get_template("page.html").render(
        result=result, title=_title(result), base=content.base_of(result), arms=content.arms_of(result),
        colours=plots.colours(result), tables=tables, headlines={arm: content.headline(tables[arm]) for arm in tables},
        strips={arm: strips(lines) for arm, lines in tables.items()}, classes=CLASSES,
        distributions=distributions, paired=list(paired), timelines=timelines, labels=list(STATISTICS),
        percentiles=list(content.percentiles(result)), tallies=content.tallies(result),
        uncompared=content.uncompared(result), outputs=content.outputs(result, DIVERGENCES),
        confidence=content.confidence(result),
        differences=content.config_differences(result),
        environment=content.flat(result.environment), experiment=content.flat(redact(dict(result.experiment))),
        disturbed_cores=BUSY_CORES, data=_json(figures), plotly=Markup(get_plotlyjs()))


def _title(result: Result) -> str:
    name = result.experiment.get("name")
    base, *arms = content.arms_of(result)
    return str(name) if name else f"{', '.join(arms)} against {base}" if arms else base


def _json(figures: Mapping[str, Figure]) -> Markup:
    """Figures by name, safe inside a script element whatever names contain."""
    inner = ",".join(f"{json.dumps(name)}:{figure.json}" for name, figure in figures.items())
    return Markup("{" + inner.replace("<", "\\u003c") + "}")


@dataclass(frozen=True)
class Strip:
    """An interval drawn on a line: places from 0 to `STRIP`, zero in the middle. ``dot`` None: the estimate lies
    outside. ``left``, ``right``: the interval goes on beyond the edge."""

    low: float
    high: float
    dot: float | None
    margin: float
    left: bool
    right: bool


def strips(rows: list[Row]) -> dict[str, Strip | None]:
    """By metric. One scale for all relative effects of an arm; None where nothing can be drawn."""
    sizes = {row.metric: _relative(row) for row in rows}
    drawn = sorted(abs(number) for size in sizes.values() if size for number in size[:3] if isfinite(number))
    widest = min(max(1.15 * drawn[int(0.9 * (len(drawn) - 1))], 0.01), 1.0) if drawn else 1.0
    return {metric: _strip(*size, widest) if size else None for metric, size in sizes.items()}


def _relative(row: Row) -> tuple[float, float, float, float] | None:
    """Effect, low, high and margin as parts of the base's value; of shares, in points."""
    found, size = row.found, 1.0
    if row.spec.additive and row.spec.unit != "share":
        size = abs(found.base_value)
    if not size or not isfinite(found.effect) or row.interval == words.NONE:
        return None
    return found.effect / size, found.low / size, found.high / size, found.margin / size


def _strip(effect: float, low: float, high: float, margin: float, widest: float) -> Strip:
    def place(number: float) -> float:
        return round(STRIP / 2 * (1 + max(-1.0, min(1.0, number / widest))), 1)

    return Strip(place(low), place(high), place(effect) if abs(effect) <= widest else None,
                 STRIP / 2 * min(1.0, margin / widest), low < -widest, high > widest)
