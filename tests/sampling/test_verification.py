"""Speculation changes the speed and not the distribution, whatever is proposed; biased rules would be noticed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from hotswap.core.execution import verification
from hotswap.core.execution.sampling import processed_probs, sample
from hotswap.core.execution.sampling_table import SamplingBatch, SamplingTable
from hotswap.core.execution.verification import Verified, verify
from hotswap.core.request import SamplingParams

VOCAB = 6
DRAWS = 6000
Verify = Callable[..., Verified]

SETTINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=4),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.2),
    SamplingParams(typical_p=0.6),
    SamplingParams(temperature=1.5, top_k=5, top_p=0.9, min_p=0.05),
]


def model(seed: int = 1) -> torch.Tensor:
    """[V + 1, V]: logits after each token; the last row is those after the prompt."""
    return 1.3 * torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(seed))


CHOSEN = [int(model()[VOCAB].argmax()), int(model()[model()[VOCAB].argmax()].argmax())]


def batch_of(params: SamplingParams, rows: int, length: int, first_seed: int = 0) -> SamplingBatch:
    """Rows of ``length`` logits at positions 10, 11, … ; each row has a seed of its own."""
    table = SamplingTable()
    for row in range(rows):
        table.add(str(row), params, first_seed + row)
    names = [str(row) for row in range(rows) for _ in range(length)]
    return table.batch(names, np.tile(np.arange(10, 10 + length), rows))


def two_step_counts(verify: Verify, params: SamplingParams, q: torch.Tensor | None, draws: int = DRAWS) -> Any:
    """Counts of (first, second) token of ``draws`` rows with two drafts each, of the rows that kept two or more, and
    of the first token of all. Drafts are sampled from ``q`` [2, V], or always (2, 3)."""
    logits = model()
    rng = np.random.default_rng(5)
    if q is None:
        drafts = np.tile(CHOSEN, (draws, 1))
    else:
        drafts = np.stack(
            [rng.choice(VOCAB, draws, p=row.double().numpy() / row.double().sum().item()) for row in q], 1
        )
    flat = torch.stack([logits[VOCAB].expand(draws, -1), logits[drafts[:, 0]], logits[drafts[:, 1]]], 1).flatten(0, 1)
    probs = None if q is None else [q] * draws
    result = verify(flat, batch_of(params, draws, 3), drafts.tolist(), probs)
    first = np.bincount([kept[0] for kept in result.kept], minlength=VOCAB)
    second = np.zeros((VOCAB, VOCAB))
    for kept in result.kept:
        if len(kept) > 1:
            second[kept[0], kept[1]] += 1
    return first, second


def p_value(counts: Any, probs: Any) -> float:
    probs = np.asarray(probs, dtype=np.float64)
    if counts[probs == 0].any():
        return 0.0
    used = probs * counts.sum() >= 1
    if used.sum() < 2:
        return 1.0
    expected = probs[used] / probs[used].sum() * counts[used].sum()
    return float(stats.chisquare(counts[used], expected).pvalue)


def distribution_p(verify: Verify, params: SamplingParams, q: torch.Tensor | None) -> float:
    """The smallest p-value over the first token's distribution and the second's after each first that was a draft."""
    first, second = two_step_counts(verify, params, q)
    batch = batch_of(params, 1, 1)
    target = torch.stack([processed_probs(row[None], batch)[0] for row in model()]).numpy()
    values = [p_value(first, target[VOCAB])]
    values += [p_value(second[token], target[token]) for token in range(VOCAB) if second[token].sum() >= 100]
    return min(values)


PROPOSALS = {
    "chosen": None,
    "near": torch.softmax(model()[[VOCAB, CHOSEN[0]]] * 0.7, -1),
    "uniform": torch.full((2, VOCAB), 1 / VOCAB),
    "opposite": torch.softmax(-2 * model()[[VOCAB, CHOSEN[0]]], -1),
    "partial": torch.tensor([[0.5, 0.5, 0, 0, 0, 0], [0, 0, 0.2, 0.8, 0, 0]]),
}


@pytest.mark.parametrize("proposal", PROPOSALS)
@pytest.mark.parametrize(
    "params", SETTINGS, ids=lambda p: f"{p.temperature}-{p.top_k}-{p.top_p}-{p.min_p}-{p.typical_p}"
)
def test_kept_tokens_follow_the_processed_distribution(params: SamplingParams, proposal: str) -> None:
    assert distribution_p(verify, params, PROPOSALS[proposal]) > 1e-4


def test_each_frequency_of_a_four_token_vocabulary_is_within_three_sigma() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    draws = 20_000
    drafts = np.random.default_rng(0).choice(4, draws, p=q.double().numpy() / q.double().sum().item())
    flat = p.log().expand(2 * draws, -1)
    result = verify(flat, batch_of(SamplingParams(), draws, 2), drafts[:, None].tolist(), [q[None]] * draws)
    counts = np.bincount([kept[0] for kept in result.kept], minlength=4)
    sigma = np.sqrt(draws * p.numpy() * (1 - p.numpy()))
    assert (np.abs(counts - draws * p.numpy()) < 3 * sigma).all()
    accepted = np.mean(result.accepted)
    assert abs(accepted - torch.minimum(p, q).sum().item()) < 0.02, "the acceptance rate is that of the theory"


def biased(accept: Callable[[Any, Any, Any, Any], bool], resample_from_p: bool = False) -> Verify:
    """A verifier with a wrong rule, of the kinds that were shipped by others."""

    def verify_biased(logits: torch.Tensor, batch: SamplingBatch, drafts: Any, probs: Any) -> Verified:
        p = processed_probs(logits, batch).double().numpy()
        rng = np.random.default_rng(0)
        kept: list[list[int]] = []
        for row, tokens in enumerate(drafts):
            q = np.full((len(tokens), VOCAB), 1e-9) if probs is None else probs[row].double().numpy()
            out: list[int] = []
            for i, token in enumerate(tokens):
                target = p[3 * row + i]
                if not accept(target, q[i], token, rng.random()):
                    left = target if resample_from_p else np.maximum(target - q[i], 0)
                    out.append(int(rng.choice(VOCAB, p=left / left.sum())))
                    break
                out.append(token)
            else:
                out.append(int(rng.choice(VOCAB, p=p[3 * row + 2] / p[3 * row + 2].sum())))
            kept.append(out)
        return Verified(kept, [len(out) - 1 for out in kept], {})

    return verify_biased


@pytest.mark.parametrize(
    ("rule", "proposal"),
    [
        (biased(lambda p, q, x, u: x == p.argmax()), "near"),
        (biased(lambda p, q, x, u: u * q[x] < p[x], resample_from_p=True), "near"),
        (biased(lambda p, q, x, u: u < p[x]), "near"),
        (biased(lambda p, q, x, u: x == p.argmax(), resample_from_p=True), "chosen"),
        (biased(lambda p, q, x, u: u < 0.5, resample_from_p=True), "uniform"),
    ],
    ids=["only-argmax", "resample-from-p", "ignore-q", "chosen-only-argmax", "coin"],
)
def test_a_planted_bias_is_detected(rule: Verify, proposal: str) -> None:
    assert distribution_p(rule, SamplingParams(), PROPOSALS[proposal]) < 1e-6


def test_a_right_verifier_written_plainly_passes_the_same_test() -> None:
    plain = biased(lambda p, q, x, u: u * q[x] < p[x])
    assert distribution_p(plain, SamplingParams(), PROPOSALS["near"]) > 1e-4


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.7, top_k=5)]
)
def test_chosen_drafts_leave_a_seeded_text_as_it_is_without_them(params: SamplingParams) -> None:
    logits = model(4)

    def generate(length: int, propose: Callable[[list[int]], list[int]] | None) -> tuple[list[int], int]:
        tokens, steps = [VOCAB], 0
        while len(tokens) <= length:
            drafts = propose(tokens) if propose else []
            context = [tokens[-1], *drafts]
            table = SamplingTable()
            table.add("r", params, 99)
            batch = table.batch(["r"] * len(context), np.arange(len(tokens), len(tokens) + len(context)))
            tokens += verify(logits[context], batch, [drafts]).kept[0]
            steps += 1
        return tokens[1 : length + 1], steps

    plain, _ = generate(60, None)
    oracle, steps = generate(60, lambda tokens: plain[len(tokens) - 1 : len(tokens) + 3])
    assert oracle == plain
    assert steps < 20
    assert generate(60, lambda tokens: [1, 2, 3])[0] == plain
    assert generate(60, lambda tokens: [plain[len(tokens) - 1], 5] if len(tokens) <= 60 else [])[0] == plain


def test_greedy_rows_compare_with_the_largest_logit_even_where_probabilities_come_along() -> None:
    logits = torch.eye(VOCAB)[[1, 2, 3, 4]]
    params = SamplingParams(temperature=0.0)
    q = torch.full((3, VOCAB), 1 / VOCAB)
    for probs in (None, [q]):
        assert verify(logits, batch_of(params, 1, 4), [[1, 2, 3]], probs) == ([[1, 2, 3, 4]], [3], {}, 0)
        assert verify(logits, batch_of(params, 1, 4), [[1, 5, 3]], probs) == ([[1, 2]], [1], {}, 0)


def test_rows_of_different_lengths_and_kinds_share_a_batch_without_touching_each_other() -> None:
    rng = np.random.default_rng(2)
    kinds = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.8), SamplingParams(top_k=2)]
    lengths = [0, 3, 1, 2, 0, 4, 2, 1]
    table = SamplingTable()
    for row in range(len(lengths)):
        table.add(str(row), kinds[row % 4], row)
    drafts = [rng.integers(0, VOCAB, length).tolist() for length in lengths]
    probs = [torch.softmax(torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(n)), -1) if r % 3 else None
             for r, n in enumerate(lengths)]  # fmt: skip
    logits = [torch.randn(n + 1, VOCAB, generator=torch.Generator().manual_seed(50 + r)) for r, n in enumerate(lengths)]

    def batch(rows: list[int]) -> SamplingBatch:
        return table.batch(
            [str(row) for row in rows for _ in range(lengths[row] + 1)],
            np.concatenate([np.arange(7, 8 + lengths[row]) for row in rows]),
        )

    together = verify(torch.cat(logits), batch(list(range(8))), drafts, probs)
    for row in range(8):
        alone = verify(logits[row], batch([row]), [drafts[row]], [probs[row]])
        assert alone.kept[0] == together.kept[row]
        assert alone.accepted[0] == together.accepted[row] == len(together.kept[row]) - 1


def test_verification_changes_none_of_its_inputs() -> None:
    q = PROPOSALS["near"].clone()
    logits = torch.randn(30, VOCAB)
    drafts = [[1, 2]] * 10
    before = [logits.clone(), q.clone(), [list(row) for row in drafts]]
    verify(logits, batch_of(SamplingParams(top_p=0.9), 10, 3), drafts, [q] * 10)
    assert torch.equal(logits, before[0])
    assert torch.equal(q, before[1])
    assert drafts == before[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_draft_probabilities_of_other_precision_are_refused(dtype: torch.dtype) -> None:
    q = PROPOSALS["near"].to(dtype)
    with pytest.raises(ValueError, match=rf"{dtype}, expected \[2, 6\] torch.float32"):
        verify(torch.zeros(3, VOCAB), batch_of(SamplingParams(), 1, 3), [[1, 2]], [q])


def test_draft_probabilities_or_logits_of_the_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\[2, 5\]"):
        verify(torch.zeros(3, VOCAB), batch_of(SamplingParams(), 1, 3), [[1, 2]], [torch.full((2, 5), 0.2)])
    with pytest.raises(ValueError, match="2 drafts of 1 rows need 3 rows of logits, got 4"):
        verify(torch.zeros(4, VOCAB), batch_of(SamplingParams(), 1, 4), [[1, 2]])


@pytest.mark.parametrize("broken", ["nan", "zeros", "unnormalised", "negative", "excludes the draft"])
def test_probabilities_that_are_none_cannot_shift_the_distribution(broken: str) -> None:
    q = PROPOSALS["near"].clone()
    honest = q.clone()
    if broken == "nan":
        q[:, 1] = torch.nan
    elif broken == "zeros":
        q[:] = 0
    elif broken == "unnormalised":
        q *= 1.5
    elif broken == "negative":
        q[:, 0], q[:, 1] = -0.5, q[:, 1] + q[:, 0] + 0.5
    else:
        q[[0, 1], CHOSEN] = 0
        q /= q.sum(-1, keepdim=True)

    def lying(logits: Any, batch: Any, drafts: Any, probs: Any) -> Verified:
        return verify(logits, batch, drafts, [q] * len(drafts))

    proposal = None if broken == "excludes the draft" else honest
    assert distribution_p(lying, SamplingParams(), proposal) > 1e-4


def test_a_draft_beyond_the_vocabulary_is_never_kept() -> None:
    q = PROPOSALS["uniform"]
    for probs in (None, [q]):
        result = verify(torch.zeros(3, VOCAB), batch_of(SamplingParams(), 1, 3), [[VOCAB, -1]], probs)
        assert result.accepted == [0]
        assert 0 <= result.kept[0][0] < VOCAB


def test_a_fault_ends_its_row_only_where_it_is_reached() -> None:
    logits = torch.eye(VOCAB)[[1, 2, 3, 1, 2, 3, 1, 2, 3]]
    logits[1, 4] = torch.nan  # row 0: reached, after its first draft
    logits[5, :] = -torch.inf  # row 1: not reached, its first draft is rejected
    params = SamplingParams(temperature=0.0)
    result = verify(logits, batch_of(params, 3, 3), [[1, 2], [5, 2], [1, 2]])
    assert result.kept == [[1], [1], [1, 2, 3]]
    assert result.accepted == [1, 0, 2]
    assert list(result.errors) == [0]
    assert "NaN" in result.errors[0]


def test_slices_do_not_change_a_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, batch = torch.randn(90, VOCAB), batch_of(SamplingParams(), 30, 3)
    drafts = np.random.default_rng(1).integers(0, VOCAB, (30, 2)).tolist()
    probs: list[torch.Tensor | None] = [PROPOSALS["uniform"]] * 30
    whole = verify(logits, batch, drafts, probs)
    monkeypatch.setattr(verification, "_SLICE_ELEMENTS", 5 * VOCAB)
    assert verify(logits, batch, drafts, probs) == whole
    assert 0 < sum(whole.accepted) < 60
    assert verify(logits, batch, drafts).kept != whole.kept


def test_without_drafts_verifying_is_sampling() -> None:
    logits, batch = torch.randn(40, VOCAB), batch_of(SamplingParams(), 40, 1)
    result = verify(logits, batch, [[] for _ in range(40)])
    assert [kept[0] for kept in result.kept] == sample(logits, batch).tokens.tolist()
