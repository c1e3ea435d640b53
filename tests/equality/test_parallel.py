"""Sharded engines, each a process a rank, against transformers: the same tokens as on one device, whatever else is
switched on, and collectives as often and as large as the count on paper says."""

import contextlib
import copy
import json
import os
import queue
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.execution.channel import decode, encode
from hotswap.core.interfaces.parallel import RankPlan
from hotswap.core.request import Request, SamplingParams
from hotswap.lab.decisions.again import replay
from hotswap.lab.decisions.log import open_logs
from hotswap.plugins.parallel.inline import InlineExecutor

CHUNKED = {"use": "chunked", "max_chunk": 7}
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 2, "max_draft": 3}
NOISE = 0.03
"""Of a draft model's weights, in standard deviations of each: so much that 20 to 80 % of the drafts are accepted."""
TOKENS = 14


@pytest.fixture(scope="session")
def odd(tmp_path_factory, tiny):
    """Sizes that no number of ranks divides: 161 tokens, an MLP of 129; 5 layers, tied embeddings, 4 heads over 2."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=161, hidden_size=64, intermediate_size=129, num_hidden_layers=5, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=1)).eval()
    path = tmp_path_factory.mktemp("odd-llama")
    model.save_pretrained(path)
    return type(tiny)(path, type(tiny.reference)(model))


def repeating(model, seed=3):
    """Prompts that repeat themselves, so that copied drafts are proposed and some are kept."""
    rng = random.Random(seed)
    prompts = []
    for length in (6, 9, 4):
        unit = model.prompt(length, rng)
        prompts.append(unit * 4)
    return prompts


def sizes(parallel):
    """Ranks, stages, and ranks a stage."""
    stages = next((part["size"] for part in parallel if part["use"] == "pipeline"), 1)
    tensor = next((part["size"] for part in parallel if part["use"] == "tensor"), 1)
    return tensor * stages, stages, tensor


def reports(engine):
    return engine.built.engine.call(engine.built.engine.loop.parts.executor.report)


SHARDINGS = [
    pytest.param([{"use": "tensor", "size": 4}], id="tensor4, heads replicated"),
    pytest.param([{"use": "pipeline", "size": 3}], id="pipeline3"),
    pytest.param([{"use": "pipeline", "size": 2}, {"use": "tensor", "size": 2}], id="pipeline2 over tensor2"),
    pytest.param([{"use": "tensor", "size": 2}], id="tensor2", marks=pytest.mark.whole),
    pytest.param([{"use": "tensor", "size": 8}], id="tensor8", marks=pytest.mark.whole),
    pytest.param([{"use": "pipeline", "size": 5}], id="pipeline5, a layer each", marks=pytest.mark.whole),
    pytest.param(
        [{"use": "pipeline", "size": 4}, {"use": "tensor", "size": 2}], id="pipeline4 over tensor2",
        marks=pytest.mark.whole),
    pytest.param(
        [{"use": "pipeline", "size": 2}, {"use": "tensor", "size": 4}], id="pipeline2 over tensor4",
        marks=pytest.mark.whole),
]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_equal_one_device_with_everything_switched_on(run, book, odd, noisy_of, sharding):
    """Chunks, prefix hits, preemption, two or more steps in flight and drafts, all in one run. On one stage the drafts
    are those of the target with noise, and 20 to 80 % of them are right; on several they are copied."""
    ranks, stages, _ = sizes(sharding)
    drafting = NGRAM if stages > 1 else {"use": "draft", "model": str(noisy_of(odd, NOISE)), "max_draft": 3}
    config = odd.config(CHUNKED, "prefix", drafting, 2, parallel=sharding, num_blocks=38)
    if stages > 1:
        del config["execution"]["depth"]
    engine = run(config)
    prompts = odd.prompts() + repeating(odd)
    for prompt, output in zip(prompts, engine.generate(prompts, TOKENS), strict=True):
        book.compare(odd.reference, prompt, output)
    seen, loop = engine.seen, engine.built.engine.loop
    assert loop.max_depth_seen == max(2, stages)
    assert seen["suspensions"] and seen["cut prompts"] and seen["cached tokens"] and seen["mixed steps"]
    assert seen["accepted"] and seen["rejected"]
    found = reports(engine)
    assert [report.rank for report in found] == list(range(ranks))
    if stages == 1:
        print(seen["accepted"] / (seen["accepted"] + seen["rejected"]))
        assert 0.2 < seen["accepted"] / (seen["accepted"] + seen["rejected"]) < 0.8
        whole = 4 * sum(parameter.numel() for parameter in odd.reference.model.parameters())
        assert {report.speculator_bytes for report in found} == {whole}, "each rank drafts, so that all draw together"
    engine.assert_clean()


FAILING = """
import torch.distributed as dist
from hotswap.plugins.speculators.draft import DraftModelSpeculator


