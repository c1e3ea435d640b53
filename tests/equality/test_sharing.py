"""Requests that begin alike and arrive together, through whole engines: the same answers, computed once."""

from typing import Any

import pytest

MAX_TOKENS = 8
SHARED = [2 + (31 * i) % 157 for i in range(96)]
PROMPTS = [[*SHARED, 3 + i, 90 + i] for i in range(6)]


@pytest.mark.parametrize(("scheduler", "kv", "speculator", "depth"), [
    ("chunked", "prefix", "none", 2), ("continuous", "radix", "none", 1), ("static", "prefix", "none", 1),
    ("prefill_first", "radix", {"use": "ngram", "min_n": 1}, 2),
])
def test_all_get_the_tokens_of_transformers_and_the_beginning_is_computed_once(
    run: Any, book: Any, tiny: Any, scheduler: str, kv: str, speculator: Any, depth: int,
) -> None:
    engine = run(tiny.config(scheduler, kv, speculator, depth, num_blocks=1 + 100))
    for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, MAX_TOKENS), strict=True):
        book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    assert engine.seen["cached tokens"] == 5 * len(SHARED)
    if speculator == "none":
        assert engine.seen["computed"] == len(SHARED) + 6 * (2 + MAX_TOKENS - 1)
