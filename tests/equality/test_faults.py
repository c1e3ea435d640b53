"""What goes wrong in one request, through whole engines: the others and the next ones are served as if nothing were."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

EOS = 1


class Poison:
    """Stands between a model and its runner. Once armed, the given token's keys and values at the given position of the
    first layer become NaN, one time, and with them whatever is computed from there on."""

    def __init__(self, model: Any) -> None:
        self.target: tuple[int, int] | None = None
        self.forward, model.forward = model.forward, self

    def __call__(self, inputs: torch.Tensor, positions: torch.Tensor, attend: Callable[..., Any]) -> torch.Tensor:
        if self.target is None:
            return self.forward(inputs, positions, attend)
        sick = (inputs == self.target[0]) & (positions == self.target[1])
        if sick.any():
            self.target = None

        def poisoned(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            keys, values = (torch.where(sick[:, None, None], torch.nan, x) if layer == 0 else x for x in (k, v))
            return attend(layer, q, keys, values)

        return self.forward(inputs, positions, poisoned)


@pytest.mark.parametrize("kv", ["contiguous", "paged", "prefix"])
@pytest.mark.parametrize("depth", [1, 2])
def test_nan_in_the_midst_of_an_output_ends_that_request_alone(run: Any, tiny: Any, kv: str, depth: int) -> None:
    prompts = tiny.prompts()[:4]
    # Room for few more than these, so that pages that have held NaN are soon given to others.
    engine = run(tiny.config("chunked", kv, "none", depth))
    model = next(part for part in engine.built.components if part.kind == "model")
    poison = Poison(model)
    requests = [{"prompt": prompt, "max_tokens": 20, "logprobs": 0} for prompt in prompts]
    solo = [engine.answer(request)[0] for request in requests]
    engine.built.engine.reset()
    victim = 2
    poison.target = (solo[victim].token_ids[8], len(prompts[victim]) + 8)
    answers = engine.answer(*requests)
    assert poison.target is None, "the fault should have happened"
    assert answers[victim].finish_reason == "error"
    assert "NaN" in answers[victim].error
    assert answers[victim].token_ids == solo[victim].token_ids[:9]
    for index in {0, 1, 2, 3} - {victim}:
        assert (answers[index].token_ids, answers[index].error) == (solo[index].token_ids, None)
    (again,) = engine.answer(requests[victim])
    assert again.cached_tokens == 0
    assert again.token_ids == solo[victim].token_ids
    for _ in range(3):
        assert [answer.token_ids for answer in engine.answer(*requests)] == [answer.token_ids for answer in solo]
    engine.assert_clean()


@pytest.mark.parametrize("kv", ["contiguous", "prefix"])
@pytest.mark.parametrize("speculator", ["none", "ngram"])
def test_a_session_goes_on_after_a_turn_that_ended_at_once(run: Any, tiny: Any, kv: str, speculator: str) -> None:
    """The first token that is sampled ends the text: one token of output, and nothing new for the next turn."""
    engine = run(tiny.config("chunked", kv, speculator, 2))
    prompt = tiny.prompts()[3]
    (first,) = engine.answer({
        "prompt": prompt, "max_tokens": 10, "logit_bias": {EOS: 100}, "eos_token_ids": frozenset({EOS})})
    assert (first.token_ids, first.finish_reason) == ([EOS], "stop")
    for turn in (prompt, [*prompt, EOS], [*prompt, EOS, 7, 8]):
        (answer,) = engine.answer({"prompt": turn, "max_tokens": 6})
        assert answer.token_ids == [best for best, _ in tiny.reference(turn, answer.token_ids)]
        assert len(answer.token_ids) == 6
    engine.assert_clean()
