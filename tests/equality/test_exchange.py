"""Parts are exchanged while requests run, and the outputs are those of an engine that was let be."""

import random
import threading
from collections import Counter
from typing import Any

import pytest

SCHEDULERS = ("static", "continuous", "chunked", "prefill_first")
POLICIES = ("fcfs", "priority", "fair_share", "shortest_first", "longest_prefix_first")
MANAGERS = ("paged", "prefix", "radix", "contiguous")
EVICTIONS = ("lru", "fifo", "lfu", "slru")
ATTENTION = (["attention=torch"], ["attention={use: composite, prefill: torch, decode: torch}"])
STREAMS = 16


def change(rng: random.Random, now: dict[str, Any], drafts: list[str]) -> list[str]:
    """One to three parts, at random, in one exchange. ``now``: the effective config."""
    choices = [
        [f"scheduler={rng.choice(SCHEDULERS)}"], [f"scheduler.policy={rng.choice(POLICIES)}"],
        [f"kvcache={rng.choice(MANAGERS)}"], [f"speculator={rng.choice(drafts)}"], rng.choice(ATTENTION),
    ]
    if now["kvcache"]["use"] in ("prefix", "radix"):
        choices.append([f"kvcache.eviction={rng.choice(EVICTIONS)}"])
    parts = {sets[0].partition("=")[0]: sets for sets in rng.sample(choices, rng.choice([1, 1, 1, 2, 3]))}
    if "kvcache" in parts:
        parts.pop("kvcache.eviction", None)
    return [text for sets in parts.values() for text in sets]


def exchange_at_random(engine: Any, count: int, seed: int, drafts: list[str]) -> Counter[str]:
    """Of ``count`` exchanges: how many changed a part at each config path, and what they came to."""
    rng, seen = random.Random(seed), Counter[str]()
    while seen["exchanges"] < count:
        [report] = engine.built.exchange(change(rng, engine.built.effective(), drafts))
        if not report.parts:
            continue
        seen["exchanges"] += 1
        seen.update(part.path for part in report.parts)
        seen["handed over"] += report.effect.handed_over
        seen["recomputed"] += report.effect.recomputed
        seen["proven"] += report.proven
    return seen


def under_load(engine: Any, prompts: list[list[int]], expected: list[list[int]], work: Any) -> Any:
    """Runs ``work`` in a thread while each prompt is asked again and again; every answer must be as expected."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        assert engine.generate(prompts, len(expected[0])) == expected
    thread.join()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


@pytest.mark.parametrize("depth", [1, 2])
def test_sixty_exchanges_at_random_change_no_output(run, tiny, depth):
    rng = random.Random(depth)
    engine = run(tiny.config("chunked", "prefix", "none", depth, num_blocks=1 + 6 * 32))
    prompts = [tiny.prompt(rng.randrange(1, 60), rng) for _ in range(STREAMS)]
    expected = engine.generate(prompts, 40)
    seen = under_load(engine, prompts, expected, lambda: exchange_at_random(engine, 60, depth, ["none", "ngram"]))
    print(seen)
    assert all(seen[path] for path in (
        "scheduler", "scheduler.policy", "kvcache", "kvcache.eviction", "speculator", "attention"))
    assert seen["handed over"] and seen["recomputed"]
    assert seen["proven"] > 50
    engine.assert_clean()
