"""Measured tables of the documentation say what the raw data says."""

import gzip
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hotswap.lab.metrics import spec_of
from hotswap.lab.records import BlockRecord, Comparison, Outcome, Pair, RequestRecord, Result
from hotswap.lab.report import render_table, write_report

ROOT = Path(__file__).parents[2]
PAGES = [
    ("techniques", "docs/techniques.md"), ("equal arms", "docs/statistics.md"),
    ("peers, bfloat16", "docs/benchmarks.md"), ("peers, best precision", "docs/benchmarks.md"),
    ("slowdown", "docs/statistics.md")]


@pytest.fixture
def tables():
    from benchmarks import tables

    return tables


def result(name, effect):
    """Of an experiment that ran in /tmp, in which the arm took so much longer."""
    records = (RequestRecord(0, 0.0, 0.0, ((0.1, 1), (0.2, 1)), 0.2, 4, 2),)
    compared = Comparison(
        "arm", "tpot_p50", 0.1, 0.1 * (1 + effect), effect, effect - 0.01, effect + 0.01, 0.001, Outcome.WORSE, 0.01, 2)
    steps = replace(compared, metric="step_time")
    return Result(
        {"name": name, "out": f"/tmp/somewhere/{name}"},
        {"cores": 2, "processor": "Some CPU", "versions": {"torch": "2.13"}},
        [spec_of("tpot_p50"), spec_of("step_time")],
        [BlockRecord(arm, pair, pair, 30.0, records) for pair in range(2) for arm in ("base", "arm")],
        [compared, steps], "time is over", False, configs={"base": {}, "arm": {}},
        pairs={"arm": [Pair({"tpot_p50": 0.1}, {"tpot_p50": 0.1 * (1 + effect)}, pair == 0) for pair in range(2)]})


@pytest.fixture
def measured(tmp_path):
    """What ``hotswap ab FOLDER --out`` writes for two experiments."""
    for file, name, effect in (("1_first", "First", 0.05), ("2_second", "Second", 0.25)):
        write_report(result(name, effect), tmp_path / "out" / file)
    return tmp_path / "out"


@pytest.mark.parametrize(("name", "page"), PAGES)
def test_the_pages_have_the_tables_of_the_data_that_is_kept(tables, name, page):
    [table] = [table for table in tables.TABLES if table.name == name]
    assert table.page == page
    assert tables.stands((ROOT / page).read_text("utf-8"), name) == table.make().strip(), (
        "the page and the data disagree: python -m benchmarks.tables")


def test_there_is_a_page_for_every_table(tables):
    assert [(table.name, table.page) for table in tables.TABLES] == PAGES


def test_results_are_kept_whole_in_order_and_without_paths_of_the_machine(tables, measured, tmp_path):
    into = tmp_path / "kept"
    into.mkdir()
    (into / "0_gone.json.gz").write_bytes(b"of another time")
    text = (measured / "1_first" / "result.json").read_text().replace("/tmp/somewhere", str(measured))
    (measured / "1_first" / "result.json").write_text(text)
    tables.keep(measured, into)
    assert sorted(file.name for file in into.iterdir()) == ["1_first.json.gz", "2_second.json.gz"]
    found = tables.kept(into)
    assert list(found) == ["First", "Second"]
    assert found["First"].blocks == result("First", 0.05).blocks
    assert found["First"].experiment["out"] == "First"


def test_a_folder_without_results_is_refused_and_takes_nothing_away(tables, tmp_path):
    into = tmp_path / "kept"
    into.mkdir()
    (into / "1_first.json.gz").write_bytes(b"kept")
    with pytest.raises(SystemExit, match="there is no result of an experiment"):
        tables.keep(tmp_path / "nowhere", into)
    assert (into / "1_first.json.gz").read_bytes() == b"kept"


def test_a_table_is_put_in_its_place_and_what_differs_from_the_data_would_be_seen(tables, measured, tmp_path):
    tables.keep(measured, tmp_path / "kept")
    page = ("# P\n\n<!-- table: techniques -->\n\nformer\n\n<!-- end of table: techniques -->\n\n"
            "<!-- table: b -->\nx\n<!-- end of table: b -->\n")
    made = tables.techniques(tables.kept(tmp_path / "kept"))
    written = tables.put(page, "techniques", made)
    assert "<!-- table: techniques -->\n\nMeasured on 2 cores of Some CPU, torch 2.13." in written
    assert "| Second | `base` | `arm` | **+25.0 % (+24.0 % … +26.0 %) ↓** |" in written and "former" not in written
    assert written.endswith("<!-- table: b -->\nx\n<!-- end of table: b -->\n")
    assert tables.stands(written, "techniques") == made.strip() and tables.put(written, "techniques", made) == written
    assert tables.stands(written.replace("+25.0 %", "+25.1 %"), "techniques") != made.strip()
    with pytest.raises(SystemExit, match="has no place for the table"):
        tables.put(page, "c", made)