class Failing(DraftModelSpeculator):
    class Options(DraftModelSpeculator.Options):
        rank: int

    calls = 0

    def propose(self, rows):
        self.calls += 1
        if self.calls in (3, 6) and dist.get_rank() == self.options.rank:
            if self.calls == 6:
                super().propose(rows)
            raise ValueError("planted")
        return super().propose(rows)
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Installs a speculator whose third proposal fails on one rank alone before it draws, and its sixth one after that.
    """
    (tmp_path / "failing_speculator.py").write_text(FAILING)
    (tmp_path / "failing-1.dist-info").mkdir()
    (tmp_path / "failing-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: failing\nVersion: 1\n")
    (tmp_path / "failing-1.dist-info" / "entry_points.txt").write_text(
        "[hotswap.speculator]\nfailing = failing_speculator:Failing\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("rank, dropped", [(0, 2), (1, 0)], ids=["the leading rank", "another rank"])
def test_a_proposal_that_fails_on_one_rank_is_dropped_and_counted_and_nobody_waits(
        run, book, odd, noisy_of, failing, rank, dropped):
    """The other ranks are in the midst of drawing. Requests that come later are drafted for as ever."""
    drafting = {"use": "failing", "model": str(noisy_of(odd, NOISE)), "max_draft": 3, "rank": rank}
    engine = run(odd.config("chunked", "prefix", drafting, 2, parallel=[{"use": "tensor", "size": 2}]))
    accepted = []
    for seed in (1, 2):
        prompts = odd.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, TOKENS), strict=True):
            book.compare(odd.reference, prompt, output)
        accepted.append(engine.seen["accepted"] - sum(accepted))
    assert accepted[1] > 10
    assert engine.built.engine.loads().extra["speculation"]["dropped_proposals"] == dropped
    assert engine.built.engine.health() is None
    engine.assert_clean()


@pytest.mark.slow
def test_collectives_and_bytes_are_as_many_as_on_paper(run, odd):
    """pipeline(2) > tensor(2). Without drafts, in a step of T tokens and N sampling rows: the embedding ends in one
    all-reduce on the first stage, each layer in two, the last one of N rows; N rows of half the vocabulary, padded, are
    gathered on the last. Weights and pages follow from the sizes alone."""
    engine = run(odd.config("chunked", "prefix", "none", 1, parallel=[
        {"use": "pipeline", "size": 2, "layers": [3, 2]}, {"use": "tensor", "size": 2}]))
    engine.generate([odd.prompt(9, random.Random(1))], 4)
    steps, tokens = 4, 9 + 3
    hidden, vocab = 64 * 4, 81 * 4  # bytes of a token's hidden state, and of half its logits
    share = 8 * 3  # accepted, length, token
    first = {"reduce tensor": (steps * 7, tokens * 7 * hidden), "pass on": (steps, tokens * hidden)}
    last = {
        "receive": (steps, tokens * hidden), "reduce tensor": (steps * 4, (tokens + steps) * 2 * hidden),
        "gather tensor": (steps, steps * vocab), "share": (steps, steps * share)}
    found = reports(engine)
    assert [report.collectives for report in found] == [first, first, last, last]
    pages = engine.built.cache_plan.groups["full"].num_pages
    for report in found:
        stage, place = divmod(report.rank, 2)
        mlp, vocab = (64, 65)[place], (80, 81)[place]
        layers = 3 - stage
        layer = 64 * (4 * 8 + 2 * 8 + 4 * 8) + 3 * 64 * mlp + 2 * 64  # q, k and v, o; gate, up and down; norms
        assert report.weight_bytes == 4 * (layers * layer + vocab * 64 + (64 if stage else 0))
        assert report.kv_bytes == pages * 4 * layers * 2 * 8 * 4  # a page is 4 tokens; keys and values of one head


@pytest.fixture(scope="session")
def experts(tmp_path_factory, tiny):
    """Six experts in one layer of two, two of them for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2, norm_topk_prob=True,
        bos_token_id=0, eos_token_id=1)).eval()
    path = tmp_path_factory.mktemp("tiny-experts")
    model.save_pretrained(path)
    return type(tiny)(path, type(tiny.reference)(model))


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [
    pytest.param([{"use": "tensor", "size": 2}], id="slices of all experts"),
    pytest.param(["expert", {"use": "tensor", "size": 4}], id="whole experts")])
