"""n > 1 through whole engines: the prompt is computed once, and the answers are those of as many separate requests."""

from typing import Any

import pytest

from hotswap.core.hooks import Observer, hookimpl

MAX_TOKENS = 24
NGRAM = {"use": "ngram", "min_n": 1, "max_n": 3, "max_draft": 3}


class CountingForks(Observer):
    """Pages that grants copied, and tokens that rows computed."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.computed = 0

    @hookimpl
    def hotswap_step_planned(self, message: Any) -> None:
        self.copies += sum(
            len(change.copies) for _, grant in message.grants for change in grant.groups.values())
        self.computed += sum(row.n_tokens for row in message.rows)


def counting(engine: Any) -> CountingForks:
    observer = CountingForks()
    engine.built.components.add(observer)
    return observer


def choices(engine: Any, prompt: list[int], n: int, fork: bool = True, **sampling: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, **sampling, "seed": 10 + i,
             "fork_of": engine.name(0) if i and fork else None} for i in range(n)]


@pytest.mark.parametrize("kv", ["paged", "prefix", "radix"])
def test_seeded_choices_are_those_of_separate_requests(run: Any, tiny: Any, kv: str) -> None:
    """A prompt of 100 tokens, n=4, sampled: bit for bit the same tokens and logprobs."""
    prompt = [2 + (37 * i) % 157 for i in range(100)]
    separate = run(tiny.config("chunked", "contiguous", "none", 1, num_blocks=1 + 4 * 32))
    alone = [separate.answer({**choice, "fork_of": None})[0]
             for choice in choices(separate, prompt, 4, temperature=0.8, logprobs=2)]
    engine = run(tiny.config("chunked", kv, "none", 2, num_blocks=1 + 100))
    counted = counting(engine)
    together = engine.answer(*choices(engine, prompt, 4, temperature=0.8, logprobs=2))
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    for one, other in zip(together, alone, strict=True):
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4)
    assert len({tuple(answer.token_ids) for answer in together}) == 4
    assert counted.copies == 3, "each child has a copy of the last page, which is not full"
    assert counted.computed <= 100 + 3 + 4 * MAX_TOKENS, "the prompt was computed once"
    assert [answer.cached_tokens for answer in together] == [0, 99, 99, 99]
    engine.assert_clean()


@pytest.mark.parametrize(("scheduler", "kv", "depth"), [
    ("chunked", "paged", 2), ("continuous", "prefix", 2), ("prefill_first", "radix", 1), ("chunked", "radix", 2)])
def test_greedy_choices_with_drafts_and_suspensions_are_those_of_transformers(
    run: Any, book: Any, tiny: Any, scheduler: str, kv: str, depth: int,
) -> None:
    engine = run(tiny.config(scheduler, kv, NGRAM, depth, num_blocks=1 + 32))
    counted = counting(engine)
    for prompt in tiny.prompts()[3:7]:
        for answer in engine.answer(*choices(engine, prompt, 5)):
            assert answer.error is None
            book.compare(tiny.reference, prompt, answer.token_ids)
    engine.assert_clean()
    assert counted.copies >= 8
    assert engine.seen["preempted"] and engine.seen["accepted"] and engine.seen["rejected"]


def test_children_of_an_aborted_parent_give_their_own_answers(run: Any, book: Any, tiny: Any) -> None:
    engine = run(tiny.config("chunked", "prefix", "none", 2))
    prompt = tiny.prompts()[3]

    def give_up(index: int, answer: Any) -> None:
        if index == 0 and len(answer.token_ids) >= 2:
            engine.built.engine.abort(engine.name(0))

    answers = engine.answer(*choices(engine, prompt, 3), on_output=give_up)
    assert [answer.finish_reason for answer in answers] == ["abort", "length", "length"]
    for answer in answers:
        book.compare(tiny.reference, prompt, answer.token_ids)
    engine.assert_clean()


@pytest.mark.parametrize("kv", ["paged", "radix"])
def test_the_cache_of_a_draft_model_is_shared_too(run: Any, book: Any, tiny: Any, kv: str) -> None:
    """The target as its own draft model: were its pages not shared like the target's, it would guess wrongly."""
    speculator = {"use": "draft", "model": str(tiny.path), "max_draft": 4}
    engine = run(tiny.config("chunked", kv, speculator, 2, num_blocks=1 + 120))
    counted = counting(engine)
    for prompt in tiny.prompts()[2:7]:
        for answer in engine.answer(*choices(engine, prompt, 4)):
            book.compare(tiny.reference, prompt, answer.token_ids)
    engine.assert_clean()
    assert counted.copies >= 2 * 3 * 4, "a page of each group, the draft model's too"
    assert engine.seen["rejected"] <= 0.01 * engine.seen["accepted"]


def test_choices_are_saved_to_host_memory_and_come_back(run: Any, book: Any, tiny: Any) -> None:
    """Requests whose pages are shared are suspended by swap; what comes back is each one's own."""
    engine = run(tiny.config(
        "chunked", "prefix", NGRAM, 2, num_blocks=1 + 33,
        kv_transfer={"use": "host", "memory": "1MiB", "swap_overhead": 0, "overlap": True}))
    counted = counting(engine)
    for seed in range(3):
        for prompt in tiny.prompts(seed)[3:7]:
            for answer in engine.answer(*choices(engine, prompt, 5)):
                assert answer.error is None
                book.compare(tiny.reference, prompt, answer.token_ids)
    moved = engine.built.engine.loop.transfers.counters()
    assert counted.copies and moved["swaps_out"] and moved["swaps_in"] and not moved["failed"], moved