def test_runs_on_the_real_engine_have_a_line_each(tables, tmp_path):
    for number, effect in ((1, 0.03), (2, 0.02)):
        folder = tmp_path / "real-power" / f"{number:02}"
        tables.pack(write_report(result("r", effect), folder).data, folder / tables.real_runs.PACKED, [])
    told = tables.runs(tables.real_runs.kept("power", tmp_path))
    assert "| 01 | 2.0 | 2 | time is over | tpot_p50 worse, step_time worse | +3.00% [+2.00%, +4.00%] |" in told
    assert "| 02 |" in told and told.endswith("2 of 2 runs with any better or worse, 2 with any worse.")
    assert tables.runs(tables.real_runs.kept("null", tmp_path)) == tables.NOTHING == tables.techniques({})


def simulated(name, noise):
    file = ROOT / "benchmarks" / "experiment" / "data" / f"{name}.json.gz"
    told = json.loads(gzip.decompress(file.read_bytes()))
    return [run for run in told["runs"] if run["noise"] == noise]


def test_what_simulations_are_said_to_have_found_is_what_they_found(tables):
    readme = (ROOT / "benchmarks" / "experiment" / "README.md").read_text("utf-8")
    page = " ".join((ROOT / "docs" / "statistics.md").read_text("utf-8").split())
    null, power = simulated("null", "recorded"), simulated("power", "recorded")
    named = sum(bool(run["verdicts"]) for run in null)
    found = sum("worse" in run["verdicts"].values() for run in power)
    assert len(null) >= 180 and named <= 16 * len(null) / 200 and len(power) >= 300 and found >= 0.9 * len(power)
    assert not any("better" in run["verdicts"].values() for run in power)
    assert f"| {len(null)} | {named} with any better or worse ({named / len(null):.1%}) |".replace("%", " %") in readme
    assert f"| {len(power)} | {found} found ({found / len(power):.1%}), none called better".replace("%", " %") in readme
    assert f"called different in {named} of {len(null)} experiments, and the slowdown was found in {found} of" in page
    real = [bool(run.verdicts) for run in tables.real_runs.kept("null")]
    assert named + sum(real) <= 16 * (len(null) + len(real)) / 200
    assert ("have not been measured yet" in readme) is not bool(real)
    assert not real or f"(`real_runs.py null`) | {len(real)} | {sum(real)} with any better or worse" in readme
    slowed = ["worse" in run.verdicts.values() for run in tables.real_runs.kept("power")]
    assert f"on the real engine, in {sum(slowed)} of {len(slowed)} runs" in page


def words(text):
    return " ".join(text.split())


def test_the_lines_that_the_page_on_experiments_shows_are_of_the_run_that_it_names(tables):
    page = (ROOT / "docs" / "experiments.md").read_text("utf-8")
    shown, told = re.search(r"## What it says\n\n```text\n(.*?)```\n\n(.*?)\n\n", page, re.DOTALL).groups()
    kind, number = re.search(r"`benchmarks/experiment/data/real-(\w+)/(\d+)`", told).groups()
    run = next(run for run in tables.real_runs.kept(kind) if run.folder.name == number)
    measured = set(map(words, render_table(run.result).splitlines()))
    lines = [words(line) for line in shown.splitlines() if line]
    assert len(lines) > 8 and [line for line in lines if line not in measured] == []


def test_what_exchanges_are_said_to_cost_is_what_was_measured():
    page = (ROOT / "docs" / "exchange.md").read_text("utf-8")
    found, memory = (json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text("utf-8"))
                     for name in ("exchange", "exchange_memory"))
    rows = [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in page.splitlines()
            if re.match(r"\| `.*\| \d+ \|", line)]
    told = {part: (int(count), median, most) for part, count, median, most in rows}
    assert told == {
        part: (one["n"], as_told(told[part][1], one["median"]), as_told(told[part][2], one["max"]))
        for part, one in found["pause_ms"].items()}
    calm, busy = found["itl_ms"]["undisturbed"], found["itl_ms"]["with exchanges"]
    assert found["failed"] == found["wrong"] == 0
    flat = memory["memory_mib"]
    for sentence in (
        f"{found['settings']['streams']} open streams, {found['exchanges']} exchanges in random order",
        f"Of {found['answers']} answers none failed, and none differed",
        f"a median of {busy['p50']:.0f} ms ({calm['p50']:.0f} ms undisturbed)",
        f"of {busy['p99'] / 1000:.1f} s ({calm['p99'] / 1000:.1f} s)",
        f"has {flat['second quarter']:,.0f} MiB resident, and behind the last {flat['last quarter']:,.0f}",
    ):
        assert sentence in words(page)


def as_told(text, value):
    """``value`` in milliseconds with as many decimals as ``text`` has."""
    return f"{value:.{len(text.removesuffix(' ms').partition('.')[2])}f} ms"