def test_experts_over_the_ranks_of_tensor_equal_one_device(run, book, experts, parallel):
    engine = run(experts.config(CHUNKED, "prefix", NGRAM, 2, parallel=parallel, num_blocks=34))
    prompts = experts.prompts()
    for prompt, output in zip(prompts, engine.generate(prompts, TOKENS), strict=True):
        book.compare(experts.reference, prompt, output)
    assert engine.seen["suspensions"] and engine.seen["cached tokens"] and engine.seen["cut prompts"]
    found = [report.statistics["expert_load.1"] for report in reports(engine)]
    if len(parallel) == 1:
        assert [len(load) for load in found] == [6, 6]
        assert found[0] == found[1] and sum(found[0]) > 0
    else:
        assert [len(load) for load in found] == [1, 2, 1, 2]
        assert sum(map(sum, found)) % 2 == 0 and min(map(sum, found)) > 0
    engine.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [
    pytest.param([{"use": "tensor", "size": 2}], id="tensor2"),
    pytest.param([{"use": "pipeline", "size": 2}], id="pipeline2")])
def test_a_seed_gives_the_same_tokens_on_any_number_of_ranks(run, tiny, parallel):
    """Random numbers are keyed by seed and position; processors and logprobs see the whole vocabulary."""
    sampling = {
        "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4,
        "logit_bias": {5: 2.0}, "min_tokens": 6, "logprobs": 3, "prompt_logprobs": 1}
    requests = [{"prompt": prompt, "max_tokens": 12, **sampling} for prompt in tiny.prompts()]
    answers = []
    for layout in ([], parallel):
        engine = run(tiny.config("chunked", "prefix", "none", 1, parallel=layout))
        answers.append(engine.answer(*requests))
        engine.built.engine.stop()
    for alone, sharded in zip(*answers, strict=True):
        assert alone.error is None and sharded.error is None
        assert sharded.token_ids == alone.token_ids
        assert [entry.token_id for entry in sharded.logprobs] == [entry.token_id for entry in alone.logprobs]
        assert [entry.logprob for entry in sharded.logprobs] == pytest.approx(
            [entry.logprob for entry in alone.logprobs], abs=1e-4)
        assert [entry.logprob for entry in sharded.prompt_logprobs[1:]] == pytest.approx(
            [entry.logprob for entry in alone.prompt_logprobs[1:]], abs=1e-4)


@pytest.mark.slow
def test_eight_equal_decodes_over_two_stages_are_four_rows_a_step_and_two_steps_in_flight(run, tiny, tmp_path):
    """GPipe's schedule, by a row limit and a depth alone: read from the decision log."""
    path = tmp_path / "decisions.jsonl"
    config = tiny.config(
        {"use": "chunked", "max_running": 8}, "prefix", "none", 1, parallel=[{"use": "pipeline", "size": 2}],
        num_blocks=200, observers=[{"use": "decision_log", "path": str(path)}])
    del config["execution"]["depth"]
    engine = run(config)
    engine.generate([tiny.prompt(5, random.Random(seed)) for seed in range(8)], 20)
    engine.built.engine.stop()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["n"] for event in events] == list(range(len(events))) and events[-1]["event"] == "end"
    widths, in_flight, depths = [], [], []
    for event in events:
        if event["event"] == "step":
            widths.append([n_tokens for _, n_tokens, *_ in event["rows"]])
            in_flight.append(event["step"])
            depths.append(len(in_flight))
        elif event["event"] == "verdict":
            assert event["step"] == in_flight.pop(0), "steps end in the order in which they began"
    decodes = [step for step in widths if set(step) == {1}]
    assert len(decodes) >= 30
    assert [len(step) for step in decodes].count(4) >= 0.9 * len(decodes)
    assert max(depths) == 2
    assert depths.count(2) >= 0.8 * len(decodes)
    assert engine.built.engine.loop.max_depth_seen == 2
    [log] = open_logs([path])
    assert replay(log).equal


@pytest.mark.slow
@pytest.mark.parametrize("parallel, overlap", [
    pytest.param([{"use": "tensor", "size": 2}], True, id="tensor2, copied beside the steps"),
    pytest.param([{"use": "pipeline", "size": 2}], False, id="pipeline2, copied in the steps")])
