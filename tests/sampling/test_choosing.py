"""From a step's logits to tokens: what is asked of a row decides what is done with it, and not its neighbours."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotswap.core.execution import filters
from hotswap.core.execution.choosing import ChoiceRows, Choices, TokenChooser
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams
from hotswap.core.testing.rig import build

VOCAB_SIZE = 400
ASKED = [
    {"temperature": 0}, {"temperature": 0.7}, {"temperature": 1.3, "top_p": 0.8}, {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "logit_bias": {5: 100.0}}, {"temperature": 0.7, "repetition_penalty": 1.5, "logprobs": 0},
    {"temperature": 0},
]

Choose = Callable[..., Choices]


@pytest.fixture
def choose() -> Choose:
    """``choose(logits, asked, drafts)``: what a new chooser makes of rows with these parameters."""

    def chosen(logits: torch.Tensor, asked: list[dict[str, Any]], drafts: list[list[int]] | None = None) -> Choices:
        chooser = TokenChooser([build("logits_processor", use) for use in ("penalties", "bias")], VOCAB_SIZE, "cpu")
        news = [NewRequest(str(row), [1, 2, 3 + row], 3, SamplingParams(**params), row)
                for row, params in enumerate(asked)]
        for new in news:
            chooser.begin(new)
        names = [new.id for new in news]
        return chooser.choose(logits, ChoiceRows(names, np.full(len(names), 3), drafts or [[]] * len(names)))

    return chosen


def logits_of(rows: int) -> torch.Tensor:
    return (4 * torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))).to(torch.bfloat16)


@pytest.mark.parametrize("drafts", [None, [[7], [], [8, 9], [], [1, 2, 3], [], [4]]], ids=["plain", "drafts"])
def test_logits_in_16_bits_choose_as_in_32(choose: Choose, drafts: list[list[int]] | None) -> None:
    logits = logits_of(len(ASKED) + sum(map(len, drafts or [])))
    assert choose(logits.clone(), ASKED, drafts) == choose(logits.float(), ASKED, drafts)


def test_a_greedy_row_among_others_is_what_it_is_among_greedy_ones(choose: Choose) -> None:
    logits = logits_of(len(ASKED))
    together, plain = choose(logits.clone(), ASKED), choose(logits.clone(), [{"temperature": 0}] * len(ASKED))
    for row, params in enumerate(ASKED):
        if params == {"temperature": 0}:
            assert together.kept[row] == plain.kept[row] == [int(logits[row].float().argmax())]
    assert together.kept[4] == [5] and set(together.logprobs) == {3, 5}


def test_a_faulty_row_among_greedy_ones_is_an_error_of_its_own(choose: Choose) -> None:
    logits = logits_of(3)
    logits[1, 9] = torch.nan
    found = choose(logits, [{"temperature": 0}] * 3)
    assert found.errors.keys() == {1} and "NaN" in found.errors[1]
    assert [found.kept[row] for row in (0, 2)] == [[int(logits[row].float().argmax())] for row in (0, 2)]


def test_a_top_k_of_the_whole_vocabulary_costs_no_sort(choose: Choose, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(3)
    expected = choose(logits.clone(), [{"temperature": 0.7}] * 3)
    monkeypatch.setattr(filters, "best_of", None)
    assert choose(logits, [{"temperature": 0.7, "top_k": k} for k in (VOCAB_SIZE, VOCAB_SIZE + 1, 2**70)]) == expected


class Faulty(LogitsProcessor):
    """Where it is applied it writes ``value`` over the first row, and raises if it ``raises``."""

    def __init__(self, value: float | None, raises: bool = True) -> None:
        super().__init__()
        self.value, self.raises = value, raises

    def wants(self, request: NewRequest) -> bool:
        return True

    def begin(self, request: NewRequest) -> None:
        """Nothing to keep."""

    def apply(self, logits: torch.Tensor, rows: Any) -> None:
        if self.value is not None:
            logits[0] = self.value
        if self.raises:
            raise ValueError("planted")


@pytest.fixture(params=[(drafts, dtype) for drafts in (0, 2) for dtype in (torch.float32, torch.bfloat16)], ids=str)
def choose_with(request: Any) -> Callable[[LogitsProcessor, float | None], Choices]:
    """``choose_with(processor, value)``: what becomes of two rows, the second of which has ``value`` from the model."""
    drafts, dtype = request.param

    def chosen(processor: LogitsProcessor, value: float | None) -> Choices:
        chooser = TokenChooser([processor], VOCAB_SIZE, "cpu")
        news = [NewRequest(str(row), [1, 2, 3], 3, SamplingParams(temperature=0), row) for row in range(2)]
        for new in news:
            chooser.begin(new)
        logits = logits_of(2 * (drafts + 1)).to(dtype)
        if value is not None:
            logits[drafts + 1, 9] = value
        return chooser.choose(logits, ChoiceRows(["0", "1"], np.full(2, 3), [[7] * drafts] * 2))

    return chosen


@pytest.mark.parametrize("value", [None, -torch.inf, torch.nan, torch.inf])
def test_a_processor_that_raises_over_nan_takes_no_blame_from_the_model_nor_gives_it_its_own(
    choose_with: Any, value: float | None,
) -> None:
    found = choose_with(Faulty(value), torch.nan)
    assert "planted" in found.errors[0] and "NaN" in found.errors[1]
    assert found.own == {0}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_processor_that_makes_nan_of_numbers_without_a_word_is_named(choose_with: Any, value: float) -> None:
    found = choose_with(Faulty(value, raises=False), None)
    assert found.errors == {0: "logits_processor:Faulty made NaN or infinity of the model's logits"}
    assert found.own == {0}
