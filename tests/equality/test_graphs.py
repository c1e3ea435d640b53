"""Whole engines with graphs, replayed by the stand-in for a device: the tokens are those without."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.execution import graphs
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.testing.graphs import RecordingGraphs

MAX_TOKENS = 24
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}


class Tally(Observer):
    """Adds up what workers count."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    @hookimpl
    def hotswap_step_finished(self, verdict: Any) -> None:
        for name, count in verdict.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch, torch_operators: None) -> list[RecordingGraphs]:
    """The CPU records; the list gets each device that an engine makes."""
    made: list[RecordingGraphs] = []

    def make(device: str) -> RecordingGraphs:
        made.append(RecordingGraphs(device))
        return made[-1]

    monkeypatch.setitem(graphs.DEVICES, "cpu", make)
    return made


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("speculator", ["none", NGRAM], ids=["none", "ngram"])
def test_replayed_steps_give_the_tokens_of_transformers(
    run: Any, book: Any, tiny: Any, speculator: Any, depth: int, devices: list[RecordingGraphs],
) -> None:
    settings = tiny.config({"use": "chunked", "max_chunk": 16}, "prefix", speculator, depth)
    settings["attention"] = {"use": "torch", "graphs": True}
    settings["execution"] |= {"graphs": "full"}
    engine = run(settings)
    tally = Tally()
    engine.built.components.add(tally)
    prompts = tiny.prompts()
    for abort in ({}, {}, {1: 3, 4: 3}):  # cold, warm, with requests that are given up
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    [device] = devices
    seen, drafts = engine.seen, speculator != "none"
    assert engine.built.engine.loop.max_depth_seen == depth
    assert tally.counts["graph_replays"] == device.replays > 40
    assert engine.built.engine.loads().extra["events"] == tally.counts
    assert tally.counts["graph_captures"] == len(device.graphs) == (8 if drafts else 4)  # 1, 2, 4, 6 rows
    assert tally.counts["eager_long_rows"], "prompts are computed eagerly"
    assert seen["preempted"]
    assert seen["cached tokens"]
    assert seen["cut prompts"]
    assert bool(seen["accepted"] and seen["rejected"]) is drafts


@pytest.mark.parametrize("depth", [1, 2])
def test_replayed_drafts_of_the_target_itself_are_always_right(
    run: Any, book: Any, tiny: Any, depth: int, devices: list[RecordingGraphs],
) -> None:
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 4}
    settings = tiny.config({"use": "chunked", "max_chunk": 7}, "prefix", speculator, depth)
    settings["attention"] = {"use": "torch", "graphs": True}
    settings["execution"] |= {"graphs": "full"}
    engine = run(settings)
    for _ in range(2):
        for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    [report] = engine.built.engine.loop.parts.executor.report()
    [device] = devices
    assert report.counts["graph_replays"] + report.counts["draft_graph_replays"] == device.replays
    assert report.counts["draft_graph_replays"] > 2 * report.counts["graph_replays"] > 20
    assert report.counts["draft_graph_captures"] == 4
    assert "draft_eager_long_rows" not in report.counts, "each step behind the first draft is of one token a row"
    assert engine.seen["preempted"]
    assert engine.seen["accepted"] > 200
    assert engine.seen["rejected"] <= 0.01 * engine.seen["accepted"]


