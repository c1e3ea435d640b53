"""What arms can be (engines of this process, servers of our own, anybody's), and that each metric is told of them."""

import json
import os
import threading

import pytest
import yaml
from click.testing import CliRunner

from hotswap.core.engine.clock import SystemClock
from hotswap.core.execution.builder import SharedModels
from hotswap.lab.arms import started
from hotswap.lab.experiment import load_experiment
from hotswap.lab.journal import FILE, read_journal
from hotswap.lab.metrics import COMPARED
from hotswap.lab.plan import make_plan
from hotswap.lab.records import Result
from hotswap.lab.report import read_result
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.server.cli import main

NOW = SystemClock().now
PAGE_BYTES = 16 * 2 * 16 * 4
"""Of the tiny model: 16 tokens, keys and values, one head of 16, float32."""
CACHED = {"families": 1, "prefix": 40}
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def invoke(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def blocks_of(folder, arm):
    blocks = [line["block"] for line in read_journal(folder / FILE) if line["event"] == "block"]
    return [block for block in blocks if block.arm == arm]


@pytest.fixture
def experiment(config, tmp_path):
    """The result of an experiment, and the folder with all that was measured."""
    def run(**values):
        file, out = tmp_path / "experiment.yaml", tmp_path / "out"
        file.write_text(yaml.safe_dump({"base": config.name, "sampling": GREEDY, **values}))
        done = invoke("ab", file, "--out", out)
        assert done.exit_code == 0, done.output
        return read_result(out / "result.json"), out
    return run


def test_each_metric_that_an_experiment_compares_is_told_by_engines_of_this_process(experiment):
    """Drafts, a cache that is too small for all who run, equal beginnings: nothing is trivially zero."""
    pages = 18
    both = {"speculator": {"use": "ngram", "min_n": 1, "max_draft": 3}, "execution.depth": 2}
    result, out = experiment(
        arms={"roomy": both, "tight": {**both, "kvcache": {"num_blocks": 1 + pages}}},
        against="roomy", slo={"ttft": "100s"}, pairs=2, warm_up=1, block={"requests": 8}, load={"concurrency": 6},
        metrics=[*COMPARED, "batch_size", "kv_waste"],
        workload={"use": "synthetic", **CACHED, "prompt": 30, "output": 60})
    assert {found.metric for found in result.comparisons if found.n_pairs} == (
        {*COMPARED, "batch_size", "kv_waste"} - {"rss_peak"})
    for arm in ("roomy", "tight"):
        for block, pair in zip(blocks_of(out, arm), result.pairs["tight"], strict=True):
            told = pair.base if arm == "roomy" else pair.arm
            assert told["throughput"] == pytest.approx(8 * 60 / block.wall)
            assert told["goodput"] == told["requests"] == pytest.approx(8 / block.wall)
            assert told["preemptions"] == sum(record.preemptions for record in block.requests) / 8
            assert 0 < told["hit_rate"] < 1
            assert 1 < told["acceptance_length"] <= 4
            assert 1 < told["batch_size"] <= 6
            assert 0 < told["step_time"] * block.engine["steps"] <= 1.05 * block.wall, "work does not overlap"
            assert 0 < told["queue_mean"] < told["ttft_mean"] < told["e2e_mean"]
            assert 0 < told["cpu"] <= 1.05 * os.cpu_count() * block.wall + 0.1, "of the block alone"
            assert told["kv_peak"] % PAGE_BYTES == 0
            assert 0 < told["kv_waste"] < 0.5
    tight, roomy = ([getattr(pair, side) for pair in result.pairs["tight"]] for side in ("arm", "base"))
    assert all(told["preemptions"] > 0 == other["preemptions"] for told, other in zip(tight, roomy, strict=True))
    assert all(12 * PAGE_BYTES < told["kv_peak"] <= pages * PAGE_BYTES < other["kv_peak"]
               for told, other in zip(tight, roomy, strict=True))


def test_memory_that_is_given_out_in_whole_stretches_is_told_as_waste(experiment):
    """Of 256 tokens a request, the context's length, at most 27 are used; of pages of 16 it is half of the last."""
    result, _ = experiment(
        arms={"contiguous": {"kvcache": "contiguous"}, "paged": {"kvcache": "paged"}}, against="contiguous", pairs=2,
        warm_up=1, block={"requests": 4}, load={"concurrency": 2}, metrics=["kv_waste", "kv_peak"],
        workload={"use": "synthetic", "prompt": 20, "output": 7})
    for pair in result.pairs["paged"]:
        assert 1 - 27 / 256 <= pair.base["kv_waste"] < 1 - 19 / 256
        assert 0 <= pair.arm["kv_waste"] < 0.4
        assert pair.base["kv_peak"] >= 8 * pair.arm["kv_peak"] > 0


def test_arms_of_this_process_have_one_copy_of_the_weights(config, monkeypatch):
    loaded = []

    class Counted(SharedModels):
        def join(self, builder):
            joined = super().join(builder)
            loaded.append(id(joined.loading))
            return joined

    monkeypatch.setattr("hotswap.lab.arms.SharedModels", Counted)
    plan = make_plan(load_experiment({
        "base": str(config), "arms": {"b": {"scheduler": "static"}, "c": {"kvcache": "radix", "seed": 7}},
        "workload": {"use": "synthetic", "prompt": 20}}), progress=False)
    with started(plan, NOW, progress=False) as arms:
        assert len(arms) == len(loaded) == 3
    assert len(set(loaded)) == 1


def test_a_trace_is_replayed_for_every_arm_at_its_own_times(experiment, tmp_path):
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:15:46.{place:02}00000,{10 + place % 5},{2 + place % 3}\n" for place in range(0, 80, 4)))
    result, out = experiment(
        arms={"b": {"scheduler": "static"}}, workload={"use": "azure", "path": str(tmp_path / "trace.csv")},
        load={"arrivals": "workload"}, block={"requests": 5}, pairs=2, warm_up=1)
    for arm in ("base", "b"):
        first, second = blocks_of(out, arm)
        for number, block in enumerate((first, second), 1):
            assert [record.planned for record in block.requests] == pytest.approx([0, 0.04, 0.08, 0.12, 0.16])
            assert [record.prompt_tokens for record in block.requests] == [
                10 + 4 * place % 5 for place in range(5 * number, 5 * number + 5)]
            assert [record.output_tokens for record in block.requests] == [
                2 + 4 * place % 3 for place in range(5 * number, 5 * number + 5)]
            assert all(record.sent - record.planned < 1 and record.error is None for record in block.requests)
    assert result.divergences == [] and result.outputs_compared == {"b": 10}


@pytest.mark.parametrize("source", ["experiment", "base", "folder"])
def test_minutes_on_the_command_line_go_before_those_of_the_file(config, tmp_path, monkeypatch, source):
    planned = []

    def conduct(plan, say, **settings):
        planned.append(plan.experiment.minutes)
        return Result({}, {}, [], [], [], "time is over", False)

    monkeypatch.setattr("hotswap.lab.conduct.conduct", conduct)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "one.yaml").write_text(yaml.safe_dump({
        "base": str(config), "arms": {"b": {"scheduler": "static"}}, "minutes": 7,
        "workload": {"use": "synthetic", "prompt": 20}}))
    monkeypatch.setattr("hotswap.lab.commands.ab.SHORT", {"workload": {"use": "synthetic", "prompt": 20}})
    given = {"experiment": [folder / "one.yaml"], "base": [config, "--arm", "scheduler=static"], "folder": [folder]}
    for minutes in ([], ["--minutes", "0.5"]):
        done = invoke("ab", *given[source], *minutes)
        assert done.exit_code == 0, done.output
    assert planned == [10 if source == "base" else 7, 0.5]


