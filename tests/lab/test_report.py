"""What a report says, and that its page works in a browser."""

import base64
import json
import re
import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from math import inf, nan

import numpy as np
import plotly.io
import pytest

from hotswap.core.errors import ConfigError
from hotswap.lab import report
from hotswap.lab.metrics import Slo, spec_of, values_of
from hotswap.lab.records import BlockRecord, Comparison, Outcome, Pair, RequestRecord, Result
from hotswap.lab.report import read_result, render_table, words, write_report
from hotswap.lab.report.content import config_differences, divergence_lines, headline, percentiles, rows, tallies
from hotswap.lab.report.overview import LEGEND, render_overview
from hotswap.lab.report.page import STRIP, render_page, strips
from hotswap.lab.report.plots import ecdf, paired, running, timeline, timelines
from hotswap.lab.statistics import Monitor, Settings

METRICS = [spec_of(name) for name in (
    "ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50", "e2e_p99", "throughput", "hit_rate", "errors", "step_time",
    "acceptance_length")]
SLOWER = {"base": 1.0, "static": 1.3, "chunked": 0.995}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def record(rng, index, speed, arm):
    begun, first = 0.1 * index, 0.1 * index + speed * (0.05 + 0.01 * rng.exponential())
    if arm == "static" and rng.random() < 0.05:
        return RequestRecord(index, begun, begun, (), begun + 0.01, 40, 0, error="HTTP 503: busy")
    chunks = [(first + speed * 0.01 * (token + 0.1 * rng.random()), 1) for token in range(12)]
    return RequestRecord(
        index, begun, begun, tuple(chunks), chunks[-1][0], 40, 12, "length", cached_tokens=16, queued=0.001,
        tokens=tuple(range(12)), incomplete=index == 9 and arm == "chunked" and rng.random() < 0.5)


def block(rng, arm, pair, position):
    speed = SLOWER[arm] * float(np.exp(0.01 * rng.standard_t(3)))
    requests = tuple(record(rng, index, speed, arm) for index in range(10))
    wall = max(request.ended for request in requests)
    line = tuple((wall * step / 20, min(8, step), max(0, 6 - step), 0.3 + 0.02 * step) for step in range(20))
    counts = {"steps": 100.0, "step_seconds": 100 * 0.01 * speed}
    return BlockRecord(arm, pair, position, wall, requests, 1.5, counts, line, disturbed=0.4 if pair % 7 == 0 else 0.0)


def experiment(pairs, arms=("static", "chunked"), stopped="time is over", partial=False):
    rng = np.random.default_rng(11)
    monitor, blocks, by_arm = Monitor(arms, METRICS, Settings(flips=1999)), [], {arm: [] for arm in arms}
    for number in range(pairs):
        order = ["base", *arms] if number % 4 in (0, 3) else [*reversed(arms), "base"]
        found = {arm: block(rng, arm, number, len(blocks) + place) for place, arm in enumerate(order)}
        blocks += found.values()
        values = {arm: values_of(one, Slo({})) for arm, one in found.items()}
        for arm in arms:
            by_arm[arm].append(Pair(values["base"], values[arm], order[0] == "base"))
            monitor.add(arm, by_arm[arm][-1])
        monitor.enough((number + 1) / pairs)
    return Result(
        {"seed": 3, "load": {"concurrency": 8}, "hashes": {"base": "ab12"}}, {"python": "3.11", "cpu": {"cores": 2}},
        METRICS, blocks, monitor.finish(1.0), stopped, partial,
        [{"arm": "static", "pair": 2, "request": 5, "position": 7, "base_token": 4, "arm_token": 9,
          "base_text": " a", "arm_text": "</script><b>"}],
        {"base": {"model": "m", "scheduler": {"use": "continuous"}, "api_key": "geheim"},
         **{arm: {"model": "m", "scheduler": {"use": arm}, "api_key": "geheim"} for arm in arms}},
        by_arm, monitor.looks, {"static": 320, "chunked": 300})


@pytest.fixture(scope="module")
def result():
    return experiment(32)


@pytest.fixture(scope="module")
def page(result):
    return render_page(result)


def compared(metric="e2e_p50", outcome=Outcome.WORSE, effect=0.031, low=0.02, high=0.042, **other):
    return Comparison(**{**dict(
        arm="arm", metric=metric, base_value=0.5, arm_value=0.6, effect=effect, low=low, high=high, p=0.01,
        outcome=outcome, margin=0.01, n_pairs=40), **other})


