"""An experiment from its plan to its report, with arms whose answers are made up: its end, what it shows and writes."""

import contextlib
import functools
import io
import json
import re

import pytest
from tqdm import tqdm

import hotswap.lab.conduct as module
from hotswap.core.engine.clock import SystemClock
from hotswap.core.interfaces.component import ComponentRef
from hotswap.lab.bench import Bench
from hotswap.lab.experiment import load_experiment
from hotswap.lab.journal import FILE, read_journal
from hotswap.lab.load import ClosedLoop
from hotswap.lab.plan import make_plan
from hotswap.lab.records import Outcome
from hotswap.lab.report import read_result, render_table
from hotswap.lab.run import Arm
from hotswap.lab.targets.openai import Endpoint

SLOW = 0.012


@pytest.fixture
def conducted(config, tmp_path, monkeypatch):
    """``conducted({"base": target, "b": target}, …)`` -> the result. What is written lies in ``tmp_path / "out"``."""
    def run(targets, progress=False, **changes):
        @contextlib.contextmanager
        def started(plan, now, *, progress):
            yield [Arm(arm.name, targets[arm.name], arm.name) for arm in plan.arms]

        monkeypatch.setattr(module, "started", started)
        plan = make_plan(load_experiment({
            "base": str(config), "arms": {name: {"scheduler": "static"} for name in targets if name != "base"},
            "workload": {"use": "synthetic", "prompt": 20, "output": 4}, "load": {"concurrency": 2},
            "block": {"requests": 4}, "metrics": ["e2e_mean"], "warm_up": 1, "out": str(tmp_path / "out"), **changes,
        }), progress=False)
        return module.conduct(plan, lambda words: None, progress=progress)
    return run


def quick(**settings):
    return {"flips": 999, "looks": 4, "spending": 1.0, **settings}


def test_a_large_difference_ends_the_run_once_its_verdict_is_in(conducted, script):
    result = conducted({"base": script(), "b": script(SLOW)}, pairs=80, statistics=quick())
    assert (result.stopped, result.partial) == ("every verdict is in", False)
    assert [found.outcome for found in result.comparisons] == [Outcome.WORSE]
    assert len(result.pairs["b"]) < 80 and result.looks[-1].progress < 1


def test_a_run_that_may_not_stop_early_goes_on_to_its_end_whatever_it_sees(conducted, script):
    result = conducted({"base": script(), "b": script(SLOW)}, pairs=24, statistics=quick(stop="time"))
    assert result.stopped == "24 pairs are in" and len(result.looks) == 1


def test_a_run_until_the_interval_is_narrow_ends_with_one_that_is(conducted, script):
    result = conducted(
        {"base": script(SLOW), "b": script(SLOW)}, pairs=80, statistics=quick(stop="width", width=0.5))
    assert result.stopped == "every interval is narrow enough"
    [found] = result.comparisons
    assert (found.high - found.low) / 2 <= 0.5


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def shown(monkeypatch):
    """What a terminal shows of bars."""
    terminal = Terminal()
    for name in ("conduct", "bench"):
        monkeypatch.setattr(
            f"hotswap.lab.{name}.tqdm", functools.partial(tqdm, file=terminal, mininterval=0, ncols=90))
    return terminal


def test_a_bar_on_a_terminal_shows_which_pair_runs_and_the_time_that_is_left(conducted, script, shown):
    conducted({"base": script(), "b": script()}, progress=True, pairs=8)
    lines = shown.getvalue().split("\r")
    assert any(line.startswith("warming up") for line in lines)
    shares = [(match[1], int(match[2])) for line in lines
              if (match := re.match(r"pair (\d+): +(\d+)%\|.*\| \d+:\d\d left", line))]
    assert {("3", 25), ("5", 50), ("7", 75)} <= set(shares), lines
    assert "100%" in lines[-1]


def test_where_there_is_no_terminal_there_is_no_bar(conducted, script, capsys):
    conducted({"base": script(), "b": script()}, progress=True, pairs=2)
    assert "left" not in capsys.readouterr().err


def test_where_answers_first_differ_is_told_in_words_of_the_model(conducted, script):
    targets = {"base": script(reply=lambda request: [40, 41, 42]), "b": script(reply=lambda request: [40, 45, 42])}
    result = conducted(targets, pairs=2, sampling={"temperature": 0.0})
    assert result.outputs_compared == {"b": 8} and len(result.divergences) == 8
    found = result.divergences[0]
    assert (found["position"], found["base_text"], found["arm_text"]) == (1, "F", "J")
    assert "b: greedy outputs differ from the base's in 8 of 8 requests" in render_table(result)


@pytest.mark.parametrize(("length", "line"), [
    ({"requests": 12}, r"requests: +\d+%\|.*\| \d+/12 \[\d+:\d\d<\d+:\d\d,"),
    ({"requests": 0, "seconds": 0.4}, r"seconds: +\d+%\|.*\| \d+:\d\d left"),
])
def test_a_bench_shows_the_time_that_is_left_of_its_requests_or_of_its_window(stub, shown, length, line):
    def script(reply):
        reply.begin()
        reply.say()
        reply.end()

    stub.script = script
    workload = ComponentRef(use="synthetic", prompt=20, output=1)
    bench = Bench(None, Endpoint(stub.url), workload, ClosedLoop(2), warm_up=1, **length)
    bench.run(SystemClock().now, lambda words: None)
    lines = shown.getvalue().split("\r")
    assert sum(re.match(line, text) is not None for text in lines) >= 5, lines


def test_what_is_written_names_versions_machine_and_the_config_of_each_arm(conducted, script, tmp_path):
    targets = {"base": script(), "same": script(), "other": script()}
    arms = {"same": {}, "other": {"scheduler": "static"}}
    result = conducted(targets, pairs=2, arms=arms)
    told = json.loads((tmp_path / "out" / "result.json").read_text())
    hashes = told["experiment"]["hashes"]
    assert hashes["base"] == hashes["same"] != hashes["other"]
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in hashes.values())
    assert {"hotswap", "torch", "python"} <= told["environment"]["versions"].keys()
    assert told["environment"]["cores"] >= 1 and told["environment"]["processor"]
    assert told["experiment"]["warm_up"] == 1 and told["experiment"]["cache"] == "cold", "defaults are spelled out"
    assert told["configs"]["other"]["scheduler"]["use"] == "static"
    header = next(iter(read_journal(tmp_path / "out" / FILE)))
    assert header["experiment"] == told["experiment"] and header["environment"] == told["environment"]
    assert read_result(tmp_path / "out" / "result.json").blocks == result.blocks, "with every request of every block"
