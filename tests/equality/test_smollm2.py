"""The real model through whole engines: the tokens of transformers, for prompts of any length and any parts."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.modeling.checkpoint import open_checkpoint

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
VOCAB_SIZE = 49152
CONTROL_TOKENS = 17

FACTORS: dict[str, list[Any]] = {
    "scheduler": ["static", "continuous", "chunked"],
    "kv": ["contiguous", "paged", "prefix"],
    "chunk": [None, 64, 7],
    "speculator": ["none", "ngram"],
    "depth": [1, 2],
    "policy": ["fcfs", "priority"],
}
COVERING = [
    ("static", "contiguous", None, "ngram", 1, "fcfs"),
    ("static", "paged", 64, "none", 2, "priority"),
    ("static", "prefix", 7, "none", 2, "priority"),
    ("continuous", "contiguous", 64, "none", 2, "fcfs"),
    ("continuous", "paged", 7, "ngram", 1, "fcfs"),
    ("continuous", "prefix", None, "none", 1, "priority"),
    ("chunked", "contiguous", 7, "none", 1, "priority"),
    ("chunked", "paged", None, "ngram", 2, "priority"),
    ("chunked", "prefix", 64, "ngram", 1, "fcfs"),
]
"""Each pair of values of two factors is in one of the runs at least: an orthogonal array of the first three, and the
others chosen by search."""

MAX_TOKENS = 12
PAGE_SIZE, MAX_MODEL_LEN = 4, 96
PAGES = {"contiguous": 6 * 32, "paged": 28, "prefix": 35}
"""Too few for all at once, but for the contiguous manager; with sharing, some must be left to keep what was cached."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "parts" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole", default=False)
        metafunc.parametrize("parts", list(itertools.product(*FACTORS.values())) if whole else COVERING,
                             ids=lambda parts: "-".join(str(value) for value in parts))


def test_the_runs_cover_every_pair() -> None:
    def pairs(runs: Any) -> set[Any]:
        places = range(len(FACTORS))
        return {(i, j, run[i], run[j]) for run in runs for i, j in itertools.combinations(places, 2)}

    assert pairs(COVERING) == pairs(itertools.product(*FACTORS.values()))


@pytest.fixture(scope="module")
def words() -> list[int]:
    """A text that is real and stays as it is: the licence."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    ids: list[int] = open_checkpoint(MODEL, progress=False).tokenizer().encode(" ".join(text.split()))
    return ids


def random_ids(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(CONTROL_TOKENS, VOCAB_SIZE) for _ in range(length)]


def test_prompts_of_any_length_are_continued_as_by_transformers(run: Any, book: Any, smollm2: Any, words: Any) -> None:
    engine = run({
        "model": MODEL, "dtype": "float32", "device": "cpu", "max_model_len": 1600, "observers": [],
        "scheduler": {"max_batch_tokens": 512, "max_running": 32}, "kvcache": {"memory": "1GiB"},
        "execution": {"depth": 2, "num_threads": 2},
    })
    prompts = [random_ids(length, length) for length in (1, 2, 3, 5, 15, 16, 17, 33, 64, 100, 250, 600)]
    places = {1: 300, 4: 40, 16: 0, 31: 700, 65: 10, 120: 1500, 240: 900, 480: 400, 900: 600, 1500: 100}
    prompts += [words[place : place + length] for length, place in places.items()]
    assert sorted(map(len, prompts))[::21] == [1, 1500]
    for prompt, output in zip(prompts, engine.generate(prompts, 24), strict=True):
        book.compare(smollm2, prompt, output)
    engine.assert_clean()
    assert book.compared == 22 * 24
    assert engine.seen["cut prompts"]


def test_any_parts_give_the_tokens_of_transformers(run: Any, book: Any, smollm2: Any, words: Any, parts: Any) -> None:
    """Cold, then warm with requests that are given up, in a pool that is too small for all."""
    engine = run(config(*parts))
    prompts, priorities = mixed_prompts(words), [3, 1, 2, 0, 2, 1, 3, 0]
    rng = random.Random(str(parts))
    early = range(1, MAX_TOKENS - 7)  # two steps of up to four tokens may still be on their way
    abort = {index: rng.choice(early) for index in rng.sample(range(len(prompts)), 2)}
    for given_up in ({}, abort):
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS, given_up, priorities), strict=True):
            book.compare(smollm2, prompt, output)
    engine.assert_clean()
    assert_exercised(engine, *parts)


def mixed_prompts(words: list[int]) -> list[list[int]]:
    """Some share a prefix, two of which are the same; some repeat themselves, so that drafts are right now and then."""
    shared, loop = words[200:222], words[40:48]
    family = [shared + words[place : place + length] for place, length in ((300, 3), (400, 9))]
    return [random_ids(1, 1), words[:6], random_ids(70, 2), *family, family[0], loop * 3, words[800:818]]


def config(scheduler: str, kv: str, chunk: int | None, speculator: str, depth: int, policy: str) -> dict[str, Any]:
    """``chunk`` is the chunked scheduler's own option; the others cut prompts by the budget of a step alone."""
    own = {"max_chunk": chunk} if scheduler == "chunked" else {}
    return {
        "model": MODEL, "dtype": "float32", "device": "cpu", "max_model_len": MAX_MODEL_LEN, "observers": [],
        "scheduler": {
            "use": scheduler, "policy": policy, "max_running": 6,
            "max_batch_tokens": 512 if own or chunk is None else chunk, **own},
        "kvcache": {"use": kv, "block_size": PAGE_SIZE, "num_blocks": PAGES[kv]},
        "speculator": {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3} if speculator == "ngram" else speculator,
        "execution": {"depth": depth, "num_threads": 2},
    }


def assert_exercised(
    engine: Any, scheduler: str, kv: str, chunk: int | None, speculator: str, depth: int, policy: str,
) -> None:
    """What the run names did happen."""
    seen = engine.seen
    print(dict(seen))
    assert engine.built.engine.loop.max_depth_seen == depth
    assert seen["abort"] == 2
    assert bool(seen["cached tokens"]) is (kv == "prefix")
    assert bool(seen["accepted"] and seen["rejected"]) is (speculator == "ngram")
    assert bool(seen["cut prompts"]) is (chunk is not None)
    assert seen["widest row"] <= (chunk or 512)
    if (scheduler, kv, chunk, speculator, depth, policy) in COVERING and kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"