def test_each_rank_moves_its_own_part_of_the_pages_to_host_memory_and_back(run, book, tiny, parallel, overlap):
    """A transfer has ended when it has on every rank: those that give no verdict say so, too."""
    engine = run(tiny.config(
        CHUNKED, "prefix", NGRAM, 2, num_blocks=38, parallel=parallel,
        kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": 30, "overlap": overlap}))
    for seed in (1, 2, 1):
        prompts = tiny.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, 20), strict=True):
            book.compare(tiny.reference, prompt, output)
    loop, end = engine.built.engine.loop, time.monotonic() + 20
    while engine.built.engine.call(lambda: bool(loop.transfers.pending or loop.in_flight)):
        assert time.monotonic() < end, "a transfer does not end"
        time.sleep(0.01)
    engine.assert_clean()
    moved = dict(loop.transfers.counters())
    assert moved["hits"] and moved["loaded_bytes"] and moved["swaps_out"] and moved["swaps_in"] and not moved["failed"]


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("parallel, bytes_a_page", [
    pytest.param([{"use": "tensor", "size": 3}], [30, 30, 30], id="tensor3"),
    pytest.param([{"use": "pipeline", "size": 2}], [19 * 3, 11 * 3], id="pipeline2", marks=pytest.mark.whole)])
def test_a_real_model_over_ranks_gives_the_tokens_of_transformers(run, book, smollm2, parallel, bytes_a_page):
    """SmolLM2-135M: 9 query and 3 key-value heads; 30 layers and a head that weighs as eight of them."""
    rng = random.Random(4)
    shared = [rng.randrange(17, 49152) for _ in range(24)]
    prompts = [shared + [rng.randrange(17, 49152) for _ in range(n)] for n in (3, 9)] + [[5, 8, 13, 21] * 4]
    engine = run({
        "model": "smollm2-135m-instruct", "dtype": "float32", "device": "cpu", "max_model_len": 64, "observers": [],
        "scheduler": {"use": "chunked", "max_chunk": 16, "max_batch_tokens": 32, "max_running": 4},
        "kvcache": {"block_size": 4, "num_blocks": 40}, "speculator": NGRAM, "parallel": parallel,
        "execution": {"depth": 2, "num_threads": 1}})
    for prompt, output in zip(prompts, engine.generate(prompts, 12), strict=True):
        book.compare(smollm2, prompt, output)
    found = reports(engine)
    assert [report.kv_bytes for report in found] == [40 * 4 * 2 * 64 * 4 * layers for layers in bytes_a_page]
    assert engine.seen["cut prompts"] and engine.built.engine.loop.max_depth_seen == 2
    engine.assert_clean()


@pytest.mark.whole
def test_replicas_of_two_ranks_answer_alike_and_outlive_the_loss_of_one(run, book, tiny, child_processes):
    """data(2) > tensor(2): four processes in two engines. A killed rank takes its own engine with it, and no other."""
    engine = run(tiny.config("chunked", "prefix", "none", 1, parallel=[
        {"use": "data", "replicas": 2, "router": "round_robin"}, {"use": "tensor", "size": 2}]))
    fleet, prompts = engine.built.engine, tiny.prompts()

    def answers(prefix):
        ended = {}
        for index, prompt in enumerate(prompts):
            outputs = ended[index] = queue.SimpleQueue()
            sampling = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
            fleet.add(Request(f"{prefix}{index}", prompt, sampling), outputs.put)
        found = []
        for outputs in ended.values():
            tokens, last = [], None
            while last is None:
                output = outputs.get(timeout=60)
                tokens += output.token_ids
                last = output.finish_reason
            found.append((tokens, last, output.error))
        return found

    for prompt, (tokens, _, error) in zip(prompts, answers("a"), strict=True):
        assert error is None
        book.compare(tiny.reference, prompt, tokens)
    steps = [built.engine.loop.steps for built in engine.built.engines]
    assert min(steps) > 0, "both replicas worked"
    assert [(entry["replica"], entry["rank"]) for entry in engine.built.ranks()] == [
        (name, rank) for name in ("0", "1") for rank in (0, 1)]
    os.kill(child_processes()[0], signal.SIGKILL)
    end = time.monotonic() + 5
    while sum(built.engine.failure is not None for built in engine.built.engines) != 1:
        assert time.monotonic() < end
        time.sleep(0.02)
    assert fleet.health() is None
    for prompt, (tokens, reason, error) in zip(prompts, answers("b"), strict=True):
        assert error is None and reason == "length"
        book.compare(tiny.reference, prompt, tokens)


