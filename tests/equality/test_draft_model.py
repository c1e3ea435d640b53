"""Speculation with a draft model: the tokens of transformers, with everything else switched on at once."""

from pathlib import Path
from typing import Any

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.modeling.checkpoint import open_checkpoint

MODEL = "smollm2-135m-instruct"
MAX_TOKENS = 24
NOISE = 0.03
"""Of the standard deviation of each weight: so much that 20 to 80 % of the drafts are accepted."""


@pytest.fixture(scope="session")
def noisy(tiny: Any, noisy_of: Any) -> Path:
    path: Path = noisy_of(tiny, NOISE)
    return path


def acceptance(seen: Any) -> float:
    return float(seen["accepted"] / (seen["accepted"] + seen["rejected"]))


@pytest.mark.parametrize(("scheduler", "kv", "depth"), [
    ("continuous", "contiguous", 1), ("continuous", "paged", 2), ("chunked", "paged", 1), ("chunked", "prefix", 1),
    ("chunked", "prefix", 2),
])
def test_a_draft_model_changes_no_token(
    run: Any, thrice: Any, tiny: Any, noisy: Path, scheduler: str, kv: str, depth: int,
) -> None:
    chunks: dict[str, Any] = {"max_chunk": 7} if scheduler == "chunked" else {}
    speculator = {"use": "draft", "model": str(noisy), "max_draft": 3}
    engine = run(tiny.config({"use": scheduler, **chunks}, kv, speculator, depth))
    seen = thrice(engine, tiny, MAX_TOKENS, depth)
    assert 0.2 < acceptance(seen) < 0.8, dict(seen)
    assert bool(seen["cached tokens"]) is (kv == "prefix")
    report = engine.built.engine.loads().extra["speculation"]
    assert (report["accepted"], report["drafted"] - report["accepted"]) == (seen["accepted"], seen["rejected"])
    assert sorted(report["acceptance_rate_by_position"], reverse=True) == report["acceptance_rate_by_position"]
    assert report["draft_seconds"] > 0
    assert report["verify_seconds"] > 0
    print(report)
    if scheduler != "continuous":
        assert seen["cut prompts"]
    if kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"


@pytest.mark.parametrize("depth", [1, 2])
def test_the_target_as_its_own_draft_is_always_right(run: Any, tiny: Any, depth: int) -> None:
    """Also behind cached prefixes, preemptions and chunks: its cache never lacks anything and is never stale."""
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 4}
    engine = run(tiny.config({"use": "chunked", "max_chunk": 7}, "prefix", speculator, depth))
    for _ in range(3):
        engine.generate(tiny.prompts(), MAX_TOKENS)
    engine.assert_clean()
    seen = engine.seen
    assert seen["cached tokens"]
    assert seen["preempted"]
    assert seen["accepted"] > 300
    assert seen["rejected"] <= 0.01 * seen["accepted"], "beside near ties, every draft should be right"


@pytest.mark.parametrize("kv", ["paged", "radix"])
def test_a_draft_model_with_a_sliding_window_gives_its_pages_back(
    run: Any, book: Any, tiny: Any, tmp_path: Path, kv: str,
) -> None:
    """The target's weights behind a window of 12 tokens: a cache group of another kind than any of the target's."""
    from transformers import MistralConfig, MistralForCausalLM

    theirs = tiny.reference.model
    sizes = {key: getattr(theirs.config, key) for key in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "num_key_value_heads", "max_position_embeddings", "rms_norm_eps")}
    draft = MistralForCausalLM(MistralConfig(**sizes, sliding_window=12, tie_word_embeddings=False))
    draft.load_state_dict(theirs.state_dict())
    draft.save_pretrained(tmp_path)
    engine = run(tiny.config(
        {"use": "chunked", "max_chunk": 7}, kv, {"use": "draft", "model": str(tmp_path), "max_draft": 3}, 2))
    assert set(engine.built.cache_plan.groups) == {"full", "draft.window"}
    for _ in range(2):
        for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    assert engine.seen["preempted"]
    assert 0.05 < acceptance(engine.seen) < 0.95, dict(engine.seen)
    engine.assert_clean()


@pytest.mark.parametrize("kv", ["prefix", "radix"])
def test_a_host_tier_carries_the_draft_models_pages_too(run: Any, book: Any, tiny: Any, kv: str) -> None:
    """Hits and swaps through host memory: the target as its own draft stays right behind them."""
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 3}
    engine = run(tiny.config(
        {"use": "chunked", "max_chunk": 7}, kv, speculator, 2, num_blocks=38,
        kv_transfer={"use": "host", "memory": "2MiB", "swap_overhead": 30}))
    for seed in (1, 2, 1, 2):  # what one round leaves, the next one drives out
        prompts = tiny.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    moved, seen = dict(engine.built.engine.call(engine.built.engine.loop.transfers.counters)), engine.seen
    assert moved["hits"] and moved["swaps_in"], moved
    assert seen["accepted"] > 300
    assert seen["rejected"] <= 0.01 * seen["accepted"], dict(seen)


