"""Sampled outputs are a function of the seed: the same tokens whatever runs beside them, and on whatever parts."""

import itertools
from typing import Any

import pytest

MAX_TOKENS = 24
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}
KINDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8, "presence_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 0.9, "typical_p": 0.7, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {5: 4.0, 6: -4.0}},
    {"temperature": 0.5, "min_tokens": 9, "stop_token_ids": list(range(2, 60))},
    {"temperature": 1.0, "logit_bias": {5: 12.0, 6: 12.0}},  # of which n-grams repeat
]


def requests(tiny: Any, **changes: Any) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "max_tokens": MAX_TOKENS, "seed": 100 + index, **kind, **changes}
        for index, (prompt, kind) in enumerate(zip(tiny.prompts(), KINDS, strict=True))
    ]


@pytest.fixture
def solo(run: Any, tiny: Any) -> list[list[int]]:
    """Each request alone, on the plainest parts."""
    engine = run(tiny.config("static", "contiguous", "none", 1))
    return [engine.answer(request)[0].token_ids for request in requests(tiny)]


@pytest.mark.parametrize(
    ("scheduler", "kv", "speculator", "depth"),
    [*itertools.product(["static", "chunked"], ["prefix"], ["none", "ngram"], [1, 2]),
     ("continuous", "paged", "ngram", 2)])
def test_seeded_requests_get_the_tokens_that_they_get_alone(
    run: Any, tiny: Any, solo: list[list[int]], scheduler: str, kv: str, speculator: str, depth: int,
) -> None:
    engine = run(tiny.config(scheduler, kv, NGRAM if speculator == "ngram" else speculator, depth))
    for _ in ("cold", "warm"):
        assert [answer.token_ids for answer in engine.answer(*requests(tiny))] == solo
    engine.assert_clean()
    assert engine.built.engine.loop.max_depth_seen == depth
    assert engine.seen["preempted"]
    assert bool(engine.seen["accepted"] and engine.seen["rejected"]) is (speculator == "ngram")


def test_another_seed_gives_other_tokens(run: Any, tiny: Any, solo: list[list[int]]) -> None:
    engine = run(tiny.config("static", "contiguous", "none", 1))
    others = [answer.token_ids for answer in engine.answer(*requests(tiny, seed=7))]
    assert sum(other != token_ids for other, token_ids in zip(others, solo, strict=True)) >= len(KINDS) - 1


def test_one_prompt_with_many_seeds_has_many_outputs_and_each_repeats(run: Any, tiny: Any) -> None:
    engine = run(tiny.config("chunked", "prefix", "none", 2))
    batch = [{"prompt": tiny.prompts()[3], "max_tokens": 8, "temperature": 1.0, "seed": seed} for seed in range(12)]
    first, second = ([answer.token_ids for answer in engine.answer(*batch)] for _ in range(2))
    assert first == second
    assert len(set(map(tuple, first))) == 12