@pytest.fixture
def child_processes():
    """A function that gives the ids of this process's children that run a rank."""
    def find():
        found = []
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                command = (file.parent / "cmdline").read_bytes()
                if int(file.read_text().rpartition(")")[2].split()[1]) == os.getpid() and b"execution.child" in command:
                    found.append(int(file.parent.name))
        return found

    return find


def test_what_an_executor_is_told_of_its_ranks_is_a_plain_value(run, tiny, monkeypatch):
    """It can be copied, compared and sent to another process; what executors share lies beside it."""
    told, real = [], InlineExecutor.launch

    def launch(self, factory, plan, meeting):
        told.append((plan, meeting))
        return real(self, factory, plan, meeting)

    monkeypatch.setattr(InlineExecutor, "launch", launch)
    run(tiny.config("chunked", "prefix", "none", 1, parallel=[{"use": "data", "replicas": 2}]))
    assert sorted(plan.replica.name for plan, _ in told) == ["0", "1"]
    assert all(copy.deepcopy(plan) == decode(RankPlan, encode(plan)) == plan for plan, _ in told)
    assert told[0][1] is told[1][1] is not None


def test_experts_over_some_of_the_engines_are_refused_before_anything_starts(run, experts):
    parallel = [{"use": "disaggregated", "decode": 2, "decode_parallel": ["expert"]}]
    with pytest.raises(ConfigError, match=r"'decode0' over all engines, but 'prefill0' does without"):
        run(experts.config(CHUNKED, "prefix", {"use": "none"}, 1, parallel=parallel, kv_transfer="shm"))


def test_experts_over_engines_of_several_ranks_are_refused_before_anything_starts(run, experts):
    parallel = [{"use": "data", "replicas": 2}, {"use": "pipeline", "size": 2}, "expert"]
    with pytest.raises(ConfigError, match="over engines of one rank each, but other strategies give engine '0' 2"):
        run(experts.config(CHUNKED, "prefix", {"use": "none"}, 1, parallel=parallel))


@pytest.mark.slow
def test_experts_over_two_engines_serve_whoever_has_work_for_fifty_rounds(run, book, experts, child_processes):
    """Each engine has its own requests, cache and attention, and half of the experts. Requests go to engine 0 only, to
    engine 1 only, then to both; a rank without rows joins the steps of the other, so that none waits for ever."""
    engine = run(experts.config(CHUNKED, "prefix", NGRAM, 2, parallel=[{"use": "data", "replicas": 2}, "expert"]))
    prompts, rounds = experts.prompts(), []
    for number in range(50):
        for replica in [(0,), (1,), (0, 1)][number % 3]:
            outputs, prompt = queue.SimpleQueue(), prompts[number % len(prompts)]
            sampling = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            begin = time.monotonic()
            engine.built.engines[replica].engine.add(Request(f"{number}-{replica}", prompt, sampling), outputs.put)
            rounds.append((begin, prompt, outputs))
        while rounds:
            begin, prompt, outputs = rounds.pop()
            tokens, last = [], None
            while last is None:
                output = outputs.get(timeout=20)
                tokens += output.token_ids
                last = output.finish_reason
            assert output.error is None
            book.compare(experts.reference, prompt, tokens)
    end = time.monotonic() + 10
    while True:  # until the steps that drop the last requests are done: a step of one is a step of all
        steps, ranks = sum(built.engine.loop.steps for built in engine.built.engines), engine.built.ranks()
        calls = [
            [rank["collectives"][f"{way} expert"]["calls"] for way in ("dispatch", "combine")] for rank in ranks]
        if calls == [[3 * steps, steps]] * 2:  # x, experts and weights go out for each layer of experts, one comes back
            break
        assert time.monotonic() < end, (steps, calls)
        time.sleep(0.1)
    assert [rank["replica"] for rank in ranks] == ["0", "1"]
    assert [len(rank["statistics"]["expert_load.1"]) for rank in ranks] == [3, 3]
    assert all(min(rank["statistics"]["expert_load.1"]) > 0 for rank in ranks)
    weights = [rank["weight_bytes"] for rank in ranks]
    assert weights[0] == weights[1] < sum(p.numel() for p in experts.reference.model.parameters()) * 4
    os.kill(child_processes()[0], signal.SIGKILL)
    end = time.monotonic() + 5
    while any(built.engine.failure is None for built in engine.built.engines):
        assert time.monotonic() < end, "an engine goes on without experts"
        time.sleep(0.02)
    assert any("another engine" in built.engine.failure for built in engine.built.engines)