def test_choices_share_the_draft_models_pages(run: Any, book: Any, tiny: Any) -> None:
    """Greedy and sampled children of one parent, which are forked with their pages; a seed gives the same each time."""
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 3}
    engine = run(tiny.config("chunked", "prefix", speculator, 2, num_blocks=200))
    prompt, rounds = tiny.prompts()[3], []
    for _ in range(2):
        greedy = {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        child = {**greedy, "fork_of": engine.name(0)}
        rounds.append(engine.answer(
            greedy, child, *({**child, "temperature": 0.8, "seed": seed} for seed in (1, 2))))
    for answers in rounds:
        assert [answer.cached_tokens for answer in answers[1:]] == [len(prompt) - 1] * 3, "forked, not matched"
        for answer in answers[:2]:
            book.compare(tiny.reference, prompt, answer.token_ids)
    assert [answer.token_ids for answer in rounds[0]] == [answer.token_ids for answer in rounds[1]]
    assert engine.seen["rejected"] <= 0.02 * engine.seen["accepted"], dict(engine.seen)
    engine.assert_clean()


def test_pages_of_a_draft_model_travel_to_the_engine_that_decodes(deploy: Any, book: Any, tiny: Any) -> None:
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 3}
    running = deploy(tiny.config(
        "chunked", "prefix", speculator, 2, kv_transfer="shm",
        parallel=[{"use": "disaggregated", "prefill": 1, "decode": 1}]))
    prompts = tiny.prompts()
    for _ in range(2):
        for prompt, output in zip(prompts, running.generate(prompts, MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    running.assert_clean()
    decode = running.seen[1]
    assert sum(built.engine.loop.transfers.counters()["fetched"] for built in running.built.engines) > 0
    assert decode["accepted"] > 100
    assert decode["rejected"] <= 0.02 * decode["accepted"], dict(decode)


def test_a_draft_model_that_does_not_fit_ends_the_start(run: Any, tiny: Any, noisy: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    other = LlamaConfig(
        vocab_size=161, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=512)
    LlamaForCausalLM(other).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="speculator.model: .* vocabulary of 161 tokens and the target one of 160"):
        run(tiny.config("chunked", "prefix", {"use": "draft", "model": str(tmp_path)}, 1))
    parallel = [{"use": "pipeline", "size": 2}]
    with pytest.raises(ConfigError, match="requires 'stages' of the speculator"):
        run(tiny.config("chunked", "prefix", {"use": "draft", "model": str(noisy)}, 1, parallel=parallel))


@pytest.mark.slow
def test_each_rank_of_tensor_parallelism_has_a_draft_model_and_all_take_the_same_drafts(
    run: Any, book: Any, tiny: Any, noisy: Path,
) -> None:
    """Greedy rows and sampled ones, so that drafts are drawn, too."""
    speculator = {"use": "draft", "model": str(noisy), "max_draft": 3}
    engine = run(tiny.config("chunked", "prefix", speculator, 2, parallel=[{"use": "tensor", "size": 2}]))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert 0.2 < acceptance(engine.seen) < 0.8, dict(engine.seen)
    before = engine.seen["accepted"]
    engine.generate(prompts, MAX_TOKENS, temperature=1.0, seed=3)
    assert engine.seen["accepted"] > before
    engine.assert_clean()


@pytest.mark.real_model
@pytest.mark.slow
def test_smollm2_drafts_for_itself(run: Any, book: Any, smollm2: Any) -> None:
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    words = open_checkpoint(MODEL, progress=False).tokenizer().encode(" ".join(text.split()))
    prompts = [words[begin : begin + length] for begin, length in ((0, 40), (0, 33), (400, 7))]
    engine = run({
        "model": MODEL, "dtype": "float32", "device": "cpu", "max_model_len": 64, "observers": [],
        "scheduler": {"use": "chunked", "max_batch_tokens": 64, "max_running": 2, "max_chunk": 16},
        "kvcache": {"use": "prefix", "block_size": 4, "num_blocks": 40},
        "speculator": {"use": "draft", "model": MODEL, "max_draft": 3},
        "execution": {"depth": 2, "num_threads": 1},
    })
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, 9), strict=True):
            book.compare(smollm2, prompt, output)
    seen = engine.seen
    print(dict(seen), engine.built.engine.loads().extra["speculation"])
    assert seen["cached tokens"] and seen["cut prompts"]
    assert acceptance(seen) > 0.97
    engine.assert_clean()
