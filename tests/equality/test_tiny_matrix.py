"""The same greedy tokens whatever the parts: every scheduler x KV manager x speculator x depth on a tiny model."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

SCHEDULERS = ["static", "continuous", "chunked"]
KV_MANAGERS = ["contiguous", "paged", "prefix"]
SPECULATORS: list[dict[str, Any]] = [{"use": "none"}, {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}]
DEPTHS = [1, 2]

MAX_TOKENS = 24


def prompts(seed: int = 1) -> list[list[int]]:
    """Random ones, one of a single token, and a family with a shared prefix, two of them the same."""
    rng = random.Random(seed)
    shared = [rng.randrange(2, 160) for _ in range(21)]
    own = [[rng.randrange(2, 160) for _ in range(length)] for length in (1, 3, 17, 40)]
    family = [shared + [rng.randrange(2, 160) for _ in range(length)] for length in (2, 5, 11)]
    return [*own, *family, family[0]]


def config(path: Path, scheduler: Any, kv: str, speculator: Any, depth: int, **changes: Any) -> dict[str, Any]:
    scheduler = {"use": scheduler} if isinstance(scheduler, str) else dict(scheduler)
    pages = 1 + (4 * 32 if kv == "contiguous" else 44)
    return {
        "model": {"path": str(path)}, "dtype": "float32", "device": "cpu", "max_model_len": 128,
        "scheduler": {"max_batch_tokens": 48, "max_running": 6, **scheduler},
        "kvcache": {"use": kv, "block_size": 4, "num_blocks": changes.pop("num_blocks", pages)},
        "speculator": speculator, "execution": {"depth": depth, "num_threads": 1}, "observers": [], **changes,
    }


@pytest.mark.parametrize(
    ("scheduler", "kv", "speculator", "depth"), list(itertools.product(SCHEDULERS, KV_MANAGERS, SPECULATORS, DEPTHS)),
    ids=lambda value: value["use"] if isinstance(value, dict) else str(value),
)
def test_every_combination_gives_the_tokens_of_transformers(
    run: Any, book: Any, tiny_llama: Any, scheduler: str, kv: str, speculator: dict[str, Any], depth: int,
) -> None:
    path, reference = tiny_llama
    engine = run(config(path, scheduler, kv, speculator, depth))
    for _ in ("cold", "warm"):
        outputs = engine.generate(prompts(), MAX_TOKENS)
        for prompt, output in zip(prompts(), outputs, strict=True):
            assert len(output) == MAX_TOKENS
            book.compare(reference, prompt, output)
    outputs = engine.generate(prompts(), MAX_TOKENS, abort=[1, 4])
    for index, (prompt, output) in enumerate(zip(prompts(), outputs, strict=True)):
        assert len(output) >= 3 if index in (1, 4) else len(output) == MAX_TOKENS
        book.compare(reference, prompt, output)
    engine.assert_clean()
    seen = engine.seen
    assert engine.built.engine.loop.max_depth_seen == depth
    assert seen["abort"] == 2
    assert seen["cut prompts"]
    assert bool(seen["cached tokens"]) is (kv == "prefix")
    assert bool(seen["accepted"] and seen["rejected"]) is (speculator["use"] == "ngram")
    if kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"


@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, None])
def test_chunk_sizes_change_nothing(run: Any, book: Any, tiny_llama: Any, chunk: int | None, kv: str) -> None:
    path, reference = tiny_llama
    engine = run(config(path, {"use": "chunked", "max_chunk": chunk}, kv, "none", 1))
    for prompt, output in zip(prompts(), engine.generate(prompts(), MAX_TOKENS), strict=True):
        book.compare(reference, prompt, output)
    engine.assert_clean()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("eviction", ["lru", "fifo"])
def test_policies_and_evictions_change_nothing(run: Any, book: Any, tiny_llama: Any, policy: str, eviction: str) -> None:
    path, reference = tiny_llama
    settings = config(path, {"use": "chunked", "policy": policy}, "prefix", "none", 2)
    settings["kvcache"]["eviction"] = eviction
    engine = run(settings)
    for seed in range(4):  # new prompts each round, so that pages must be evicted
        for prompt, output in zip(prompts(seed), engine.generate(prompts(seed), MAX_TOKENS), strict=True):
            book.compare(reference, prompt, output)
    engine.assert_clean()

