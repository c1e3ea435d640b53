"""The race gives each token its share, looks at few of them, and hardly minds how logits are rounded."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hotswap.core.execution.race import (
    block_peaks,
    numbers,
    split_mix,
    winners,
    winners_of_all,
    winners_of_rows,
)
from hotswap.core.execution.sampling import sample
from hotswap.core.request import SamplingParams

WIDTHS = [1, 5, 31, 64, 65, 130, 2048, 2049, 2112, 5000]


def some_keys(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (rows,), generator=torch.Generator().manual_seed(seed))


def test_split_mix_gives_the_known_answers() -> None:
    """Those of its authors' program from the seed 1234567."""
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [number % 2**64 for number in split_mix(torch.tensor([1234567]), torch.arange(5)).tolist()] == known


@pytest.mark.parametrize("along", ["ids", "rows"])
def test_numbers_are_exponential_and_uncorrelated(along: str) -> None:
    found = numbers(some_keys(50), torch.arange(4096).expand(50, -1))
    assert found.min() > 0
    assert stats.kstest(found.flatten(), "expon").pvalue > 1e-3
    flat = (found if along == "ids" else found.T).flatten().numpy()
    for apart in (1, 32, 64, 2048):  # beside each other in a row, in a block, and in the next one
        assert abs(np.corrcoef(flat[:-apart], flat[apart:])[0, 1]) < 4 / np.sqrt(len(flat))


def test_the_smallest_numbers_of_blocks_are_anywhere_in_them_and_as_small_as_of_independent_ones() -> None:
    found = numbers(some_keys(200), torch.arange(2048).expand(200, -1)).view(200, 32, 64)
    ordered = found.sort(1)
    places = np.bincount(ordered.indices[:, 0].flatten(), minlength=32)
    assert stats.chisquare(places).pvalue > 1e-3
    for place in range(4):  # each of an exponential sample's gaps is one of its own: Rényi
        begin = ordered.values[:, place - 1] if place else 0.0
        gaps = ((ordered.values[:, place] - begin) * (32 - place)).flatten()
        assert stats.kstest(gaps, "expon").pvalue > 1e-3


def flat(rows: int, width: int, random: torch.Generator) -> torch.Tensor:
    return torch.ones(rows, width)


def uneven(rows: int, width: int, random: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, width, generator=random) ** 12


def few(rows: int, width: int, random: torch.Generator) -> torch.Tensor:
    return torch.rand(rows, width, generator=random) * (torch.rand(rows, width, generator=random) < 3 / width)


def whole_numbers(rows: int, width: int, random: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 1 << 40, (rows, width), generator=random) >> torch.randint(0, 40, (width,))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [flat, uneven, few, whole_numbers])
def test_looking_at_few_blocks_finds_who_wins_among_all(width: int, kind: Callable[..., torch.Tensor]) -> None:
    weights, keys = kind(200, width, torch.Generator().manual_seed(width)), some_keys(200, width)
    everything = winners(weights, torch.arange(width).expand(200, -1), keys)
    assert torch.equal(winners_of_rows(weights, keys), everything)
    assert (weights.gather(1, everything[:, None]).squeeze(1) > 0).equal(weights.amax(1) > 0)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_block_s_peak_is_the_largest_that_has_an_id_in_it(width: int, dtype: torch.dtype) -> None:
    x = (100 * torch.randn(3, width, generator=torch.Generator().manual_seed(0))).to(dtype)
    ids = torch.arange(width)
    blocks = (ids // 2048) * 64 + ids % 64
    expected = {int(block): x[:, blocks == block].amax(1) for block in blocks.unique()}
    found = block_peaks(x)
    assert found.shape[1] == len(expected) and found.dtype == dtype
    assert all(torch.equal(found[:, block], peak) for block, peak in expected.items())


def test_few_tokens_are_weighed() -> None:
    logits = 2 * torch.randn(64, 49_152, generator=torch.Generator().manual_seed(1))
    logits[:, :100] += 18 * torch.exp(-torch.arange(100) / 20)
    weights, weighed = (logits - logits.amax(1, keepdim=True)).exp(), 0

    def weigh(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        nonlocal weighed
        weighed += ids.numel()
        return weights[rows[:, None], ids]

    winners_of_all(block_peaks(weights), weigh, some_keys(64))
    assert weighed < weights.numel() / 20


@pytest.mark.parametrize("params", [
    SamplingParams(), SamplingParams(temperature=0.8, top_p=0.95), SamplingParams(top_k=50), SamplingParams(min_p=0.05),
    SamplingParams(typical_p=0.9),
])
def test_other_rounding_of_all_logits_changes_few_tokens(params: SamplingParams, make_batch: Any) -> None:
    """bfloat16 rounds logits of 16 to 1/16. By a running sum as many as half of the draws fell otherwise."""
    random = torch.Generator().manual_seed(0)
    exact = 3 * torch.randn(500, 4000, generator=random) + 6
    batch = make_batch([params] * 500, seeds=range(500))
    drawn = sample(exact, batch).tokens
    assert len(drawn.unique()) > 100
    for rounded in (exact.bfloat16(), exact + exact.abs() * 2.0**-9 * torch.randn(exact.shape, generator=random)):
        assert (sample(rounded, batch).tokens != drawn).float().mean() < 0.03


def test_a_token_that_is_taken_away_changes_no_draw_of_another(make_batch: Any) -> None:
    logits = torch.randn(300, 500, generator=torch.Generator().manual_seed(2))
    batch = make_batch([SamplingParams()] * 300)
    drawn = sample(logits, batch).tokens
    banned = drawn[0]
    less = logits.clone()
    less[:, banned] = -torch.inf
    others = drawn != banned
    assert torch.equal(sample(less, batch).tokens[others], drawn[others])
