"""The figures of the page, for plotly."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hotswap.lab.metrics import samples, summary
from hotswap.lab.records import BlockRecord, Comparison, MetricSpec, Outcome, Pair, Result
from hotswap.lab.report import words
from hotswap.lab.report.content import arms_of, requests_of
from hotswap.lab.statistics import signed_rank
from hotswap.lab.statistics.signed_rank import Floats

COLOURS = ("#4c566a", "#d1495b", "#1f77b4", "#2a9d62", "#8e5bb5", "#e08e0b")
"""The base is grey; readable beside each other by the colour-blind."""
FONT = dict(family="system-ui, sans-serif", size=13, color="#22272e")
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens",
             "e2e": "end to end"}
POINTS = 400
"""Most points of a curve."""
TIMELINE_POINTS = 150
NORMAL_95 = 1.96
FIRST_INTERVAL = 6
"""Quads before a running interval is drawn."""


@dataclass(frozen=True)
class Figure:
    """``json``: data and layout for Plotly.react."""

    title: str
    json: str


def colours(result: Result) -> dict[str, str]:
    return {arm: COLOURS[index % len(COLOURS)] for index, arm in enumerate(arms_of(result))}


def _figure(figure: go.Figure, title: str, height: int, below: int = 96) -> Figure:
    figure.update_layout(
        template="plotly_white", font=FONT, height=height, margin=dict(l=56, r=16, t=24, b=below), hovermode="closest",
        legend=dict(orientation="h", yref="container", y=0, yanchor="bottom", x=0))
    return Figure(title, str(figure.to_json()))


def distributions(result: Result) -> dict[str, Figure]:
    """By latency, the share of requests that were done within a time; failures never are, and keep a curve below 100 %.
    """
    figures = {}
    for name, title in LATENCIES.items():
        if not any(samples(name, requests_of(result, arm)) for arm in arms_of(result)):
            continue
        figure = go.Figure()
        for arm, colour in colours(result).items():
            times, shares = ecdf(result, arm, name)
            figure.add_trace(go.Scatter(
                x=times, y=shares, name=arm, mode="lines", line=dict(color=colour, width=2, shape="hv"),
                hovertemplate="%{y:.1f} % within %{x:.3s}s"))
        figure.update_xaxes(type="log", tickformat="~s", ticksuffix="s", nticks=5, tickangle=0)
        figure.update_yaxes(range=[0, 102], ticksuffix=" %")
        figures[f"distribution: {name}"] = _figure(figure, title, 300, below=60)
    return figures


def ecdf(result: Result, arm: str, latency: str) -> tuple[list[float], list[float]]:
    """Times, and the percentage of requests that took no longer, failures among all of them."""
    requests = requests_of(result, arm)
    values, told = samples(latency, requests), summary(latency, requests)
    if told is None:
        return [], []
    places = np.unique(np.linspace(0, len(values) - 1, min(POINTS, len(values))).astype(int))
    return [values[place] for place in places], list(100 * (1 - told.error_share) * (places + 1) / len(values))


def timelines(result: Result) -> Figure | None:
    """Batch size, queue and cache use over the time of a block: the mean over an arm's blocks, and most of them."""
    if not any(block.timeline for block in result.blocks):
        return None
    figure = make_subplots(
        rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.07,
        subplot_titles=["requests running", "requests waiting", "cache in use"])
    for arm, colour in colours(result).items():
        times, spread = timeline([block for block in result.blocks if block.arm == arm])
        for row, (low, mean, high) in enumerate(spread, 1):
            figure.add_trace(go.Scatter(
                x=[*times, *times[::-1]], y=[*high, *low[::-1]], fill="toself", mode="lines", line=dict(width=0),
                fillcolor=_faint(colour), legendgroup=arm, showlegend=False, hoverinfo="skip"), row=row, col=1)
            figure.add_trace(go.Scatter(
                x=times, y=mean, name=arm, legendgroup=arm, showlegend=row == 1, mode="lines",
                line=dict(color=colour, width=2)), row=row, col=1)
    figure.update_xaxes(title_text="seconds since the start of the block", row=3, col=1)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(tickformat=".1%", row=3, col=1)
    return _figure(figure, "Timelines", 560)


