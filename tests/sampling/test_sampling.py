"""The sampler draws from the distribution that its parameters define, row by row, and fails row by row."""

from itertools import product
from math import log
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from hotswap.core.execution import filters
from hotswap.core.execution.sampling import processed_probs, sample
from hotswap.core.execution.sampling_table import SamplingTable
from hotswap.core.execution.selecting import best_of
from hotswap.core.request import SamplingParams

GREEDY = SamplingParams(temperature=0.0)

COMBINATIONS = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m, typical_p=y)
    for t, k, p, m, y in product((0.6, 1.7), (0, 7), (1.0, 0.8), (0.0, 0.1), (1.0, 0.7))
]


def random_logits(rows: int, vocab_size: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return scale * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def chi_square_p(tokens: Any, probs: Any) -> float:
    """How likely counts as uneven as these are, if the tokens come from ``probs``; rare tokens are pooled."""
    probs = np.asarray(probs, dtype=np.float64)
    counts = np.bincount(np.asarray(tokens), minlength=len(probs))
    assert not counts[probs == 0].any(), "a token of probability zero was drawn"
    expected = probs / probs.sum() * counts.sum()
    common = expected >= 5
    observed, expected = (
        np.append(counts[common], counts[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    used = expected > 0
    if used.sum() < 2:
        return 1.0
    return float(stats.chisquare(observed[used], expected[used] * (observed.sum() / expected[used].sum())).pvalue)


@pytest.mark.parametrize(
    "params", COMBINATIONS, ids=lambda p: f"{p.temperature}-{p.top_k}-{p.top_p}-{p.min_p}-{p.typical_p}"
)
def test_frequencies_match_the_defined_distribution(params: SamplingParams, make_batch: Any, reference: Any) -> None:
    draws = 4000
    logits = random_logits(1, 24, seed=3)
    batch = make_batch([params] * draws, seeds=range(draws))
    tokens = sample(logits.expand(draws, -1), batch).tokens
    expected = reference(logits[0], params)
    assert chi_square_p(tokens, expected) > 1e-4
    np.testing.assert_allclose(processed_probs(logits, batch.select(np.array([0])))[0], expected, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [50, 300, 5000])
def test_the_filters_are_those_of_transformers_in_its_order(vocab_size: int, make_batch: Any) -> None:
    logits = random_logits(4, vocab_size, seed=vocab_size)
    for params in COMBINATIONS:
        warpers = [transformers.TemperatureLogitsWarper(params.temperature)]
        if params.top_k:
            warpers.append(transformers.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(transformers.TopPLogitsWarper(params.top_p))
        if params.min_p:
            warpers.append(transformers.MinPLogitsWarper(params.min_p))
        if params.typical_p < 1:
            warpers.append(transformers.TypicalLogitsWarper(params.typical_p))
        expected = logits.clone()
        for warper in warpers:
            expected = warper(None, expected)
        probs = processed_probs(logits, make_batch([params] * len(logits)))
        torch.testing.assert_close(probs, expected.softmax(-1), rtol=1e-4, atol=1e-6)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_mixture_of_parameters_gives_each_row_its_own_distribution(data: st.DataObject) -> None:
    vocab_size = data.draw(st.sampled_from([1, 3, 40, 700, 5000]))
    rows = data.draw(st.lists(st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
        top_k=st.sampled_from([-1, 0, 1, 5, 150, 10_000]),
        top_p=st.sampled_from([1e-6, 0.3, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.02, 1.0]),
        typical_p=st.sampled_from([1.0, 0.5]),
    ), min_size=1, max_size=6))  # fmt: skip
    logits = random_logits(len(rows), vocab_size, seed=data.draw(st.integers(0, 1000)))
    if data.draw(st.booleans()):  # as from a bfloat16 head: many tokens are exactly equal
        logits = logits.mul(2).round().div(2)
    table = SamplingTable()
    for row, params in enumerate(rows):
        table.add(str(row), params, row)
    batch = table.batch([str(row) for row in range(len(rows))], np.arange(len(rows)))
    probs = processed_probs(logits, batch)
    tokens = sample(logits, batch).tokens
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(rows)))
    assert (probs.gather(1, tokens[:, None]) > 0).all()
    for row, params in enumerate(rows):
        alone = batch.select(np.array([row]))
        assert torch.equal(processed_probs(logits[row : row + 1], alone)[0], probs[row])
        assert sample(logits[row : row + 1], alone).tokens[0] == tokens[row]
        if params.greedy or params.top_k == 1 or params.top_p == 1e-6:
            assert tokens[row] == logits[row].argmax()
        if params.top_k > 0:
            assert (probs[row] > 0).sum() <= params.top_k


def test_a_row_gets_the_same_token_alone_and_among_seven_others(make_batch: Any) -> None:
    logits = random_logits(8, 3000, seed=9)
    params = [SamplingParams(top_p=0.9), GREEDY, SamplingParams(), SamplingParams(top_k=3), SamplingParams(min_p=0.1),
              SamplingParams(top_p=0.5, top_k=400), SamplingParams(temperature=50.0, top_p=0.99),
              SamplingParams()]  # fmt: skip
    seeds, positions = np.arange(100, 108), np.arange(8) * 11
    together = sample(logits, make_batch(params, seeds, positions)).tokens
    order = np.random.default_rng(0).permutation(8)
    shuffled = sample(logits[order], make_batch([params[i] for i in order], seeds[order], positions[order])).tokens
    alone = [
        sample(logits[i : i + 1], make_batch([params[i]], seeds[i : i + 1], positions[i : i + 1])).tokens
        for i in range(8)
    ]
    assert together.tolist() == [int(token) for token in alone]
    assert shuffled.tolist() == together[order].tolist()


@pytest.mark.parametrize("vocab_size", [37, 40, 1001, 50_257])
def test_a_row_has_the_same_probabilities_bit_by_bit_alone_and_among_others(vocab_size: int, make_batch: Any) -> None:
    """Vector instructions leave a tail, and threads leave seams; neither may show."""
    logits = random_logits(9, vocab_size)
    for fields in ({}, {"top_k": 30}, {"top_p": 0.9}, {"min_p": 0.01}, {"typical_p": 0.8}):
        params = SamplingParams(temperature=3.0, **fields)
        together = processed_probs(logits, make_batch([params] * 9))
        for row in range(9):
            assert torch.equal(processed_probs(logits[row : row + 1], make_batch([params]))[0], together[row])


def test_where_top_p_ends_depends_on_no_top_k_beside_it(make_batch: Any) -> None:
    """The best token weighs 2**40 and those behind it 2**14, less than float32 tells apart there."""
    logits = torch.full((2, 600), -30.0)
    logits[:, 0], logits[:, 1:100] = 0.0, -26.0
    top_p = (2**26 + 49.5) / (2**26 + 99)
    row, beside = (SamplingParams(temperature=1 / log(2), top_k=top_k, top_p=top_p) for top_k in (100, 600))
    alone = processed_probs(logits[:1], make_batch([row]))
    assert (alone > 0).sum() == 51
    assert torch.equal(processed_probs(logits, make_batch([row, beside]))[0], alone[0])


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, int]]:
    """Each search for the best tokens from here on: the rows' first logits, and how many tokens are looked for."""
    seen: list[tuple[torch.Tensor, int]] = []

    def recorded(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append((x[:, 0].clone(), width))
        return best_of(x, width)

    monkeypatch.setattr(filters, "best_of", recorded)
    return seen


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    top_ks=st.lists(st.integers(1, 3500) | st.sampled_from([1, 127, 128, 255, 256, 2047, 2048, 60_000]), min_size=1,
                    max_size=8),
    top_p=st.sampled_from([1.0, 0.9]), seed=st.integers(0, 100),
)  # fmt: skip
def test_a_row_is_searched_for_its_own_top_k_whatever_its_neighbours_ask(
    top_ks: list[int], top_p: float, seed: int, make_batch: Any, looks: list[tuple[torch.Tensor, int]]
) -> None:
    logits = random_logits(len(top_ks), 3000, seed)
    batch = make_batch([SamplingParams(top_k=top_k, top_p=top_p) for top_k in top_ks])
    looks.clear()
    tokens = sample(logits, batch).tokens
    for row, top_k in enumerate(top_ks):
        widths = [width for first, width in looks if (first == logits[row, 0]).any()]
        assert len(widths) == 1 and min(top_k, 2999) < widths[0] <= max(128, 2 * top_k)
    for row in range(len(top_ks)):
        assert sample(logits[row : row + 1], batch.select(np.array([row]))).tokens[0] == tokens[row]


