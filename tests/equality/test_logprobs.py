"""Logprobs through whole engines: of a request they are its own, however it was cut, suspended, cached or batched."""

import random
from typing import Any

import pytest
import torch

from hotswap.core.hooks import Observer, hookimpl


class Suspensions(Observer):
    """Remembers each suspension of ``loop`` with how much of the request had been computed, and its output length."""

    def __init__(self, loop: Any) -> None:
        super().__init__()
        self.loop, self.seen = loop, {}

    @hookimpl
    def hotswap_step_planned(self, suspensions: Any) -> None:
        for request, _, _ in suspensions:
            state = self.loop.pool.states[request]
            self.seen[request] = (state.verified, state.output_length)


def assert_close(entries: Any, others: Any, tolerance: float) -> None:
    """The same tokens and alternatives, with logprobs that differ by ``tolerance`` at most."""
    assert len(entries) == len(others)
    for entry, other in zip(entries, others, strict=True):
        assert (entry is None) is (other is None)
        if entry is None:
            continue
        assert entry.token_id == other.token_id
        assert entry.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert dict(entry.top) == pytest.approx(dict(other.top), abs=tolerance)


def test_prompt_logprobs_of_requests_that_were_suspended_in_their_prompts(run: Any, tiny: Any) -> None:
    """Two that decode outgrow the pool while two others are computed token by token."""
    rng = random.Random(3)
    decoding = [{"prompt": tiny.prompt(4, rng), "max_tokens": 60} for _ in range(2)]
    scored = [{"prompt": tiny.prompt(60, rng), "max_tokens": 5, "prompt_logprobs": 2} for _ in range(2)]
    roomy = run(tiny.config("chunked", "paged", "none", 1, num_blocks=200))
    undisturbed = roomy.answer(*scored)
    engine = run(tiny.config({"use": "chunked", "max_chunk": 1}, "paged", "none", 2, num_blocks=1 + 36))
    suspensions = Suspensions(engine.built.engine.loop)
    engine.built.components.add(suspensions)
    answers = engine.answer(*decoding, *scored)[2:]
    assert suspensions.seen.keys() == {"0-2", "0-3"}
    assert all(0 < verified < 60 and not length for verified, length in suspensions.seen.values())
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert len(answer.prompt_logprobs) == 60
        assert answer.prompt_logprobs[0] is None
        assert_close(answer.prompt_logprobs, expected.prompt_logprobs, 1e-4)
        assert answer.token_ids == expected.token_ids
    engine.assert_clean()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, None])
def test_prompt_logprobs_are_the_models_own_whatever_the_chunk(run: Any, tiny: Any, chunk: int | None) -> None:
    prompt = tiny.prompt(67, random.Random(5))
    scheduler = {"use": "chunked", "max_chunk": chunk, "max_batch_tokens": 96}
    engine = run(tiny.config(scheduler, "prefix", "none", 2, num_blocks=200))
    expected = tiny.reference.logits(prompt).log_softmax(-1)
    for _ in ("cold", "warm"):
        (answer,) = engine.answer({"prompt": prompt, "max_tokens": 1, "prompt_logprobs": 3})
        assert answer.prompt_logprobs[0] is None
        assert [entry.token_id for entry in answer.prompt_logprobs[1:]] == prompt[1:]
        for row, entry in zip(expected, answer.prompt_logprobs[1:], strict=False):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=1e-4)
            assert [logprob for _, logprob in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    assert engine.seen["widest row"] == min(chunk or 67, 67)


def test_logprobs_are_the_same_cold_and_warm(run: Any, tiny: Any) -> None:
    engine = run(tiny.config("chunked", "prefix", "none", 1, num_blocks=200))
    request = {"prompt": tiny.prompt(70, random.Random(6)), "max_tokens": 12, "logprobs": 5}
    (cold,), (warm,) = engine.answer(request), engine.answer(request)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 68)
    assert_close(cold.logprobs, warm.logprobs, 1e-5)


@pytest.mark.parametrize("kv", ["paged", "contiguous"])
def test_a_neighbour_that_computes_its_prompt_changes_no_logprob(run: Any, tiny: Any, kv: str) -> None:
    rng = random.Random(8)
    request = {"prompt": tiny.prompt(70, rng), "max_tokens": 16, "logprobs": 5}
    neighbour = {"prompt": tiny.prompt(128, rng), "max_tokens": 2}
    settings = tiny.config({"use": "chunked", "max_chunk": 32}, kv, "none", 1, num_blocks=700, max_model_len=256)
    alone = run(settings).answer(request)[0]
    engine = run(settings)

    def join(index: int, answer: Any) -> None:
        if len(answer.token_ids) == 3:
            engine.built.engine.add(engine.request(1, **neighbour), lambda output: None)

    (beside,) = engine.answer(request, on_output=join)
    assert engine.seen["mixed steps"] == 4
    assert_close(beside.logprobs, alone.logprobs, 1e-4)


@pytest.mark.parametrize("speculator", ["none", "ngram"])
def test_logprobs_are_raw_whatever_the_sampling(run: Any, tiny: Any, speculator: str) -> None:
    """Of the same forced tokens they are equal at any temperature and with any processor, and the model's own."""
    prompt, forced = tiny.prompts()[3], 77
    engine = run(tiny.config("chunked", "prefix", speculator, 1))
    request = {"prompt": prompt, "max_tokens": 4, "logprobs": 4, "allowed_token_ids": [forced]}
    kinds = [{"temperature": 0.5}, {"temperature": 1.0}, {"temperature": 0}, {"presence_penalty": 2.0, "top_k": 1},
             {"logit_bias": {forced: 100, 3: -100}}]
    answers = engine.answer(*({**request, **kind} for kind in kinds))
    expected = tiny.reference.logits([*prompt, *[forced] * 3], 4).log_softmax(-1)
    for answer in answers:
        assert answer.token_ids == [forced] * 4
        assert [entry.logprob for entry in answer.logprobs] == pytest.approx(expected[:, forced].tolist(), abs=1e-4)
        tops = torch.tensor([[logprob for _, logprob in entry.top] for entry in answer.logprobs])
        torch.testing.assert_close(tops, expected.topk(4).values, atol=1e-4, rtol=0)
