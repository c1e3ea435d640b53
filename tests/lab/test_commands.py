"""``hotswap ab`` and ``hotswap bench`` from the command line to what they write, with engines that compute."""

import json
import os
import threading

import pytest
import yaml
from click.testing import CliRunner

from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import HotswapError
from hotswap.lab.arms import started
from hotswap.lab.experiment import load_experiment
from hotswap.lab.journal import FILE, read_journal
from hotswap.lab.load import ClosedLoop, Stretch, run_load
from hotswap.lab.plan import make_plan
from hotswap.lab.processes import cpu_of_this_process
from hotswap.lab.records import Result
from hotswap.lab.report import read_result
from hotswap.lab.targets.openai import OpenAITarget
from hotswap.lab.targets.server import ServerTarget
from hotswap.server.cli import main


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def experiment(config, tmp_path):
    """An experiment of four pairs, and its file."""
    def write(**changes):
        values = {
            "base": config.name, "arms": {"static": {"scheduler": "static"}}, "pairs": 4, "block": {"requests": 6},
            "workload": {"use": "synthetic", "prompt": 20, "output": 6}, "load": {"concurrency": 3},
            "sampling": {"temperature": 0.0, "ignore_eos": True}, "slo": {"ttft": "10s"}, **changes}
        file = tmp_path / "experiment.yaml"
        file.write_text(yaml.safe_dump(values))
        return file
    return write


def blocks_of(folder):
    return [line["block"] for line in read_journal(folder / FILE) if line["event"] == "block"]