def test_an_accelerator_which_sorts_everything_takes_all_top_k_together() -> None:
    table = SamplingTable("meta")
    for name, top_k in (("a", 3), ("b", 0), ("c", 2000)):
        table.add(name, SamplingParams(top_k=top_k), 0)
    assert [len(group.rows) for group in table.batch("abc", np.zeros(3, int)).groups] == [1, 2]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"typical_p": 0.8}])
def test_a_top_k_of_the_whole_vocabulary_is_none(
    fields: dict[str, float], make_batch: Any, looks: list[tuple[torch.Tensor, int]]
) -> None:
    logits = random_logits(3, 500)
    off, least, largest = (SamplingParams(top_k=top_k, **fields) for top_k in (0, 500, 2**70))  # type: ignore[arg-type]
    expected = processed_probs(logits, make_batch([off] * 3))
    looks.clear()
    table = SamplingTable(vocab_size=500)
    for name, params in zip("abc", (off, least, largest), strict=True):
        table.add(name, params, 7)
    batch = table.batch("abc", np.zeros(3, int))
    assert torch.equal(processed_probs(logits, batch), expected)
    alike = logits[:1].expand(3, -1)
    assert len(set(sample(alike, batch).tokens.tolist())) == 1
    assert bool(looks) == ("top_p" in fields)
    # A table that does not know the vocabulary sorts, and finds the same.
    assert torch.equal(processed_probs(logits, make_batch([off, least, largest])), expected)


