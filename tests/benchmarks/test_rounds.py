"""Engines are started, asked and ended in turns; what goes wrong is told and is no figure."""

import json
import os
import re
import time
from contextlib import closing
from pathlib import Path

import pytest


@pytest.fixture
def runs_of(tmp_path):
    from benchmarks.cpu.rounds import Plan, run

    def runs(*engines, loads=("single",), rounds=1):
        with closing(run(Plan(engines, loads, rounds, tmp_path, quick=True))) as coming:
            return list(coming)

    return runs


def test_every_engine_has_its_turn_in_every_round_and_the_second_order_is_the_first_turned_round(runs_of, fake):
    runs = runs_of(fake("a", ["offline"]), fake("b", ["offline"]), rounds=2)
    assert all(run.error is None for run in runs)
    order = [run.engine for run in runs if run.load == "single"]
    assert order[2:] == order[1::-1] and set(order[:2]) == {"a", "b"}


def test_a_load_goes_through_the_face_that_it_is_about(runs_of, fake, children):
    loads = ("single", "offline16", "http")
    faces = {(run.load, run.face) for run in runs_of(fake(), loads=loads)}
    assert faces == {("start", "offline"), ("single", "offline"), ("offline16", "offline"), ("start-http", "http"),
                     ("http", "http")}
    assert {run.load for run in runs_of(fake(faces=["http"]), loads=loads)} == {"start-http", "single", "http"}
    assert not children(os.getpid())


@pytest.mark.parametrize("face", ["offline", "http"])
def test_every_token_of_a_load_is_counted(runs_of, fake, face):
    start, mixed = runs_of(fake(faces=[face]), loads=["mixed"])
    assert start.figures["ready_s"] > 0 and start.others is not None
    figures = mixed.figures
    assert figures["out_tok_s"] == pytest.approx(4 * 8 / figures["wall_s"])
    assert figures["memory_mib"] > 5 and figures["cpu_us_tok"] >= 0
    assert ("client_us_tok" in figures) == (face == "http")
    assert {"ttft_p50_ms", "tpot_p50_ms", "itl_p99_ms", "decode_tok_s"} <= figures.keys()


def test_a_server_is_watched_while_it_is_idle_where_that_is_asked_for(fake, tmp_path):
    from benchmarks.cpu.rounds import Plan, run

    engines, loads = [fake()], ("offline16", "http")
    with closing(run(Plan(engines, loads, 1, tmp_path, quick=True, idle_s=0.05))) as coming:
        *_, http, idle = coming
    assert (http.load, idle.load, idle.error) == ("http", "idle", None) and idle.figures["idle_percent"] >= 0
    with closing(run(Plan(engines, loads, 1, tmp_path, quick=True))) as coming:
        assert "idle" not in [one.load for one in coming]


def test_an_engine_is_asked_for_the_same_tokens_as_the_others_and_for_others_in_each_round(fake):
    from benchmarks.cpu.loads import LOADS

    for load in LOADS.values():
        first, again, other = load.items(1), load.items(1), load.items(2)
        assert first == again and first[0].prompt[:16] != other[0].prompt[:16]
    assert LOADS["http"].items(3) == LOADS["offline16"].items(3)


@pytest.mark.parametrize("face", ["offline", "http"])
def test_an_engine_that_gives_too_few_tokens_has_no_figures_and_no_further_turn(runs_of, fake, face):
    runs = runs_of(fake(faces=[face], fault="short"), loads=["single", "batch8"], rounds=2)
    assert [run.load for run in runs if run.error] == ["start" if face == "offline" else "start-http", "single",
                                                      "batch8"]
    assert all("4 of 4 requests went wrong; request 0: 7 instead of 8 tokens" in run.error for run in runs if run.error)
    assert {run.round for run in runs} == {1}


@pytest.mark.parametrize("face", ["offline", "http"])
def test_an_engine_that_does_not_start_tells_why_and_the_others_go_on(runs_of, fake, face):
    runs = runs_of(fake("bad", [face], fault="no start"), fake("good", [face]), rounds=2)
    assert all("no such weights" in run.error for run in runs if run.engine == "bad")
    assert len([run for run in runs if run.engine == "good" and run.error is None]) == 4


def test_an_engine_that_dies_is_told_by_its_last_words(runs_of, fake):
    *_, last = runs_of(fake(faces=["offline"], fault="exit"))
    assert "it has ended" in last.error and "fake engine: words to stdout" in last.error


def test_an_engine_that_hangs_is_given_up_and_ended_with_all_that_it_started(runs_of, fake, monkeypatch, children):
    from benchmarks.cpu import subject

    monkeypatch.setattr(subject, "RUN_LIMIT_S", 0.3)
    monkeypatch.setattr(subject, "STOP_LIMIT_S", 0.1)
    begun = time.perf_counter()
    start, *failed = runs_of(fake(faces=["offline"], fault="hang"))
    assert start.error is None and all("no answer within 0.3 s" in run.error for run in failed)
    assert time.perf_counter() - begun < 10 and not children(os.getpid())


def lives(pid):
    """Whether it runs; somebody may have to wait for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_helpers_of_an_engine_end_with_it(runs_of, fake, tmp_path):
    runs_of(fake(faces=["offline"], fault="helper"))
    helper = int(re.search(r"helper (\d+)", (tmp_path / "fake-offline.log").read_text())[1])
    until = time.perf_counter() + 5
    while lives(helper):
        assert time.perf_counter() < until
        time.sleep(0.01)


def test_what_an_engine_prints_lies_in_its_log(runs_of, fake, tmp_path):
    runs_of(fake("a/branch", ["offline"]))
    words = (tmp_path / "a-branch-offline.log").read_text()
    assert "words to stdout" in words and "closed" in words


def test_peak_memory_counts_what_was_given_back_and_shared_pages_once(tmp_path):
    from benchmarks.cpu.memory import peak_of

    folder = tmp_path / str(os.getpid())
    folder.mkdir()
    (folder / "smaps_rollup").write_text("00400000-7ff rollup\nRss:  300 kB\nPss:  120 kB\n")
    (folder / "status").write_text("Name: x\nVmHWM:  500 kB\nVmRSS:  300 kB\n")
    assert peak_of([os.getpid()], tmp_path) == (120 + 500 - 300) * 1024


def test_who_interrupts_a_load_ends_the_server_and_keeps_what_was_measured(fake, tmp_path, monkeypatch, children):
    from benchmarks.cpu import commands, subject

    whole = subject.client.exchange

    def broken(port, requests, streams, now, limit):
        if streams == subject.LOADS["http"].streams:
            raise KeyboardInterrupt
        return whole(port, requests, streams, now, limit)

    monkeypatch.setattr(subject.client, "exchange", broken)
    given = {"loads": "single,http", "out": tmp_path / "out.json", "quick": True, "seed": 0}
    runs = commands.measure([fake(faces=["http"])], 1, given)
    assert [run.load for run in runs] == ["start-http", "single"] and not children(os.getpid())
    kept = json.loads((tmp_path / "out.json").read_text())
    assert [run["load"] for run in kept["runs"]] == ["start-http", "single"] and kept["engines"]["fake"]["cpus"] == [0]
