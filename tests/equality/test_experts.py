"""Mixture of experts in a whole engine: the same greedy tokens, whatever is chunked, shared, suspended or drafted."""

from typing import Any

import pytest

MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3Moe", {
        "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True, "head_dim": 16,
        "num_hidden_layers": 3, "mlp_only_layers": [1]}),
}


@pytest.mark.parametrize(("family", "config"), MODELS.values(), ids=MODELS.keys())
def test_experts_give_the_tokens_of_transformers(
    run: Any, book: Any, tiny_of: Any, family: str, config: dict[str, Any],
) -> None:
    tiny = tiny_of(family, **config)
    engine = run(tiny.config("chunked", "prefix", {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}, 2))
    prompts = tiny.prompts()
    for _ in range(2):
        for prompt, output in zip(prompts, engine.generate(prompts, 24), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    for happened in ("cut prompts", "mixed steps", "cached tokens", "preempted", "accepted", "rejected"):
        assert engine.seen[happened], happened