def timeline(blocks: Sequence[BlockRecord]) -> tuple[Floats, Floats]:
    """Times, and what was running, waiting, and the share of the cache in use then: [3, of (10 %, mean, 90 %), times].
    A value stands until the next; at a time there are those blocks that had not ended."""
    told = [block for block in blocks if block.timeline and block.timeline[0][0] <= block.wall]
    if not told:
        return np.zeros(0), np.zeros((3, 3, 0))
    times = np.linspace(0, float(np.median([block.wall for block in told])), TIMELINE_POINTS)
    values = np.full((len(told), 3, len(times)), np.nan)
    for index, block in enumerate(told):
        points = np.array(block.timeline)
        last = np.searchsorted(points[:, 0], times, side="right") - 1
        known = (last >= 0) & (times <= block.wall)
        values[index][:, known] = points[last[known], 1:].T
    there = ~np.isnan(values[:, 0]).all(axis=0)
    if not there.any():
        return np.zeros(0), np.zeros((3, 3, 0))
    kept = values[:, :, there]
    low, high = np.nanpercentile(kept, [10, 90], axis=0)
    return times[there], np.stack([low, np.nanmean(kept, axis=0), high], axis=1)


def paired(result: Result) -> dict[str, Figure]:
    """One figure for each metric of each arm that was compared, those with a verdict first."""
    specs = {spec.name: spec for spec in result.metrics}
    order = {Outcome.WORSE: 0, Outcome.BETTER: 0, Outcome.NOT_ENOUGH_DATA: 1, Outcome.NO_DIFFERENCE: 2}
    shown = sorted((found for found in result.comparisons if found.n_pairs), key=lambda found: order[found.outcome])
    colour = colours(result)
    return {
        f"{found.arm}: {found.metric}": _paired(
            result.pairs[found.arm], found, specs[found.metric], colour.get(found.arm, COLOURS[1]))
        for found in shown if found.arm in result.pairs}


def _paired(pairs: Sequence[Pair], found: Comparison, spec: MetricSpec, colour: str) -> Figure:
    scale, suffix = 100.0, " %"
    if spec.additive:
        scale, suffix = (100.0, " points") if spec.unit == "share" else (1.0, f" {spec.unit}")
    effects = [scale * words.linear(signed_rank.difference(pair, spec), spec) for pair in pairs]
    places, estimates, lows, highs = (np.array(column) for column in running(pairs, spec))
    to_effect = np.vectorize(lambda number: scale * words.linear(number, spec), otypes=[float])
    figure = go.Figure()
    figure.add_trace(go.Scatter(
        x=[*places, *places[::-1]], y=[*to_effect(highs), *to_effect(lows)[::-1]], fill="toself", mode="lines",
        line=dict(width=0), fillcolor=_faint(colour), name="95 % interval so far, of this metric alone",
        hoverinfo="skip"))
    for first, symbol in ((True, "circle"), (False, "circle-open")):
        chosen = [(index, value) for index, (pair, value) in enumerate(zip(pairs, effects, strict=True), 1)
                  if pair.base_first is first]
        figure.add_trace(go.Scatter(
            x=[index for index, _ in chosen], y=[value for _, value in chosen], mode="markers",
            marker=dict(color=colour, size=6, symbol=symbol, opacity=0.75),
            name="pairs, base first" if first else "pairs, arm first"))
    figure.add_trace(go.Scatter(
        x=places, y=to_effect(estimates), mode="lines", line=dict(color=colour, width=2), name="estimate so far"))
    figure.add_hline(y=0, line=dict(color="#22272e", width=1))
    for bound in (found.low, found.high):
        if np.isfinite(bound) and (spec.additive or bound > -1):
            figure.add_hline(y=scale * bound, line=dict(color=colour, width=1.5, dash="dot"))
    figure.update_xaxes(title_text="pair, in the order in which they ran")
    figure.update_yaxes(title_text=f"{spec.name}: arm against base", ticksuffix=suffix)
    return _figure(figure, f"{found.arm}: {found.metric}", 420)


def running(pairs: Sequence[Pair], spec: MetricSpec) -> tuple[list[int], list[float], list[float], list[float]]:
    """After how many pairs, the estimate, and its 95 % interval by Wilcoxon's test of this metric alone, then."""
    differences = signed_rank.quads(pairs, spec)
    places, estimates, lows, highs = [], [], [], []
    for count in np.unique(np.linspace(FIRST_INTERVAL, len(differences), 60).astype(int)):
        averages = signed_rank.walsh_averages(differences[:count])
        if count < FIRST_INTERVAL or not len(averages):
            continue
        quads = int((~np.isnan(differences[:count])).sum())
        low, high = signed_rank.interval(averages, NORMAL_95 * signed_rank.scale(quads))
        if np.isfinite(low):
            places.append(int(count) * signed_rank.QUAD)
            estimates.append(float(np.median(averages)))
            lows.append(low)
            highs.append(high)
    return places, estimates, lows, highs


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[at:at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.14)"