def test_the_seed_of_a_bench_decides_what_is_sent_and_when(stub, tmp_path):
    def planned(seed):
        done = invoke("bench", "--url", stub.url, "--requests", 6, "--warm-up", 0, "--rate", 200, "--seed", seed,
                      "--option", "prompt={dist: uniform, low: 1, high: 90}", "--option", "output=3",
                      "--output", tmp_path / "bench.json")
        assert done.exit_code == 0, done.output
        requests = json.loads((tmp_path / "bench.json").read_text())["block"]["requests"]
        return [[request[key] for request in requests] for key in ("prompt_tokens", "planned")]

    stub.script = talking
    (lengths, times), same, (other_lengths, other_times) = planned(1), planned(1), planned(2)
    assert same == [lengths, times] and lengths != other_lengths and times != other_times


def talking(reply):
    if "prompt" not in reply.body:
        return reply.refuse(404)
    reply.begin()
    for token in range(3):
        reply.say(1, text="x", token_ids=[token])
    return reply.end(prompt_tokens_details={"cached_tokens": 2})


@pytest.fixture
def peer(stub):
    """Another server of the kind of ``stub``."""
    other = type(stub)()
    yield other
    other.stop()


def test_a_peer_beside_arms_of_ours_gets_the_same_requests_over_http(config, stub, peer, tmp_path, monkeypatch):
    """Ours are then servers, too, so that HTTP costs both alike. Here a stub stands for ours."""
    configs = []

    def server(config, fields, now):
        configs.append(config.config)
        return OpenAITarget(Endpoint(stub.url, fields=fields, token_ids=True), now)

    stub.script = peer.script = talking
    monkeypatch.setattr("hotswap.lab.arms.ServerTarget", server)
    monkeypatch.setattr("hotswap.lab.commands.ab.SHORT", {
        "workload": {"use": "synthetic", "prompt": 20, "output": 3}, "pairs": 2, "block": {"requests": 4},
        "warm_up": 1, "sampling": {"temperature": 0.0}})
    out = tmp_path / "out"
    done = invoke("ab", config, "--arm", "scheduler=static", "--url", peer.url, "--out", out)
    assert done.exit_code == 0, done.output
    assert "arms run as separate processes: an arm is a server, and is spoken to over HTTP" in done.output
    assert [one.scheduler.use for one in configs] == ["static"]
    name = peer.url.removeprefix("http://")
    result = read_result(out / "result.json")
    assert list(result.configs) == ["scheduler=static", name] and result.configs[name]["url"] == peer.url
    sent = [sorted(tuple(body["prompt"]) for body in one.bodies if "prompt" in body) for one in (stub, peer)]
    assert sent[0] == sent[1] and len(sent[0]) == 3 * 4
    assert all(body["temperature"] == 0.0 for body in peer.bodies if "prompt" in body)
    compared = {found.metric for found in result.comparisons if found.n_pairs}
    assert {"ttft_p50", "tpot_p50", "e2e_p99", "throughput", "hit_rate", "errors"} <= compared
    assert [pair.arm["hit_rate"] for pair in result.pairs[name]] == [0.1, 0.1]


