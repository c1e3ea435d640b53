"""A model with two cache groups, layers that see everything beside layers with a sliding window, through whole engines:
the tokens of transformers, while pages that have left the window come back."""

from collections import defaultdict
from typing import Any

import pytest

from hotswap.core.hooks import Observer, hookimpl

WINDOW, PAGE, CHUNK, MAX_TOKENS = 12, 4, 16, 24
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}


@pytest.fixture(scope="module")
def two_groups(tiny_of: Any) -> Any:
    """Qwen2 whose first layer sees everything, and whose second one a window."""
    return tiny_of("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1)


class Tables(Observer):
    """Of each request: the most pages that it held at once, and the first page that it still held, per group."""

    def __init__(self, kv: Any) -> None:
        super().__init__()
        self.kv = kv
        self.most: dict[str, int] = defaultdict(int)
        self.first: dict[str, int] = defaultdict(int)
        self.copies = 0

    @hookimpl
    def hotswap_step_planned(self, message: Any) -> None:
        self.copies += sum(
            len(change.copies) for _, grant in message.grants for change in grant.groups.values())

    @hookimpl
    def hotswap_step_finished(self) -> None:
        for request in self.kv.owners():
            for group, table in self.kv.table(request).groups.items():
                self.most[group] = max(self.most[group], len(table.pages))
                self.first[group] = max(self.first[group], table.first_live)


def watched(engine: Any) -> Tables:
    tables = Tables(engine.built.engine.loop.parts.kv)
    engine.built.components.add(tables)
    return tables


@pytest.mark.parametrize("kv", ["paged", "prefix", "radix"])
def test_pages_that_have_left_the_window_come_back_while_the_request_runs(
    run: Any, book: Any, two_groups: Any, kv: str,
) -> None:
    engine = run(two_groups.config({"use": "chunked", "max_chunk": CHUNK}, kv, "none", 2, max_model_len=128))
    assert list(engine.built.cache_plan.groups) == ["full", "window"]
    tables = watched(engine)
    prompt = [2 + (37 * i) % 157 for i in range(70)]
    [output] = engine.generate([prompt], 50)
    book.compare(two_groups.reference, prompt, output)
    assert tables.most["full"] == (70 + 50) // PAGE
    assert tables.first["full"] == 0
    assert tables.first["window"] >= (70 + 50 - WINDOW) // PAGE - 1
    engine.assert_clean()


def test_at_the_end_of_a_long_answer_a_request_holds_no_more_of_the_window_than_it_sees(
    run: Any, two_groups: Any,
) -> None:
    engine = run(two_groups.config("chunked", "paged", "none", 2))
    tables = watched(engine)
    engine.generate([[5, 6, 7]], 100)
    assert tables.most["full"] == -(-102 // PAGE)
    assert tables.most["window"] <= WINDOW // PAGE + 2, "the window, the page that it leaves, the one that is written"


@pytest.mark.parametrize(("scheduler", "kv", "speculator", "depth", "attention"), [
    ("chunked", "paged", "none", 1, "torch"), ("continuous", "paged", NGRAM, 2, "cpu"),
    ("static", "prefix", NGRAM, 1, "torch"), ("chunked", "prefix", NGRAM, 2, "cpu"),
    ("prefill_first", "prefix", "none", 2, "torch"), ("chunked", "radix", NGRAM, 2, "torch"),
    ("continuous", "radix", "none", 1, "cpu"), ("static", "contiguous", NGRAM, 2, "cpu"),
])
def test_every_part_gives_the_tokens_of_transformers(
    run: Any, book: Any, two_groups: Any, scheduler: str, kv: str, speculator: Any, depth: int, attention: str,
) -> None:
    engine = run(two_groups.config(scheduler, kv, speculator, depth, attention=attention))
    prompts = two_groups.prompts()
    assert max(map(len, prompts)) > 2 * WINDOW
    for abort in ({}, {}, {1: 3, 4: 3}):  # cold, warm, with requests that are given up
        for prompt, output in zip(prompts, engine.generate(prompts, MAX_TOKENS, abort), strict=True):
            book.compare(two_groups.reference, prompt, output)
    engine.assert_clean()
    seen = engine.seen
    assert engine.built.engine.loop.max_depth_seen == depth
    assert bool(seen["cached tokens"]) is (kv in ("prefix", "radix"))
    assert bool(seen["accepted"] and seen["rejected"]) is (speculator is NGRAM)
    if kv != "contiguous":
        assert seen["preempted"], "the pool should be too small for all"


@pytest.mark.parametrize("kv", ["paged", "prefix", "radix"])
def test_choices_share_the_pages_of_both_groups(run: Any, book: Any, two_groups: Any, kv: str) -> None:
    engine = run(two_groups.config("chunked", kv, NGRAM, 2, num_blocks=1 + 40))
    tables = watched(engine)
    for prompt in two_groups.prompts()[2:7]:
        answers = engine.answer(*(
            {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True,
             "fork_of": engine.name(0) if i else None} for i in range(4)))
        for answer in answers:
            book.compare(two_groups.reference, prompt, answer.token_ids)
    engine.assert_clean()
    assert tables.copies >= 2 * 3, "a page of each group for each child"
    assert engine.seen["accepted"]
