"""Decoders that have no component here: transformers' own code over our scheduler, pages and attention, with the greedy
tokens of transformers alone."""

from typing import Any

import pytest

from hotswap.core.errors import ConfigError

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 12, "final_logit_softcapping": 9.0,
               "attn_logit_softcapping": 6.0},
    "Gemma3": {"head_dim": 16, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {"pad_token_id": 0},
    "GPTNeoX": {"use_parallel_residual": True, "rotary_pct": 0.5},
    "GPT2": {},
    "OPT": {"init_std": 0.3, "do_layer_norm_before": True},
    "StableLm": {"partial_rotary_factor": 0.5},
    "Cohere2": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 2.0},
    "Granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "Starcoder2": {},
    "Olmo3": {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    "GPTBigCode": {"multi_query": True},
    "Qwen2Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "shared_expert_intermediate_size": 32},
}
WINDOWED = {name for name, config in ARCHITECTURES.items() if "sliding_window" in config}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_an_architecture_without_component_gives_the_tokens_of_transformers(
    run: Any, book: Any, tiny_of: Any, family: str,
) -> None:
    tiny = tiny_of(family, **ARCHITECTURES[family])
    engine = run(tiny.config("chunked", "prefix", {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}, 2))
    assert len(engine.built.cache_plan.groups) == 1 + (family in WINDOWED)
    assert [note for note in engine.built.notes if "the fallback 'transformers' runs it" in note]
    prompts = tiny.prompts()
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, 24), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    for happened in ("cut prompts", "mixed steps", "cached tokens", "preempted", "accepted", "rejected"):
        assert engine.seen[happened], happened


def test_the_fallback_and_a_component_of_ours_give_the_same_tokens(run: Any, tiny_of: Any) -> None:
    tiny = tiny_of("Qwen2")
    config = tiny.config("chunked", "prefix", "none", 1)
    ours = run(config)
    fallback = run({**config, "model": {**config["model"], "use": "transformers"}})
    assert not fallback.built.warnings, "the fallback is made for any architecture"
    prompts = tiny.prompts()
    assert fallback.generate(prompts, 24) == ours.generate(prompts, 24)


def test_target_and_draft_may_both_be_run_by_it(run: Any, book: Any, tiny_of: Any) -> None:
    """The target as its own draft: its guesses are always right."""
    tiny = tiny_of("GPTNeoX", rotary_pct=0.5)
    engine = run(tiny.config("chunked", "prefix", {"use": "draft", "model": str(tiny.path), "max_draft": 3}, 2))
    for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), 24), strict=True):
        book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    assert engine.seen["accepted"] > 20 * engine.seen["rejected"], dict(engine.seen)


def test_replicas_in_one_process_have_a_model_each(deploy: Any, book: Any, tiny_of: Any) -> None:
    tiny = tiny_of("GPT2")
    running = deploy(tiny.config("chunked", "prefix", "none", 2, parallel=[{"use": "data", "replicas": 2}]))
    prompts = tiny.prompts()
    for prompt, output in zip(prompts, running.generate(prompts, 24), strict=True):
        book.compare(tiny.reference, prompt, output)
    assert all(seen["length"] for seen in running.seen)
    running.assert_clean()


def test_strategies_that_divide_a_model_are_refused_before_any_process_starts(run: Any, tiny_of: Any) -> None:
    tiny = tiny_of("GPT2")
    for strategy in ("tensor", "pipeline"):
        with pytest.raises(ConfigError, match=r"parallel\[0\]: GPT2LMHeadModel names no .* runs on one rank"):
            run(tiny.config("chunked", "prefix", "none", 1, parallel=[{"use": strategy, "size": 2}]))


@pytest.mark.real_model
@pytest.mark.slow
def test_a_real_model_gives_the_tokens_of_transformers(run: Any, book: Any, smollm2: Any) -> None:
    """From a .gguf file: transformers' classes take their tensors from any source of ours."""
    engine = run({
        "model": {"name": "smollm2-135m-instruct", "use": "transformers"}, "dtype": "float32", "device": "cpu",
        "max_model_len": 256, "observers": [], "scheduler": {"max_batch_tokens": 32, "max_running": 4},
        "kvcache": {"block_size": 4, "num_blocks": 80}, "execution": {"depth": 2, "num_threads": 1},
        "speculator": {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3},
    })
    shared = list(range(500, 600, 3))
    prompts = [shared + [7000, 8000], shared + [9000], [42], shared[:9] * 4, shared + [7000, 8000]]
    for prompt, output in zip(prompts, engine.generate(prompts, 8), strict=True):
        book.compare(smollm2, prompt, output)
    engine.assert_clean()
    for happened in ("cut prompts", "mixed steps", "cached tokens", "accepted", "rejected"):
        assert engine.seen[happened], happened