def test_a_foreign_server_that_dies_in_the_middle_leaves_a_report_that_says_so(config, stub, peer, tmp_path):
    lock, last = threading.Lock(), 4 + 2 * 4 + 2  # warming up, two pairs, and half a block

    def mortal(reply):
        with lock:
            if len(peer.bodies) > last:
                peer.stop()
                reply._handler.close_connection = True  # without an answer
                return
        talking(reply)

    stub.script, peer.script = talking, mortal
    file, out = tmp_path / "experiment.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump({
        "arms": {"base": {"url": stub.url}, "peer": {"url": peer.url}}, "pairs": 8, "warm_up": 1,
        "block": {"requests": 4}, "load": {"concurrency": 1}, "workload": {"use": "synthetic", "prompt": 20}}))
    done = invoke("ab", file, "--out", out)
    assert done.exit_code == 1, done.output
    result = read_result(out / "result.json")
    assert result.partial and result.stopped.startswith(f"arm 'peer' died in pair 2: {peer.url}: ConnectionRefused")
    assert f"PARTIAL: {result.stopped}" in done.output
    assert "Partial: arm &#39;peer&#39; died" in (out / "report.html").read_text("utf-8")
    whole = [block for block in blocks_of(out, "peer") if block.pair < 2]
    assert len(whole) == 2 and all(record.error is None for block in whole for record in block.requests)
    half = blocks_of(out, "peer")[-1]
    assert half.pair == 2 and sum(record.error is None for record in half.requests) == 2, "what it answered is kept"