def test_slices_and_widths_do_not_change_a_token(make_batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(top_p=0.97, temperature=3.0)] * 5 + [SamplingParams()] * 5 + [SamplingParams(top_k=9)] * 5
    logits, batch = random_logits(15, 4000), make_batch(params)
    usual = sample(logits, batch).tokens
    monkeypatch.setattr(filters, "_SLICE_ELEMENTS", {"cpu": 2 * 4000})
    monkeypatch.setattr(filters, "_WIDTHS", ())
    assert torch.equal(sample(logits, batch).tokens, usual)


def test_tiny_temperatures_are_greedy_and_small_ones_do_not_overflow(make_batch: Any) -> None:
    logits = random_logits(1, 1000, scale=1e4)
    temperatures = [1e-2, 9e-6, 1e-12, 0.0, 1.001e-5]
    batch = make_batch([SamplingParams(temperature=t) for t in temperatures])
    sampled = sample(logits.expand(len(temperatures), -1), batch)
    assert sampled.to_host() == ([int(logits.argmax())] * len(temperatures), {})


def test_greedy_rows_with_masked_tokens_beside_sampling_rows_are_as_alone(make_batch: Any) -> None:
    logits = random_logits(6, 100)
    logits[::2, 10:] = -torch.inf
    params = [GREEDY, SamplingParams(), GREEDY, SamplingParams(top_p=0.5), GREEDY, SamplingParams(top_k=2)]
    tokens = sample(logits, make_batch(params)).tokens
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    assert (tokens[::2] < 10).all()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(typical_p=0.5)])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [(slice(None), "no token is left"), (torch.nan, "NaN"), (torch.inf, "NaN or infinity")],
)
def test_a_faulty_row_is_an_error_of_its_own_and_its_neighbours_keep_their_tokens(
    params: SamplingParams, spoil: Any, message: str, make_batch: Any
) -> None:
    logits = random_logits(5, 500)
    batch = make_batch([params] * 5)
    healthy, none = sample(logits, batch).to_host()
    assert none == {}
    if spoil == slice(None):
        logits[2] = -torch.inf
    else:
        logits[2, 77] = spoil
    tokens, faults = sample(logits, batch).to_host()
    assert list(faults) == [2]
    assert message in faults[2]
    assert [t for i, t in enumerate(tokens) if i != 2] == [t for i, t in enumerate(healthy) if i != 2]
    probs = processed_probs(logits, batch)
    assert probs[2].isnan().all()
    assert not probs[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("min_p", [1e-9, 0.01, 0.1, 1 / 3, 0.5, 1.0])
def test_min_p_leaves_the_same_before_weights_are_whole_numbers_and_behind_another_filter(
    min_p: float, make_batch: Any
) -> None:
    """Of float32 logits, and of some that are just at the limit."""
    logits = random_logits(5, 3000, seed=3)
    logits[:, ::3] = logits.amax(-1, keepdim=True) + float(np.log(min_p))
    whole = processed_probs(logits, make_batch([SamplingParams(min_p=min_p)] * 5))
    sorted_ = processed_probs(logits, make_batch([SamplingParams(min_p=min_p, top_k=3000)] * 5))
    assert torch.equal(whole, sorted_)
    assert (whole > 0).any(-1).all()


@pytest.mark.parametrize(("vocab_size", "width"), [(9000, 128), (8999, 100), (8192, 1), (3000, 128), (130, 130)])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_best_of_a_row_are_those_that_sorting_finds(vocab_size: int, width: int, rounded: bool) -> None:
    """Of equals of the last one any may be left out; nothing that is larger may."""
    logits = random_logits(6, vocab_size, seed=width, scale=4.0)
    logits = logits.round() if rounded else logits  # thousands of equals
    logits[1, :100] += 50  # many of them in few groups
    logits[2, 20:] = -torch.inf
    logits[3, -1] = 99.0
    values, ids = best_of(logits, width)
    expected = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :width]) and torch.equal(logits.gather(1, ids), values)
    larger = values > values[:, -1:]
    assert torch.equal(ids[larger], expected.indices[:, :width][larger])
    assert all(len(set(row)) == width for row in ids.tolist())