def alone(found):
    return Result({}, {}, METRICS, [], [found], "time is over", False)


def test_the_table_says_for_each_arm_and_metric_what_is_known(result):
    text = render_table(result)
    static, chunked = text.index("static against base"), text.index("chunked against base")
    line = next(line for line in text[static:chunked].splitlines() if line.startswith("e2e_p50"))
    assert re.fullmatch(r"e2e_p50 +\d+ ms +\d+ ms +\+\d+\.\d % +\+\d+\.\d % … \+\d+\.\d % +worse", line)
    assert "acceptance_length" not in text  # no block had any
    assert re.search(r"^e2e_p50 .*(no difference > 1 %|not enough data|better)$", text[chunked:], re.MULTILINE)
    assert text.endswith("Ended: time is over.")


def test_beneath_the_table_stand_failures_hit_rates_disturbed_blocks_and_divergences(result):
    text = render_table(result)
    assert re.search(r"^static: \d+ requests in 32 blocks, failed: \d+ x HTTP 503, hit rate 40.0 %, "
                     r"5 blocks beside busy neighbours$", text, re.MULTILINE)
    assert re.search(r"^chunked: .*, failed: none, \d+ still under way at the end of a block, ", text, re.MULTILINE)
    assert "static: greedy outputs differ from the base's in 1 of 320 requests\n" in text
    assert "static: pair 2, request 5, position 7: ' a' in the base, '</script><b>' in the arm" in text
    assert "chunked: greedy outputs agree with the base's in all of 300 requests\n" in text
    assert "in the latencies that are compared, a request that failed is without end" in text


def test_outputs_that_nobody_compared_are_not_said_to_agree(result):
    for text in (render_table(sampled := replace(result, divergences=[], outputs_compared={})), render_page(sampled)):
        assert "static: outputs were not compared: only greedy ones are" in text
        assert "agree with" not in text


def test_of_how_many_requests_outputs_differ_is_said_only_where_it_is_known(result):
    assert "static: greedy outputs differ from the base's in 1 request\n" in render_table(
        replace(result, outputs_compared=None))


def test_what_only_one_arm_tells_is_told_without_a_verdict(result):
    pairs = [Pair({"e2e_p50": 1.0}, {"e2e_p50": 1.0, "acceptance_length": 2.0 + n}, n % 2 == 0) for n in range(3)]
    found = [compared(), compared("acceptance_length", Outcome.NOT_ENOUGH_DATA, nan, n_pairs=0)]
    drafts = replace(
        alone(found[0]), comparisons=found,
        configs={"none": {}, "arm": {}}, pairs={"arm": pairs})
    line = "arm: acceptance_length 3.00 tokens in the median of its blocks, with nothing to compare it with"
    assert line in render_table(drafts).splitlines()
    assert f"<p>{line}</p>" in render_page(drafts)
    assert f"- Drafts: {line}" in render_overview({"Drafts": drafts}).splitlines()
    assert "with nothing to compare" not in render_table(result), "what neither tells is left out"


def test_intervals_say_with_which_confidence_they_hold(result):
    assert "  95 % INTERVAL  " in render_table(result)
    wider = replace(result, experiment={**result.experiment, "statistics": {"confidence": 0.999}})
    assert "  99.9 % INTERVAL  " in render_table(wider)
    assert "99.9 % interval</th>" in (page := render_page(wider)) and "with a confidence of 99.9 %" in page


def test_experiments_share_a_table_with_a_line_for_each_arm_and_a_column_for_what_all_of_them_measure(result):
    other = experiment(12, ("static",))
    fewer = replace(other, metrics=METRICS[1:], comparisons=[
        found for found in other.comparisons if found.metric != METRICS[0].name])
    text = render_overview({"Two arms": result, "One arm": fewer})
    assert text.startswith(LEGEND)
    header, _, *lines = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("|")]
    names = [cell.strip() for cell in header]
    assert names == ["experiment", "base", "arm", *(spec.name for spec in METRICS[1:]), "others"]
    assert [(line[0].strip(), line[2]) for line in lines] == [
        ("Two arms", "`static`"), ("Two arms", "`chunked`"), ("One arm", "`static`")]
    tpot = names.index("tpot_p50")
    assert "**+3" in lines[0][tpot] and "↓**" in lines[0][tpot], "slower, for certain"
    assert "**" not in lines[1][tpot] and lines[1][tpot].endswith(("=", "?"))
    assert "ttft_p50: **+" in lines[0][-1], "what the other experiment does not measure"
    assert "- Two arms: static: failed: " in text
    assert "- Two arms: static: greedy outputs differ from the base's in 1 of 320 requests" in text


