"""The same greedy tokens whatever the parts: schedulers x KV managers x speculators x depths, and n > 1, on a tiny
model."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.errors import ConfigError

SCHEDULERS = ["static", "continuous", "chunked", "prefill_first"]
KV_MANAGERS = ["contiguous", "paged", "prefix", "radix"]
SPECULATORS: list[dict[str, Any]] = [{"use": "none"}, {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}]
DEPTHS = [1, 2]
ATTENTION = ["torch", "cpu"]

MAX_TOKENS = 24


PRODUCT = list(itertools.product(range(4), range(4), range(2), range(2)))
COVERING = [(s, k, d, v) for s, k, d, v in PRODUCT if (d, v) == ((s + k) % 2, (s // 2 + k // 2) % 2)]


def attention_of(s: int, k: int) -> str:
    """Of a scheduler and a manager: not a factor of its own, which would double the list."""
    return ATTENTION[(k + s // 2) % 2]


def test_the_list_covers_every_pair() -> None:
    for a, b in itertools.combinations(range(4), 2):
        assert {(run[a], run[b]) for run in COVERING} == {(run[a], run[b]) for run in PRODUCT}
    for a in range(4):
        assert {(run[a], attention_of(*run[:2])) for run in COVERING} == {
            (run[a], attention) for run in PRODUCT for attention in ATTENTION}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A list in which every two parts meet; with --whole every combination."""
    if "combination" in metafunc.fixturenames:
        chosen = PRODUCT if metafunc.config.getoption("--whole") else COVERING
        metafunc.parametrize("combination", [
            pytest.param((SCHEDULERS[s], KV_MANAGERS[k], SPECULATORS[d], DEPTHS[v], attention_of(s, k)),
                         id=f"{SCHEDULERS[s]}-{KV_MANAGERS[k]}-{SPECULATORS[d]['use']}-{DEPTHS[v]}")
            for s, k, d, v in chosen])


def test_every_combination_gives_the_tokens_of_transformers(
    run: Any, thrice: Any, book: Any, tiny: Any, combination: tuple[str, str, dict[str, Any], int, str],
) -> None:
    scheduler, kv, speculator, depth, attention = combination
    engine = run(tiny.config(scheduler, kv, speculator, depth, attention=attention))
    seen = thrice(engine, tiny, MAX_TOKENS, depth)
    if scheduler in ("static", "chunked"):
        assert seen["cut prompts"], "the prompts should be more than a step holds"
    assert bool(seen["cached tokens"]) is (kv in ("prefix", "radix"))
    assert bool(seen["accepted"] and seen["rejected"]) is (speculator["use"] == "ngram")
    if kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"
    prompt = tiny.prompts()[3]
    for answer in engine.answer(*(
        {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "fork_of": engine.name(0) if i else None}
        for i in range(3)
    )):
        book.compare(tiny.reference, prompt, answer.token_ids)
    assert bool(seen["copied pages"]) is (scheduler != "static" and kv != "contiguous"), "n > 1 copies a partial page"
    engine.assert_clean()


@pytest.mark.parametrize("kv", ["paged", "prefix"])
@pytest.mark.parametrize("chunk", [1, 2, 7, 16, None])
def test_chunk_sizes_change_nothing(run: Any, book: Any, tiny: Any, chunk: int | None, kv: str) -> None:
    engine = run(tiny.config({"use": "chunked", "max_chunk": chunk}, kv, "none", 1))
    for prompt, output in zip(tiny.prompts(), engine.generate(tiny.prompts(), MAX_TOKENS), strict=True):
        book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    assert engine.seen["widest row"] == chunk or chunk is None


@pytest.mark.parametrize(("scheduler", "policy", "kv", "eviction"), [
    ("chunked", "fcfs", "radix", "lru"), ("continuous", "priority", "prefix", "fifo"),
    ("prefill_first", "shortest_first", "radix", "fifo"), ("static", "longest_prefix_first", "prefix", "lru"),
    ("continuous", "fair_share", "radix", "lfu"), ("prefill_first", "priority", "prefix", "lfu"),
    ("chunked", "longest_prefix_first", "radix", "slru"), ("static", "fcfs", "prefix", "slru"),
])
def test_orders_and_evictions_change_nothing(
    run: Any, book: Any, tiny: Any, scheduler: str, policy: str, kv: str, eviction: str,
) -> None:
    settings = tiny.config({"use": scheduler, "policy": policy}, kv, {"use": "ngram", "min_n": 1}, 2)
    settings["kvcache"]["eviction"] = eviction
    engine = run(settings)
    for seed in range(4):  # new prompts each round, so that pages must be evicted
        prompts = tiny.prompts(seed)
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS), strict=True):
            book.compare(tiny.reference, prompt, output)
    engine.assert_clean()
    evicted = sum(pool.removals for pool in engine.built.engine.loop.parts.kv._indexes)
    assert engine.seen["cached tokens"] and engine.seen["preempted"] and engine.seen["accepted"] and evicted


def test_an_observer_that_was_asked_for_and_cannot_start_ends_the_start(run: Any, tiny: Any, tmp_path: Path) -> None:
    nowhere = tmp_path / "a file"
    nowhere.write_text("not a directory")
    settings = tiny.config("chunked", "prefix", {"use": "none"}, 1)
    settings["observers"] = [{"use": "decision_log", "path": str(nowhere / "log.jsonl")}]
    with pytest.raises(ConfigError, match="observers: observer:decision_log failed at the start"):
        run(settings)