def test_only_what_a_mask_allows_is_drawn_at_any_temperature(make_batch: Any) -> None:
    logits = torch.full((200, 400), -torch.inf)
    logits[:, [10, 11]] = torch.tensor([5.0, -30.0])
    for params in (
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=100.0, top_p=0.999),
        SamplingParams(top_k=300),
    ):
        tokens = sample(logits, make_batch([params] * 200)).tokens
        assert set(tokens.tolist()) <= {10, 11}


def test_sampling_changes_none_of_its_inputs(make_batch: Any) -> None:
    logits = random_logits(len(COMBINATIONS), 300)
    before = logits.clone()
    batch = make_batch(COMBINATIONS)
    sample(logits, batch)
    processed_probs(logits, batch)
    assert torch.equal(logits, before)
    assert torch.equal(sample(logits, batch).tokens, sample(logits, batch).tokens)


def test_a_table_follows_requests_that_come_go_and_return_with_other_parameters() -> None:
    table = SamplingTable()
    logits = random_logits(1, 50).expand(200, -1)
    names = [str(i) for i in range(200)]
    for i, name in enumerate(names):
        table.add(name, SamplingParams(top_k=1 if i % 2 else 0), i)
    first = sample(logits, table.batch(names, np.arange(200))).tokens
    assert (first[1::2] == logits[0].argmax()).all()
    assert len(set(first[::2].tolist())) > 1
    assert torch.equal(sample(logits, table.batch(names, np.arange(200))).tokens, first)
    for name in names[::2]:
        table.remove(name)
        table.remove("unknown")
    for name in names[1::2]:
        table.add(name, GREEDY, 0)
        table.add("new" + name, SamplingParams(top_k=2), 5)
    fresh = ["new" + name for name in names[1::2]]
    assert table.batch(names[1::2], np.zeros(100)).greedy.all()
    top_two = set(logits[0].topk(2).indices.tolist())
    assert set(sample(logits[:100], table.batch(fresh, np.arange(100))).tokens.tolist()) == top_two


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_16_bits_are_sampled_as_in_32(dtype: torch.dtype, make_batch: Any) -> None:
    logits = random_logits(len(COMBINATIONS) + 2, 5000).to(dtype)
    logits[-1, 7] = torch.nan
    for params in ([*COMBINATIONS, GREEDY, SamplingParams()], [*COMBINATIONS, *COMBINATIONS[:2]]):
        batch = make_batch(params)
        assert sample(logits, batch).to_host() == sample(logits.float(), batch).to_host()
        probs = processed_probs(logits, batch)
        assert probs.dtype == torch.float32
        torch.testing.assert_close(probs, processed_probs(logits.float(), batch), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_greedy_rows_in_16_bits_choose_as_in_32(dtype: torch.dtype, make_batch: Any) -> None:
    negative_nan = torch.tensor(-64, dtype=torch.int16).view(dtype)
    logits = random_logits(14, 300, scale=4.0).to(dtype)
    logits[1] = -logits[1].abs() - 1  # no positive one
    logits[2] = -1.0
    logits[2, 40], logits[2, 20] = 0.0, -0.0  # equals: the lower id
    logits[3, 100:102] = logits[3].amax()
    logits[4, 7], logits[5, 7] = torch.nan, negative_nan
    logits[6] = -logits[6].abs() - 1
    logits[6, 9] = negative_nan
    logits[7, 5], logits[8, 5] = torch.inf, -torch.inf
    logits[9] = -torch.inf
    logits[10, 3:] = -torch.inf
    logits[11] = torch.nan
    assert logits[5].isnan().any() and logits[6].isnan().any()
    batch = make_batch([GREEDY] * len(logits))
    before = logits.clone()
    for rows in (slice(0, 14), slice(5, 6), slice(12, 14)):
        found, wide = (sample(x[rows], batch.select(np.arange(14)[rows])) for x in (logits, logits.float()))
        assert found.to_host() == wide.to_host()
        torch.testing.assert_close(found.best, wide.best, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(logits.view(torch.int16), before.view(torch.int16)), "logits were changed"
    _, faults = sample(logits, batch).to_host()
    assert faults.keys() == {4, 5, 6, 7, 9, 11}


def test_weights_are_as_precise_as_float32_softmax(make_batch: Any) -> None:
    logits = random_logits(8, 5000, scale=4.0)
    probs = processed_probs(logits, make_batch([SamplingParams(temperature=0.7)] * 8))
    exact = (logits.double() / 0.7).softmax(-1)
    common = exact > 1e-8
    assert ((probs.double() / exact)[common] - 1).abs().max() < 1e-4
    assert (probs.double() - exact).abs().max() < 1e-6