def test_an_experiment_that_ended_too_early_is_marked_in_the_table_of_all():
    text = render_overview({"Short": experiment(4, ("static",), "arm static died", partial=True)})
    assert "| Short (partial) |" in text and "- Short: partial: arm static died" in text


def test_a_partial_result_says_so_first():
    broken = experiment(3, stopped="arm static died in pair 3: exit code -9", partial=True)
    assert render_table(broken).startswith("PARTIAL: arm static died in pair 3: exit code -9. What was measured")
    assert "Partial: arm static died in pair 3: exit code -9." in render_page(broken)


@pytest.mark.parametrize(("number", "unit", "text"), [
    (0.0123, "s", "12.3 ms"), (2.5, "s", "2.50 s"), (4e-5, "s", "40.0 µs"), (0.0, "s", "0.00 s"),
    (inf, "s", "unbounded"), (nan, "s", "–"), (0.123, "share", "12.3 %"), (3 * 2**20, "bytes", "3.00 MiB"),
    (1234.5, "tokens/s", "1,234 tokens/s")])
def test_values_have_units_that_suit_them(number, unit, text):
    assert words.value(number, unit) == text


@pytest.mark.parametrize(("metric", "number", "text"), [
    ("e2e_p50", 0.0314, "+3.1 %"), ("e2e_p50", -0.0014, "-0.14 %"), ("e2e_p50", 19.0, "x 20.0"),
    ("hit_rate", 0.05, "+5.00 points"), ("hit_rate", 0.0, "0"), ("queue_mean", 0.002, "+2.00 ms"),
    ("queue_mean", -0.002, "-2.00 ms"), ("e2e_p50", inf, "∞"), ("e2e_p50", nan, "–")])
def test_effects_are_percentages_points_or_differences(metric, number, text):
    assert words.effect(number, spec_of(metric)) == text


def test_verdicts_are_words_with_the_margin():
    spec = spec_of("e2e_p50")
    assert words.verdict(compared(), spec) == "worse"
    assert words.verdict(compared(outcome=Outcome.NO_DIFFERENCE), spec) == "no difference > 1 %"
    assert words.verdict(compared(outcome=Outcome.NOT_ENOUGH_DATA), spec) == "not enough data"
    assert words.interval(compared(low=-1.0, high=inf), spec) == "–"
    assert words.interval(compared(), spec) == "+2.0 % … +4.2 %"


def test_the_headline_names_what_is_better_and_worse():
    found = [compared(), compared("throughput", Outcome.BETTER, 0.1), compared("ttft_p50", Outcome.NO_DIFFERENCE)]
    lines = rows(replace(alone(found[0]), comparisons=found))["arm"]
    assert headline(lines) == (
        "Better in throughput (+10.0 %); worse in e2e_p50 (+3.1 %); no difference that matters in 1 metric.")


def test_percentiles_stand_beside_those_that_count_failures_as_endless(result):
    line = next(line for line in percentiles(result) if (line.latency, line.arm) == ("e2e", "static"))
    assert line.adjusted[-1] == "unbounded" and line.success[-1].endswith("ms") and line.error_share.endswith("%")
    fine = next(line for line in percentiles(result) if (line.latency, line.arm) == ("e2e", "base"))
    assert fine.adjusted == fine.success and fine.error_share == "0.00 %"


def test_a_distribution_ends_below_one_by_the_share_of_failures(result):
    tally = next(tally for tally in tallies(result) if tally.arm == "static")
    good, bad = tally.succeeded, sum(tally.statuses.values())
    assert bad and ecdf(result, "static", "e2e")[1][-1] == pytest.approx(100 * good / (good + bad))
    assert ecdf(result, "base", "e2e")[1][-1] == 100


