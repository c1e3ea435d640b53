"""Decides which drafts to keep, such that speculation changes the speed and not the distribution.

Drafts that were chosen (a copied n-gram, the draft model's best) are compared with the token that plain sampling draws
at their position: each is kept with the probability that the target gives it, and a seeded request gets the very tokens
that it would have got without drafts. Drafts that were sampled, and come with their probabilities q, are kept with
min(1, p / q) and otherwise replaced by a draw from norm(max(p - q, 0)), the rejection sampling of Leviathan et al.,
"Fast Inference from Transformers via Speculative Decoding", and Chen et al., "Accelerating Large Language Model
Decoding with Speculative Sampling" (both 2023). In both p is the processed distribution: after processors, temperature
and filters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hotswap.core.execution.race import winners_of_rows
from hotswap.core.execution.randomness import Array, Stream
from hotswap.core.execution.sampling import processed_probs, sample
from hotswap.core.execution.sampling_table import SamplingBatch

_SLICE_ELEMENTS = 1 << 22
"""Most draft probabilities that are weighed at a time; each takes about 40 bytes on the way."""

_SUM_TOLERANCE = 1e-3


class Verified(NamedTuple):
    """By row: the tokens kept (``accepted`` drafts, then one of the target's own), and what is wrong with faulty rows.

    A faulty row keeps the tokens before its fault, and nothing of the target's own after them. ``distrusted`` counts
    the drafts whose probabilities were no distribution, or excluded them.
    """

    kept: list[list[int]]
    accepted: list[int]
    errors: dict[int, str]
    distrusted: int = 0


def verify(
    logits: torch.Tensor,
    batch: SamplingBatch,
    drafts: Sequence[Sequence[int]],
    probs: Sequence[torch.Tensor | None] | None = None,
) -> Verified:
    """Row r has k_r ``drafts`` and k_r + 1 rows of ``logits`` [sum(k + 1), V], in order; ``batch`` too. Their dtype: as
    for :func:`sample`.

    The i-th of a row's logits are the target's after its first i drafts, and hence the caller has applied the logits
    processors to them with ``LogitsRow.drafts`` set to those. ``probs[r]`` [k_r, V] float32 is what row r's drafts were
    sampled from, None where they were chosen. No input is changed.

    Probabilities that are no distribution, or exclude the draft they belong to, are not trusted: that draft is compared
    like a chosen one, which is exact for any proposal. A wrong shape or dtype is a ValueError.
    """
    lengths = [len(row) for row in drafts]
    starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64) + 1)])
    if not starts[-1] == len(logits) == len(batch):
        raise ValueError(
            f"{sum(lengths)} drafts of {len(lengths)} rows need {starts[-1]} rows of logits, got {len(logits)} and a "
            f"batch of {len(batch)}"
        )
    sampled = sample(logits, batch)
    weighed, distrusted = _weigh(logits, batch, drafts, probs, starts, sampled.tokens)
    tokens, faults = sampled.to_host()
    keeps = [
        [token == draft for token, draft in zip(tokens[start : start + len(row)], row, strict=True)]
        for start, row in zip(starts, drafts, strict=False)
    ]
    for row, (accepts, replacements) in weighed.items():
        keeps[row] = accepts
        tokens[starts[row] : starts[row] + lengths[row]] = replacements
    return _cut(tokens, faults, drafts, keeps, starts)._replace(distrusted=distrusted)


def _cut(
    tokens: list[int],
    faults: dict[int, str],
    drafts: Sequence[Sequence[int]],
    keeps: Sequence[Sequence[bool]],
    starts: Array,
) -> Verified:
    """Each row ends at the first draft that is not kept, or at the first fault if that comes earlier."""
    verified = Verified([], [], {})
    for row, (start, kept) in enumerate(zip(starts.tolist(), keeps, strict=False)):
        reached = kept.index(False) if False in kept else len(kept)
        fault = next((i for i in range(reached + 1) if start + i in faults), None)
        if fault is None:
            verified.kept.append([*drafts[row][:reached], tokens[start + reached]])
        else:
            reached = fault
            verified.kept.append(list(drafts[row][:reached]))
            verified.errors[row] = faults[start + fault]
        verified.accepted.append(reached)
    return verified


def _weigh(
    logits: torch.Tensor,
    batch: SamplingBatch,
    drafts: Sequence[Sequence[int]],
    probs: Sequence[torch.Tensor | None] | None,
    starts: Array,
    plain: torch.Tensor,
) -> tuple[dict[int, tuple[list[bool], list[int]]], int]:
    """For each row whose drafts were sampled: which are accepted, and what replaces the others; and how many drafts
    came with probabilities that cannot be trusted."""
    greedy = batch.greedy
    rows = [row for row, q in enumerate(probs or ()) if q is not None and drafts[row] and not greedy[starts[row]]]
    result: dict[int, tuple[list[bool], list[int]]] = {}
    if not rows or probs is None:
        return result, 0
    lengths = np.array([len(drafts[row]) for row in rows])
    slices = np.cumsum(lengths * logits.shape[1]) // _SLICE_ELEMENTS
    pending = []
    for part in (np.flatnonzero(slices == number) for number in np.unique(slices)):
        chosen = [rows[i] for i in part]
        flat = np.concatenate([np.arange(starts[row], starts[row] + len(drafts[row])) for row in chosen])
        q = torch.cat([_checked(probs[row], row, len(drafts[row]), logits.shape[1]) for row in chosen])
        proposed = torch.tensor([token for row in chosen for token in drafts[row]], device=logits.device)
        index = torch.from_numpy(flat).to(logits.device)
        pending.append(_accept(logits[index], batch.select(flat), proposed, q.to(logits.device), plain[index]))
    accepts, replacements, trusted = torch.cat(pending, dim=1).tolist()
    ends = np.cumsum(lengths).tolist()
    for row, end in zip(rows, ends, strict=True):
        begin = end - len(drafts[row])
        result[row] = [bool(accept) for accept in accepts[begin:end]], replacements[begin:end]
    return result, len(trusted) - sum(trusted)


def _accept(
    logits: torch.Tensor, batch: SamplingBatch, drafts: torch.Tensor, q: torch.Tensor, plain: torch.Tensor
) -> torch.Tensor:
    """Rejection sampling of ``drafts`` [M], drawn from ``q`` [M, V]: [3, M] int64: accepted, the replacements, and
    whether ``q`` is trusted."""
    vocab_size = logits.shape[1]
    p = processed_probs(logits, batch)
    at = drafts.clamp(0, vocab_size - 1)[:, None]
    p_draft, q_draft = (x.gather(1, at).squeeze(1).double() for x in (p, q))
    trusted = ((q.sum(-1) - 1).abs() < _SUM_TOLERANCE) & (q.amin(-1) >= 0) & (q_draft > 0) & (at.squeeze(1) == drafts)
    accept_draws = torch.from_numpy(batch.uniforms(Stream.ACCEPT)).to(logits.device)
    residual_keys = torch.from_numpy(batch.keys(Stream.RESIDUAL)).to(logits.device)
    accepted = accept_draws * q_draft < p_draft
    residual = (p - q).clamp_min_(0)
    # Where q equals p nothing is left, and a rejection is rounding; p itself is then right.
    residual = torch.where(residual.amax(-1, keepdim=True) > 0, residual, p)
    replacements = winners_of_rows(residual, residual_keys)
    return torch.stack([
        torch.where(trusted, accepted, plain == drafts).long(),
        torch.where(trusted, replacements, plain),
        trusted.long(),
    ])  # fmt: skip


def _checked(q: torch.Tensor | None, row: int, length: int, vocab_size: int) -> torch.Tensor:
    if q is None or q.shape != (length, vocab_size) or q.dtype != torch.float32:
        given = "nothing" if q is None else f"{list(q.shape)} {q.dtype}"
        raise ValueError(
            f"draft probabilities of row {row} are {given}, expected [{length}, {vocab_size}] torch.float32: a ratio "
            "p / q of other precision or size shifts the distribution; let the speculator return float32"
        )
    return q
