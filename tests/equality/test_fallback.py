"""Decoders that have no component here: transformers' own code over our scheduler, pages and attention, with the greedy
tokens of transformers alone."""

from typing import Any

import pytest

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