def test_a_timeline_is_the_mean_of_those_blocks_that_had_not_ended():
    short = BlockRecord("arm", 0, 0, 1.0, (), timeline=((0.0, 4, 0, 0.1), (0.5, 2, 1, 0.2)))
    long = BlockRecord("arm", 1, 1, 3.0, (), timeline=((0.0, 8, 0, 0.3), (2.0, 6, 0, 0.4)))
    times, (running, waiting, cache) = timeline([short, long])
    assert times[0] == 0 and times[-1] == 2  # the median block
    at = [int(np.searchsorted(times, time)) for time in (0.2, 0.7, 1.5)]
    assert running[1][at] == pytest.approx([6, 5, 8]) and waiting[1][at] == pytest.approx([0, 0.5, 0])
    assert cache[1][at] == pytest.approx([0.2, 0.25, 0.3])
    assert np.all((running[0] <= running[1]) & (running[1] <= running[2]))


def test_each_timeline_stands_under_its_own_name():
    block = BlockRecord("arm", 0, 0, 1.0, (), timeline=((0.0, 4, 1, 0.5),))
    figure = plotly.io.from_json(timelines(Result({}, {}, [], [block], [], "time is over", False)).json)
    tops = {round(axis.domain[1], 6): axis.plotly_name.replace("axis", "") for axis in figure.select_yaxes()}
    names = {tops[round(note.y, 6)]: note.text for note in figure.layout.annotations}
    shown = {names[trace.yaxis]: float(unpacked(trace.y)[0]) for trace in figure.data if trace.name}
    assert shown == {"requests running": 4, "requests waiting": 1, "cache in use": 0.5}


def unpacked(values):
    """Plotly 6 packs what numpy has made."""
    return np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"]) if isinstance(values, dict) else values


def test_a_block_that_told_nothing_in_its_time_has_no_timeline():
    def told(wall, *points):
        return BlockRecord("arm", 0, 0, wall, (), timeline=tuple((point, 4, 0, 0.1) for point in points))

    for blocks in ([told(0.03)], [told(0.03, 0.05)], [told(0.03, 0.029), told(0.01, 0.00999)]):
        times, spread = timeline(blocks)
        assert len(times) == 0 and spread.shape == (3, 3, 0)
    assert len(timeline([told(0.03, 0.0299)])[0]) == 1


def test_the_running_interval_narrows_around_the_estimate(result):
    places, estimates, lows, highs = map(np.array, running(result.pairs["static"], spec_of("e2e_p50")))
    assert places[-1] == 32 and np.all((lows <= estimates) & (estimates <= highs))
    assert highs[-1] - lows[-1] < highs[0] - lows[0]


def test_the_bounds_of_an_interval_are_drawn_whatever_the_unit_of_the_metric(result):
    pairs = [Pair({"kv_peak": 9e6}, {"kv_peak": 5e6 + n}, n % 2 == 0) for n in range(12)]
    spec = spec_of("kv_peak")
    found = compared("kv_peak", low=-4e6, high=-3e6)
    whole = replace(result, metrics=[spec], comparisons=[found], pairs={"arm": pairs})
    [figure] = paired(whole).values()
    lines = [shape["y0"] for shape in json.loads(figure.json)["layout"]["shapes"]]
    assert lines == [0, -4e6, -3e6]
    share = replace(whole, metrics=[spec_of("hit_rate")], comparisons=[compared("hit_rate", low=-0.02, high=0.01)])
    [figure] = paired(share).values()
    assert json.loads(figure.json)["layout"]["yaxis"]["ticksuffix"] == " points"


def test_what_differs_between_the_arms_is_shown_and_nothing_else(result):
    assert config_differences(result) == [("scheduler.use", ["continuous", "static", "chunked"])]


def test_divergences_are_counted_and_the_first_are_told():
    found = [{"arm": "a", "request": index, "base_token": 1, "arm_token": 2} for index in range(30)]
    lines = divergence_lines(replace(alone(compared()), divergences=found), 3)
    assert len(lines) == 4 and lines[0] == "a: greedy outputs differ from the base's in 30 requests"


def test_intervals_are_drawn_on_one_scale_with_arrows_beyond_it():
    found = [
        compared(), compared("throughput", effect=0.03, low=-0.5, high=inf), compared("hit_rate", low=nan, high=nan)]
    drawn = strips(rows(replace(alone(found[0]), comparisons=found))["arm"])
    near, far = drawn["e2e_p50"], drawn["throughput"]
    assert STRIP / 2 < near.low < near.dot < near.high < STRIP and not near.left and not near.right
    assert near.dot > far.dot > STRIP / 2 > far.low and far.high == STRIP and far.right
    assert drawn["hit_rate"] is None


