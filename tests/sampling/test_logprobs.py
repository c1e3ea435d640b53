"""Logprobs are the raw model's, with ranks and alternatives, and take little memory."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotswap.core.execution import logprobs
from hotswap.core.execution.logprobs import prompt_logprobs, slice_rows, token_logprobs


def random_logits(rows: int, vocab_size: int) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(rows))


def test_logprob_rank_and_alternatives_are_those_of_log_softmax() -> None:
    logits = random_logits(20, 500)
    tokens = [int(t) for t in torch.randint(500, (20,), generator=torch.Generator().manual_seed(0))]
    tokens[3] = int(logits[3].argmax())
    counts = [row % 6 for row in range(20)]
    expected = logits.double().log_softmax(-1)
    for row, entry in enumerate(token_logprobs(logits, tokens, counts)):
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(expected[row, tokens[row]].item(), abs=1e-5)
        assert entry.rank == 1 + int((expected[row] > expected[row, tokens[row]]).sum())
        best = expected[row].topk(counts[row])
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_the_most_probable_token_has_rank_one_even_among_equals() -> None:
    entries = token_logprobs(torch.tensor([[1.0, 1.0, 0.0]] * 3), [0, 1, 2], [3, 0, 1])
    assert [entry.rank for entry in entries] == [1, 1, 3]
    assert [len(entry.top) for entry in entries] == [3, 0, 1]


def test_more_alternatives_than_tokens_and_no_rows_are_fine() -> None:
    assert len(token_logprobs(torch.zeros(1, 3), [1], [20])[0].top) == 3
    assert token_logprobs(torch.zeros(0, 3), [], []) == []


def test_an_excluded_token_has_logprob_minus_infinity() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, -torch.inf]]), [1], [2])
    assert entry.logprob == -torch.inf
    assert entry.top == ((0, 0.0), (1, -torch.inf))


def test_prompt_logprobs_equal_those_of_the_whole_without_making_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_logits(64, 300)
    hidden = random_logits(41, 64)
    tokens = list(range(41))
    sizes = []

    def head(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return rows @ weight

    monkeypatch.setattr(logprobs, "_SLICE_BYTES", 10 * 4 * 4 * 300)
    found = prompt_logprobs(hidden, tokens, 2, head)
    monkeypatch.undo()
    expected = token_logprobs(hidden @ weight, tokens, [2] * 41)
    assert sizes == [1, 10, 10, 10, 10]
    for one, other in zip(found, expected, strict=True):
        assert (one.token_id, one.rank) == (other.token_id, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


class _PeakMemory(TorchDispatchMode):
    """Sums the sizes of the tensors that are alive, as far as operations made them."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = storage.nbytes()
                weakref.finalize(tensor, self.alive.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.alive.values()))
        return result


@pytest.mark.parametrize("vocab_size", [49_152, 152_064])
def test_a_slice_takes_less_than_64_mebibytes(vocab_size: int) -> None:
    rows = slice_rows(vocab_size)
    hidden, weight = torch.randn(2 * rows, 8), torch.randn(8, vocab_size)
    with _PeakMemory() as memory:
        prompt_logprobs(hidden, [5] * (2 * rows), 5, lambda part: part @ weight)
    assert rows * vocab_size * 4 < memory.peak < 64 << 20
