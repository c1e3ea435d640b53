"""``hotswap ab`` and ``hotswap bench`` from the command line to what they write, with engines that compute."""

import json

import pytest
import yaml
from click.testing import CliRunner

from hotswap.lab.journal import FILE, read_journal
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


def test_a_folder_is_run_file_by_file(experiment, tmp_path):
    experiment(pairs=2)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text((tmp_path / "experiment.yaml").read_text().replace(
            "config.yaml", "../config.yaml"))
    result = invoke("ab", folder, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert [len(blocks_of(tmp_path / "out" / name)) for name in ("one", "two")] == [4, 4]


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


def test_bench_says_so_where_no_request_is_answered(stub):
    stub.script = lambda reply: reply.refuse(500, "broken")
    result = invoke("bench", "--url", stub.url, "--requests", 8)
    assert result.exit_code == 1
    assert "no request was answered while warming up: HTTP 500: broken" in result.output