def test_a_result_comes_back_as_it_was_written(result, tmp_path):
    open_ended = replace(result.comparisons[0], low=-1.0, high=inf, effect=nan, p=1.0)
    found = replace(result, comparisons=[*result.comparisons, open_ended], divergences=list(result.divergences))
    written = write_report(found, tmp_path / "new" / "folder")
    back = read_result(written.data)
    assert back.blocks == found.blocks and back.pairs == found.pairs and back.looks == list(found.looks)
    assert repr(back.comparisons) == repr(found.comparisons)
    assert render_table(back) == render_table(found)
    json.loads(written.data.read_text(), parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))


def test_a_result_of_another_format_is_refused(tmp_path):
    (tmp_path / "result.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="is no result of format 1"):
        read_result(tmp_path / "result.json")


def test_secrets_of_configs_are_in_no_report(result, tmp_path):
    written = write_report(result, tmp_path)
    assert "geheim" not in written.data.read_text() and "geheim" not in written.page.read_text()


def test_a_folder_that_cannot_be_written_is_said(result, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file.* cannot be written: "):
        write_report(result, tmp_path / "file" / "folder")


def test_without_plotly_the_data_is_written_and_the_page_missed(result, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "plotly" else find_spec(name))
    written = write_report(result, tmp_path)
    assert written.data.exists() and written.page is None and "pip install 'hotswap[lab]'" in written.note


def test_the_page_holds_everything_and_asks_the_network_for_nothing(page):
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=\"(?!data:)", page)
    assert "</script><b>" not in page  # an output is text, whatever it says
    for spec in METRICS:
        assert f"<code>{spec.name}</code>" in page


MEASURE = """<script>
const boxes = [...document.querySelectorAll(".plot")].map(plot =>
  [plot.querySelector(".main-svg"), ...plot.querySelectorAll(".js-line, .points path")].map(part => {
    const box = part.getBoundingClientRect();
    return [Math.round(box.width), Math.round(box.height)];
  }));
document.body.dataset.boxes = JSON.stringify(boxes);
document.body.dataset.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
</script></body>"""


class Browser:
    """Chromium without a window: the page as its scripts left it, and what it complained about.

    ``boxes``: width and height of each plot, and of each line and point in it, in pixels as they are laid out."""

    def __init__(self, page, folder, width=1280):
        path = folder / "page.html"
        path.write_text(page.replace("</body>", MEASURE), "utf-8")
        done = subprocess.run(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=20000",
             f"--window-size={width},1200", "--dump-dom", path.as_uri()],
            capture_output=True, text=True, timeout=240, check=True)
        self.dom = re.sub(r"<script.*?</script>", "", done.stdout, flags=re.DOTALL)
        self.complaints = re.findall(r".*:CONSOLE.*", done.stderr)
        if measured := re.search(r'data-boxes="([^"]*)" data-overflow="(\d+)"', self.dom):
            self.boxes, self.overflow = json.loads(measured[1]), int(measured[2])


needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 500])  # Chromium's windows are no narrower
def test_the_page_draws_its_plots_in_a_browser_without_a_complaint(result, page, tmp_path, width):
    opened = Browser(page, tmp_path, width)
    assert opened.complaints == []
    assert opened.overflow == 0
    *distributions, paired, timelines = opened.boxes
    assert len(distributions) == 4
    for plot, parts in (*((plot, 3) for plot in distributions), (paired, 32), (timelines, 9)):
        (wide, high), *drawn = plot
        assert wide > 380 and high >= 300
        assert sum(w > 1 and h > 1 for w, h in drawn) >= parts
    assert len(re.findall(r"<option>", opened.dom)) == len([found for found in result.comparisons if found.n_pairs])


@needs_chromium
def test_a_complaint_of_the_browser_would_be_noticed(tmp_path):
    assert Browser("<body><script>Plotly.react_()</script></body>", tmp_path).complaints


@needs_chromium
def test_a_page_with_one_arm_and_without_comparisons_works_too(result, tmp_path):
    blocks = [replace(block, timeline=()) for block in result.blocks if block.arm == "base"]
    opened = Browser(render_page(Result({}, {}, METRICS, blocks, [], "all requests are in", False)), tmp_path)
    assert opened.complaints == [] and len(opened.boxes) == 4 and "Verdicts" not in opened.dom