def test_an_experiment_measures_all_that_it_promises(experiment, tmp_path):
    result = invoke("ab", experiment(), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "'temperature': 0.0" in result.output, "the effective body is shown"
    blocks = blocks_of(tmp_path / "out")
    assert {block.arm for block in blocks} == {"base", "static"} and len(blocks) == 8
    for block in blocks:
        assert all(record.error is None and record.output_tokens == 6 for record in block.requests)
        assert all(record.cached_tokens == 0 for record in block.requests), "cold"
        assert block.cpu > 0 and block.engine["steps"] > 0 and block.engine["kv_peak_bytes"] > 0
        assert block.engine["step_seconds"] <= block.wall * 1.05
        assert block.timeline and block.disturbed is not None
        assert all(record.queued is not None and record.preemptions == 0 for record in block.requests)
    first, second = ([r.tokens for r in block.requests] for block in blocks[:2])
    assert first == second, "greedy outputs of two schedulers are the same"


def test_the_short_form_compares_the_first_arm_with_the_others(config, tmp_path, monkeypatch):
    monkeypatch.setattr("hotswap.lab.commands.ab.SHORT", {
        "workload": {"use": "synthetic", "prompt": 20, "output": 4}, "pairs": 2, "block": {"requests": 4}})
    result = invoke(
        "ab", config, "--arm", "scheduler=static", "--arm", "scheduler=continuous kvcache=paged",
        "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert {block.arm for block in blocks_of(tmp_path / "out")} == {
        "scheduler=static", "scheduler=continuous+kvcache=paged"}
    header = next(iter(read_journal(tmp_path / "out" / FILE)))
    assert header["experiment"]["against"] == "scheduler=static"


def test_a_folder_is_run_file_by_file_and_ends_in_one_table(experiment, tmp_path):
    experiment(pairs=2)
    result = invoke("ab", folder_of(tmp_path, "one", "two"), "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert [len(blocks_of(tmp_path / "out" / name)) for name in ("one", "two")] == [4, 4]
    table = (tmp_path / "out" / "overview.md").read_text("utf-8")
    assert "| one | `base` |" in table and "| two | `base` |" in table and table in result.output


def folder_of(tmp_path, *names):
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in names:
        (folder / f"{name}.yaml").write_text((tmp_path / "experiment.yaml").read_text().replace(
            "config.yaml", "../config.yaml"))
    return folder


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_ends_one_experiment_of_a_folder_ends_all_and_the_table_tells_of_those_before(
        experiment, tmp_path, monkeypatch, interrupted):
    def conduct(plan, say, **settings):
        if plan.experiment.out.endswith("three"):
            raise HotswapError("its server did not start")
        return Result({}, {}, [], [], [], "it was interrupted" if interrupted else "2 pairs are in", interrupted)

    monkeypatch.setattr("hotswap.lab.conduct.conduct", conduct)
    experiment(pairs=2)
    folder = folder_of(tmp_path, "one", "three", "two")
    result = invoke("ab", folder, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "hotswap: not run: three, two" in result.output and "overview.md" in result.output
    assert ("its server did not start" in result.output) is not interrupted


def test_an_engine_that_dies_leaves_a_partial_result_and_exit_code_1(experiment, tmp_path, monkeypatch):
    from hotswap.lab.targets.engine import EngineTarget

    count = []

    def begin(target):
        count.append(target)
        if len(count) == 9:
            loop = target._built.engines[0].engine.loop

            def broken(*args):
                raise RuntimeError("the device is lost")

            monkeypatch.setattr(loop.parts.executor, "collect", broken)
        return EngineTarget._begin(target)

    monkeypatch.setattr(EngineTarget, "_begin", EngineTarget.begin, raising=False)
    monkeypatch.setattr(EngineTarget, "begin", begin)
    result = invoke("ab", experiment(), "--out", tmp_path / "out")
    assert result.exit_code == 1, result.output
    assert "died in pair" in result.output and "the device is lost" in result.output
    lines = list(read_journal(tmp_path / "out" / FILE))
    assert lines[-1]["partial"] is True
    assert len([line for line in lines if line["event"] == "block"]) == 5


def test_bench_tells_and_writes_what_it_measured(config, tmp_path):
    file = tmp_path / "bench.json"
    result = invoke(
        "bench", config, "--requests", 12, "--option", "prompt=20", "--option", "output=5", "--sampling",
        "ignore_eos=true", "--slo", "ttft=10s", "--output", file)
    assert result.exit_code == 0, result.output
    written = json.loads(file.read_text())
    assert written["metrics"]["throughput"]["value"] > 0
    assert written["metrics"]["goodput"]["value"] == pytest.approx(written["metrics"]["requests"]["value"])
    assert all(metric["formula"] for metric in written["metrics"].values())
    assert [request["output_tokens"] for request in written["block"]["requests"]] == [5] * 12
    assert written["environment"]["versions"]["torch"]
    assert written["settings"]["config"]["scheduler"]["max_running"] == 8
    assert written["settings"]["workload"] == {"use": "synthetic", "prompt": 20, "output": 5}
    assert written["settings"]["requests"] == 12 and written["partial"] is None
    assert "ttft" in result.output and "ended well" in result.output


def test_bench_of_a_window_counts_seconds_instead_of_requests(config):
    result = invoke("bench", config, "--seconds", 0.5, "--rate", 20, "--option", "prompt=20", "--option", "output=4")
    assert result.exit_code == 0, result.output


def test_bench_aims_at_any_server_and_tells_failures_by_their_status(stub):
    def script(reply):
        if len(stub.bodies) % 4 == 0:
            return reply.refuse(429)
        reply.begin()
        reply.say(3)
        reply.say(2)
        return reply.end()

    stub.script = script
    result = invoke("bench", "--url", stub.url, "--model", "stub", "--requests", 8, "--warm-up", 0, "--concurrency", 1)
    assert result.exit_code == 1, result.output
    assert "HTTP 429 x 2" in result.output
    assert "'model': 'stub'" in result.output
    assert all("temperature" not in body for body in stub.bodies)
    assert "sampled" not in result.output


def test_a_servers_key_is_read_from_a_file_and_not_written_anywhere(stub, tmp_path):
    def script(reply):
        reply.begin()
        reply.say(1)
        return reply.end()

    stub.script = script
    (tmp_path / "key").write_text("s3cret\n")
    output = tmp_path / "bench.json"
    result = invoke(
        "bench", "--url", stub.url, "--requests", 2, "--key-file", tmp_path / "key", "--output", output)
    assert result.exit_code == 0, result.output
    assert stub.keys == {"Bearer s3cret"}
    assert "s3cret" not in output.read_text() + result.output


def test_of_a_folder_each_file_is_checked_before_the_first_is_run(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr("hotswap.lab.conduct.conduct", lambda *args, **kwargs: pytest.fail("it was run"))
    experiment()
    folder = tmp_path / "folder"
    folder.mkdir()
    text = (tmp_path / "experiment.yaml").read_text().replace("config.yaml", "../config.yaml")
    (folder / "a.yaml").write_text(text)
    (folder / "b.yaml").write_text(text.replace("ttft", "ttfft"))
    result = invoke("ab", folder)
    assert result.exit_code == 2
    assert "b.yaml: slo" in result.output


def test_bench_says_so_where_no_request_is_answered(stub):
    stub.script = lambda reply: reply.refuse(500, "broken")
    result = invoke("bench", "--url", stub.url, "--requests", 8)
    assert result.exit_code == 1
    assert "no request was answered while warming up: HTTP 500: broken" in result.output


def test_an_experiment_ends_in_verdicts_a_file_of_all_data_and_a_page(experiment, tmp_path):
    out = tmp_path / "out"
    result = invoke("ab", experiment(metrics=["ttft_p50", "throughput"]), "--out", out)
    assert result.exit_code == 0, result.output
    read = read_result(out / "result.json")
    assert [found.metric for found in read.comparisons] == ["ttft_p50", "throughput"]
    assert not read.partial and read.stopped == "4 pairs are in"
    assert list(read.blocks) == blocks_of(out), "the journal and the result tell the same"
    assert set(read.configs) == {"base", "static"}
    assert read.configs["static"]["scheduler"]["use"] == "static"
    assert "throughput" in result.output
    page = (out / "report.html").read_text()
    assert "throughput" in page and "<script" in page


def test_arms_in_processes_of_their_own_tell_their_memory_and_one_that_is_killed_leaves_a_partial_result(
        experiment, tmp_path, monkeypatch):
    targets, schedulers = [], []
    start = ServerTarget.begin

    def begin(target):
        targets.append(target)
        if len(targets) <= 2:
            schedulers.append(target.ask("GET", "/server_info")["config"]["scheduler"]["use"])
        if len(targets) == 2 + 2 * 2 + 1:  # warm-up, two pairs, and then
            target._child.process.kill()
            target._child.process.wait()
        return start(target)

    monkeypatch.setattr(ServerTarget, "begin", begin)
    out = tmp_path / "out"
    result = invoke("ab", experiment(processes="separate", warm_up=1), "--out", out)
    assert result.exit_code == 1, result.output
    assert "its server ended with exit code -9" in result.output
    assert read_result(out / "result.json").partial
    assert all(target._child.process.poll() is not None for target in targets), "nobody is left"
    assert schedulers == ["chunked", "static"], "each is started with its own config"
    blocks = blocks_of(out)[:4]
    assert {block.pair for block in blocks} == {0, 1}
    for block in blocks:
        assert block.engine["rss_peak_bytes"] > 50e6
        assert 2 * 2048 <= block.engine["kv_peak_bytes"] < 8 * 2048, "of three requests with up to 26 tokens"
        assert block.engine["steps"] > 0 and block.engine["queued_requests"] == 6
        assert 0 < block.cpu <= 1.05 * os.cpu_count() * block.wall + 0.3, "of the block alone"
        assert all(record.cached_tokens == 0 and len(record.tokens) == 6 for record in block.requests)
    compared = {found.metric for found in read_result(out / "result.json").comparisons if found.n_pairs}
    assert {"rss_peak", "kv_peak", "queue_mean", "preemptions", "step_time"} <= compared
    found = read_result(out / "result.json")
    assert found.divergences == [] and found.outputs_compared == {"static": 2 * 6}


def test_a_foreign_server_may_be_an_arm(experiment, stub, tmp_path):
    def script(reply):
        reply.begin()
        for token in range(3):
            reply.say(1, text="x", token_ids=[token])
        reply.end()

    stub.script = script
    out = tmp_path / "out"
    file = experiment(base=None, arms={"base": {"url": stub.url}, "again": {"url": stub.url}}, pairs=2)
    result = invoke("ab", file, "--out", out)
    assert result.exit_code == 0, result.output
    prompts = [tuple(body["prompt"][:8]) for body in stub.bodies if "prompt" in body]
    assert len(set(prompts)) == len(prompts), "one server's arms share no prefix"


def test_benches_of_one_server_do_not_warm_its_cache_for_one_another(stub):
    def script(reply):
        if "prompt" not in reply.body:
            return reply.refuse(404)  # a cache that cannot be emptied
        reply.begin()
        reply.say(1)
        return reply.end()

    stub.script = script
    for _ in range(2):
        assert invoke("bench", "--url", stub.url, "--requests", 8, "--seed", 0).exit_code == 0
    heads = [tuple(body["prompt"][:8]) for body in stub.bodies if "prompt" in body]
    assert len(set(heads)) == len(heads) == 24


def answering(reply):
    if "prompt" not in reply.body:
        return reply.refuse(200, "")
    reply.begin()
    reply.say(1)
    return reply.end()


@pytest.mark.parametrize("asked", [False, True])
def test_the_cache_of_a_server_that_runs_already_is_emptied_only_where_that_is_asked_for(
        experiment, stub, tmp_path, asked):
    stub.script = answering
    arm = {"url": stub.url, **({"reset": True} if asked else {})}
    file = experiment(base=None, arms={"base": arm, "again": arm}, pairs=2, warm_up=1)
    assert invoke("ab", file, "--out", tmp_path / "out").exit_code == 0
    resets = sum("prompt" not in body for body in stub.bodies)
    assert resets == (2 + 2 * (1 + 2) if asked else 0), "once to see that it can, and before each block"
    options = ["--reset"] if asked else []
    stub.bodies.clear()
    assert invoke("bench", "--url", stub.url, "--requests", 4, *options).exit_code == 0
    assert any("prompt" not in body for body in stub.bodies) is asked


def test_a_server_that_cannot_empty_its_cache_and_should_is_refused(experiment, stub):
    stub.script = lambda reply: answering(reply) if "prompt" in reply.body else reply.refuse(404)
    arm = {"url": stub.url, "reset": True}
    result = invoke("ab", experiment(base=None, arms={"base": {"url": stub.url}, "b": arm}))
    assert result.exit_code == 2 and "arms.b.reset: " in result.output and "HTTP 404" in result.output
    result = invoke("bench", "--url", stub.url, "--reset")
    assert result.exit_code == 2 and "HTTP 404" in result.output
    result = invoke("ab", experiment(base=None, arms={"base": {"url": stub.url}, "b": {**arm, "reset": "no"}}))
    assert result.exit_code == 2 and "arms.b.reset: should be true or false, not 'no'" in result.output


def test_a_bench_that_is_interrupted_while_warming_up_measures_nothing(stub, monkeypatch):
    stub.script = answering
    monkeypatch.setattr("hotswap.lab.bench.run_load", lambda *args, **kwargs: Stretch((), 0.1, "it was interrupted"))
    result = invoke("bench", "--url", stub.url, "--requests", 8)
    assert result.exit_code == 1
    assert "while warming up it was interrupted" in result.output


def test_a_bench_of_a_window_says_that_its_server_died_before_the_window_had_closed(stub, monkeypatch, tmp_path):
    stub.script = lambda reply: answering(reply) if len(stub.bodies) <= 12 else reply.refuse(500, "broken")
    monkeypatch.setattr(
        OpenAITarget, "problem", lambda target: "the server is gone" if len(stub.bodies) > 12 else None)
    output = tmp_path / "bench.json"
    result = invoke("bench", "--url", stub.url, "--seconds", 60, "--concurrency", 1, "--output", output)
    assert result.exit_code == 1, result.output
    assert "of 60 seconds: the server is gone" in result.output and "hotswap: it ended after " in result.output
    written = json.loads(output.read_text())
    assert written["partial"].endswith("of 60 seconds: the server is gone")
    assert len(written["block"]["requests"]) > 8, "nothing that was measured is lost"


def test_an_experiment_whose_arm_never_answers_is_partial_from_the_start(experiment, stub, tmp_path):
    stub.script = lambda reply: reply.refuse(500, "broken")
    out = tmp_path / "out"
    result = invoke("ab", experiment(base=None, arms={"base": {"url": stub.url}, "b": {"url": stub.url}}), "--out", out)
    assert result.exit_code == 1, result.output
    assert "HTTP 500: broken" in result.output
    assert read_result(out / "result.json").partial


def test_sessions_and_traces_of_turns_are_measured(experiment, tmp_path):
    out = tmp_path / "out"
    workload = {"use": "sessions", "turns": 3, "system": 10, "message": 8, "output": 5, "think": 0.01}
    result = invoke("ab", experiment(workload=workload, pairs=2, cache="warm"), "--out", out)
    assert result.exit_code == 0, result.output
    assert all(record.error is None for block in blocks_of(out) for record in block.requests)


def test_arms_compute_on_one_thread_and_one_that_waits_for_its_turn_uses_no_cpu(config):
    workload = {"use": "synthetic", "prompt": 20}
    plan = make_plan(load_experiment({
        "base": str(config), "arms": {"static": {"scheduler": "static"}}, "workload": workload}))
    now = SystemClock().now
    with started(plan, now, progress=False) as arms:
        for arm in arms:
            run_load(arm.target, zip(range(4), plan.items(), strict=False), ClosedLoop(2), now, name=arm.name)
        assert sum(thread.name.startswith("hotswap-lane") for thread in threading.enumerate()) == 1
        threading.Event().wait(0.1)
        shares = []
        for _ in range(3):
            before, begin = cpu_of_this_process(), now()
            threading.Event().wait(0.4)
            shares.append((cpu_of_this_process() - before) / (now() - begin))
    assert min(shares) < 0.05, shares
