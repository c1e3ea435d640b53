"""A tier of host memory behind the cache: the tokens of transformers, with hits, swaps and recomputations."""

import random
import time
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.modeling.checkpoint import open_checkpoint

MAX_TOKENS = 24
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}


def counters(engine: Any) -> dict[str, int]:
    """The tier's, once nothing is under way any more and nothing is held."""
    loop, end = engine.built.engine.loop, time.monotonic() + 20
    while engine.built.engine.call(lambda: bool(loop.transfers.pending or loop.in_flight)):
        assert time.monotonic() < end, "a transfer does not end"
        time.sleep(0.005)
    engine.assert_clean()
    engine.built.engine.call(loop.transfers.component.check)
    assert not loop.transfers.component.leaks()
    return dict(loop.transfers.counters())


@pytest.mark.parametrize(("scheduler", "kv", "speculator", "depth", "overlap"), [
    ("chunked", "prefix", "none", 1, False),
    ("chunked", "prefix", NGRAM, 2, True),
    ("chunked", "paged", NGRAM, 2, False),
    ("continuous", "paged", "none", 1, True),
    ("static", "prefix", "none", 2, False),
])
def test_a_host_tier_changes_no_token(
    run: Any, book: Any, tiny: Any, scheduler: str, kv: str, speculator: Any, depth: int, overlap: bool,
) -> None:
    chunk: dict[str, Any] = {"max_chunk": 7} if scheduler == "chunked" else {}
    overhead = 36 if scheduler == "static" else 30  # between the lengths of those that are suspended
    engine = run(tiny.config(
        {"use": scheduler, **chunk}, kv, speculator, depth, num_blocks=38,
        kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": overhead, "overlap": overlap}))
    for seed, abort in ((1, {}), (2, {}), (1, {}), (2, {1: 3, 4: 3})):  # what one round leaves, the next one drives out
        prompts = tiny.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS, abort), strict=True):
            book.compare(tiny.reference, prompt, output)
    moved, seen = counters(engine), engine.seen
    assert moved["hits"] and moved["hit_tokens"] and moved["loaded_bytes"]
    assert not moved["failed"]
    assert seen["abort"] == 2
    assert engine.built.engine.loop.max_depth_seen == depth
    assert seen["suspended by swap"] == moved["swaps_out"] > 0 and moved["swaps_in"] > 0, moved
    assert seen["suspended by recompute"] > 0
    assert bool(seen["accepted"] and seen["rejected"]) is (speculator != "none")


@pytest.mark.parametrize("overlap", [False, True])
def test_pages_behind_a_window_are_neither_saved_nor_missed(
    run: Any, book: Any, windowed: Any, overlap: bool,
) -> None:
    engine = run(windowed.config(
        {"use": "chunked", "max_chunk": 7}, "prefix", NGRAM, 2, num_blocks=38,
        kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": 30, "overlap": overlap}))
    for seed in (1, 2, 1, 2):
        prompts = windowed.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
            book.compare(windowed.reference, prompt, output)
    moved = counters(engine)
    assert moved["hits"] and moved["swaps_in"], moved


def test_the_pages_of_a_draft_model_travel_with_those_of_its_target(run: Any, tiny: Any) -> None:
    """The target as its own draft is always right: unless its pages come back wrong."""
    engine = run(tiny.config(
        {"use": "chunked", "max_chunk": 7}, "paged", {"use": "draft", "model": str(tiny.path), "max_draft": 4}, 2,
        num_blocks=40, kv_transfer={"use": "host", "memory": "2MiB", "swap_overhead": 0}))
    for _ in range(3):
        engine.generate(tiny.prompts(), MAX_TOKENS)
    moved, seen = counters(engine), engine.seen
    assert moved["hits"] and moved["swaps_in"], moved
    assert seen["accepted"] > 300
    assert seen["rejected"] <= 0.01 * seen["accepted"], dict(seen)


@pytest.mark.slow
def test_each_rank_copies_its_own_part_of_a_page(run: Any, book: Any, tiny: Any) -> None:
    engine = run(tiny.config(
        "chunked", "prefix", "none", 2, num_blocks=38, parallel=[{"use": "tensor", "size": 2}],
        kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": 30, "overlap": True}))
    for seed in (1, 2, 1):
        prompts = tiny.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    moved = counters(engine)
    assert moved["hits"] and moved["swaps_in"], moved


def test_two_hundred_alternating_prompts_over_eight_pages(run: Any, book: Any, tiny: Any) -> None:
    """Each has its pages driven out by the next; copies run on a thread beside the steps."""
    engine = run(tiny.config(
        "chunked", "prefix", "none", 2, num_blocks=9, max_model_len=32,
        kv_transfer={"use": "host", "memory": "256KiB", "overlap": True}))
    rng = random.Random(3)
    prompts = [tiny.prompt(length, rng) for length in (17, 22, 20, 25, 13, 21)]
    for _ in range(25):
        some = rng.choices(prompts, k=8)
        for prompt, output in zip(some, engine.generate(some, 5), strict=True):
            book.compare(tiny.reference, prompt, output)
    moved = counters(engine)
    assert moved["hits"] > 100 and moved["hit_tokens"] > 1000, moved


@pytest.mark.real_model
@pytest.mark.slow
def test_alternating_prompts_over_a_small_cache_are_those_of_transformers(run: Any, book: Any, smollm2: Any) -> None:
    """Reads of pages whose copy is not done would show here as the other prompt's text."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    words = open_checkpoint("smollm2-135m-instruct", progress=False).tokenizer().encode(" ".join(text.split()))
    rng = random.Random(5)
    prompts = [words[begin : begin + length] for begin, length in ((0, 44), (300, 30), (700, 50), (1100, 9))]
    engine = run({
        "model": "smollm2-135m-instruct", "dtype": "float32", "device": "cpu", "max_model_len": 96,
        "scheduler": {"max_batch_tokens": 64, "max_running": 4},
        "kvcache": {"use": "prefix", "block_size": 4, "num_blocks": 28}, "speculator": "ngram",
        "execution": {"depth": 2, "num_threads": 1}, "observers": [],
        "kv_transfer": {"use": "host", "memory": "32MiB", "swap_overhead": 40, "overlap": True},
    })
    for _ in range(3):
        order = rng.sample(prompts, len(prompts))
        for prompt, output in zip(order, engine.generate(order, 20), strict=True):
            book.compare(smollm2, prompt, output)
    moved = counters(engine)
    assert moved["hits"] > 0 and moved["swaps_out"] > 0 and moved["swaps_in"] > 0, moved
    assert engine.seen["suspended by recompute"] > 0, dict(engine.seen)