@pytest.fixture(scope="module")
def windowed(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """As ``tiny``, with a second layer that sees the last eight tokens: two cache groups."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(7)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=160, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=1, use_sliding_window=True, sliding_window=8, max_window_layers=1)).eval()
    path = tmp_path_factory.mktemp("tiny-qwen2")
    model.save_pretrained(path)
    return replace(tiny, path=path, reference=replace(tiny.reference, model=model, _known={}))


@pytest.mark.parametrize("speculator", ["none", NGRAM], ids=["none", "ngram"])
def test_replays_over_pages_that_a_window_gives_back(
    run: Any, book: Any, windowed: Any, speculator: Any, devices: list[RecordingGraphs],
) -> None:
    """Rows with fewer drafts than their graph are filled up with tokens before them, as long as what those see is
    there."""
    settings = windowed.config("chunked", "prefix", speculator, 2, attention={"use": "torch", "graphs": True})
    settings["execution"] |= {"graphs": "full"}
    engine = run(settings)
    for _ in range(2):
        for prompt, output in zip(windowed.prompts(), engine.generate(windowed.prompts(), MAX_TOKENS), strict=True):
            book.compare(windowed.reference, prompt, output)
    engine.assert_clean()
    assert set(engine.built.cache_plan.groups) == {"full", "window"}
    events = engine.built.engine.loads().extra["events"]
    assert events["graph_replays"] == devices[0].replays > 30
    assert bool(events.get("eager_lost_pages")) is (speculator != "none")
    assert engine.seen["preempted"] and engine.seen["cached tokens"]


def test_replays_beside_swaps_forks_hits_chunks_and_drafts(
    run: Any, book: Any, tiny: Any, devices: list[RecordingGraphs],
) -> None:
    """All at once, on pages that come and go and are copied between the replays."""
    settings = tiny.config(
        {"use": "chunked", "max_chunk": 7}, "prefix", NGRAM, 2, num_blocks=38,
        attention={"use": "torch", "graphs": True},
        kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": 30, "overlap": False})
    settings["execution"] |= {"graphs": "full", "batch_sizes": [2, 3]}
    engine = run(settings)
    for seed, abort in ((1, {}), (2, {}), (1, {}), (2, {1: 3, 4: 3})):
        prompts = tiny.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    prompt = tiny.prompts()[2]  # of 17 tokens: its last page is shared in part
    parent = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
    answers = engine.answer(parent, *({**parent, "fork_of": engine.name(0)} for _ in range(3)))
    assert [answer.cached_tokens for answer in answers[1:]] == [len(prompt) - 1] * 3, "forked, not matched"
    for answer in answers:
        book.compare(tiny.reference, prompt, answer.token_ids)
    engine.assert_clean()
    events, seen = engine.built.engine.loads().extra["events"], engine.seen
    assert events["graph_captures"] == 4
    assert events["graph_replays"] == devices[0].replays > 40
    assert events["eager_many_rows"] and events["eager_long_rows"]
    assert seen["suspended by swap"] and seen["suspended by recompute"]
    assert seen["cached tokens"] and seen["accepted"] and seen["rejected"]


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_replayed_gives_the_tokens_of_transformers(
    run: Any, book: Any, smollm2: Any, devices: list[RecordingGraphs],
) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    ids = open_checkpoint("smollm2-135m-instruct", progress=False).tokenizer().encode(" ".join(text.split()))
    prompts = [ids[begin : begin + length] for begin, length in ((0, 40), (90, 17), (150, 5))]
    prompts.append(ids[40:48] * 4)  # whose drafts are right now and then
    engine = run({
        "model": "smollm2-135m-instruct", "dtype": "float32", "device": "cpu", "max_model_len": 96, "observers": [],
        "scheduler": {"max_batch_tokens": 64, "max_running": 4}, "attention": {"use": "torch", "graphs": True},
        "kvcache": {"use": "prefix", "block_size": 8, "num_blocks": 64}, "speculator": NGRAM,
        "execution": {"depth": 2, "num_threads": 1, "graphs": "full", "batch_sizes": [1, 2, 4]},
    })
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, 12), strict=True):
            book.compare(smollm2, prompt, output)
    engine.assert_clean()
    assert engine.built.engine.loads().extra["events"]["graph_replays"] == devices[0].replays > 8
    assert engine.seen["cached tokens"] and engine.seen["accepted"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("speculator", ["none", NGRAM], ids=["none", "ngram"])
@pytest.mark.parametrize("attention", [{"use": "torch", "graphs": True}, {"use": "triton"}], ids=["torch", "triton"])
def test_real_graphs_give_the_tokens_of_transformers(
    run: Any, book: Any, tiny: Any, attention: Any, speculator: Any, caplog: pytest.LogCaptureFixture,
) -> None:
    settings = tiny.config({"use": "chunked", "max_chunk": 16}, "prefix", speculator, 2, attention=attention)
    settings |= {"device": "cuda", "execution": {"depth": 2, "graphs": "full"}}
    engine = run(settings)
    for abort in ({}, {}, {1: 3, 4: 3}):
        for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), MAX_TOKENS, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    [report] = engine.built.engine.loop.parts.executor.report()
    assert report.counts["graph_replays"] > 40
    assert not [record for record in caplog.records if "set aside" in record.message and record.levelname == "WARNING"]
