"""Whole engines with other elementwise operators: the tokens of transformers."""

from typing import Any

import pytest

NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}


@pytest.mark.parametrize("operators", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])  # the latter norms its heads, too
def test_operators_give_the_tokens_of_transformers(
    run: Any, book: Any, tiny_of: Any, family: str, operators: str,
) -> None:
    tiny = tiny_of(family)
    settings = tiny.config({"use": "chunked", "max_chunk": 16}, "prefix", NGRAM, 2)
    settings["model"]["operators"] = operators
    engine = run(settings)
    for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), 16), strict=True):
        book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    for happened in ("cut prompts", "mixed steps", "preempted", "accepted", "rejected"):
        assert engine.seen[happened], happened
