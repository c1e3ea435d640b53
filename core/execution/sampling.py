"""Chooses a token for each row of logits.

A row's logits become integer weights, filters set some of them to zero, and one uniform number of the row's own picks
along their running sum. Filters apply in the order of transformers' generation: temperature, top-k, top-p (Holtzman et
al., 2020), min-p (Nguyen et al., 2024), typical (Meister et al., 2023). Where tokens are equally good the lower id is
kept, so that ``top_k=1`` and a tiny ``top_p`` are greedy decoding.

Why integers: their sums are exact, so that a row's token depends neither on its neighbours nor on how a device
associates a sum, the running sum never falls, and a token of weight zero can never be picked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, log
from typing import Any

import numpy as np
import torch

from hotswap.core.execution.greedy import most_probable
from hotswap.core.execution.randomness import Array, Stream, uniforms
from hotswap.core.execution.selecting import best_of, pick
from hotswap.core.request import SamplingParams

_ONE = 2.0**40
"""The best token's weight. What is 2**40 times less probable weighs nothing, and 2**22 weights add up in an int64."""

_SLICE_ELEMENTS = {"cpu": 1 << 19}
_SLICE_ELEMENTS_ELSEWHERE = 1 << 23
"""Most logits that are processed at a time, each taking about 30 bytes on the way: what a CPU's cache holds, and what
an accelerator's memory spares."""

_WIDTHS = (128, 2048)
"""How many of a row's best tokens are tried before all are sorted: sorting 50,000 takes 50 times as long on a CPU."""

_LARGEST_K = 1 << 31
"""No vocabulary is as large, and a client's number may be too large for any float."""

_COLUMNS = np.dtype([
    ("parameters", np.float64, (5,)), ("seed", np.uint64), ("greedy", np.bool_), ("filtered", np.bool_),
])  # fmt: skip


@dataclass(frozen=True)
class _Group:
    """Rows of a batch that take the same path. ``rows`` [n] int64, rising; ``parameters`` [n, 5] float64, infinity
    being top-k, top-p or typical turned off; ``filtered``: top-k or top-p is on; ``uses_mass``: top-k is not."""

    rows: torch.Tensor
    parameters: torch.Tensor
    filtered: bool
    cuts_min_p: bool
    cuts_typical: bool
    uses_mass: bool
    largest_k: int

    @property
    def temperature(self) -> torch.Tensor:
        return self.parameters[:, 0:1]

    @property
    def top_k(self) -> torch.Tensor:
        return self.parameters[:, 1:2]

    @property
    def top_p(self) -> torch.Tensor:
        return self.parameters[:, 2:3]

    @property
    def least_weight(self) -> torch.Tensor:
        """Min-p, as a whole number of a weight."""
        return (self.parameters[:, 3:4] * _ONE).ceil()

    @property
    def typical_p(self) -> torch.Tensor:
        return self.parameters[:, 4:5]

    def take(self, index: torch.Tensor) -> "_Group":
        """The rows at ``index`` of this group."""
        return replace(self, rows=self.rows[index], parameters=self.parameters[index])


@dataclass(frozen=True)
class SamplingBatch:
    """How each of N rows of logits is sampled: made by :meth:`SamplingTable.batch`.

    ``positions`` [N]: the index in its sequence of the token that each row chooses.
    """

    positions: Array
    columns: Array = field(repr=False)
    groups: tuple[_Group, ...] = field(repr=False)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def greedy(self) -> Array:
        """[N] bool."""
        result: Array = self.columns["greedy"]
        return result

    @property
    def has_greedy(self) -> bool:
        """Whether any is: those that are not lie in groups."""
        return sum(len(group.rows) for group in self.groups) < len(self)

    def uniforms(self, stream: Stream) -> Array:
        return uniforms(self.columns["seed"], self.positions, stream)

    def select(self, rows: Array) -> "SamplingBatch":
        """The batch of these rows alone."""
        columns = self.columns[rows]
        device = self.groups[0].rows.device if self.groups else torch.device("cpu")
        return SamplingBatch(self.positions[rows], columns, _group(columns, device))


class SamplingTable:
    """The sampling parameters of the worker's requests, as columns, so that a step's batch is one gather.

    The last batch's groups are kept: a decode step of the same rows as before costs only its positions.
    """

    def __init__(self, device: "torch.device | str" = "cpu") -> None:
        self._device = torch.device(device)
        self._columns = np.zeros(64, dtype=_COLUMNS)
        self._slots: dict[str, int] = {}
        self._free = list(range(len(self._columns)))
        self._last: tuple[tuple[str, ...], Array, tuple[_Group, ...]] | None = None

    def add(self, request: str, params: SamplingParams, seed: int) -> None:
        """A request arrives, or arrives again with other parameters."""
        slot = self._slots.get(request)
        if slot is None:
            slot = self._slots[request] = self._free.pop() if self._free else self._grow()
        self._columns[slot] = _record(params, seed)
        self._last = None

    def _grow(self) -> int:
        size = len(self._columns)
        self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
        self._free.extend(range(size + 1, 2 * size))
        return size

    def remove(self, request: str) -> None:
        """The request is gone. Unknown names are ignored."""
        slot = self._slots.pop(request, None)
        if slot is not None:
            self._free.append(slot)
            self._last = None

    def batch(self, requests: Sequence[str], positions: "Array | Sequence[int]") -> SamplingBatch:
        """One entry of each a row of logits; a request that verifies k drafts has k + 1 rows, positions rising."""
        names = tuple(requests)
        if self._last is None or self._last[0] != names:
            columns = self._columns[[self._slots[name] for name in names]]
            self._last = names, columns, _group(columns, self._device)
        return SamplingBatch(np.asarray(positions, dtype=np.int64), *self._last[1:])


def _record(params: SamplingParams, seed: int) -> tuple[Any, ...]:
    # Off is infinity: the running sum of a filter that is off stays below its limit whatever the rounding.
    top_k = float(min(params.top_k, _LARGEST_K)) if params.top_k > 0 else inf
    top_p, typical_p = (p if p < 1.0 else inf for p in (params.top_p, params.typical_p))
    parameters = (params.temperature, top_k, top_p, params.min_p, typical_p)
    return parameters, seed % 2**64, params.greedy, min(top_k, top_p) < inf


def _group(columns: Array, device: torch.device) -> tuple[_Group, ...]:
    """The rows that are not greedy: without filters that need the best tokens first, and with them; of these, whether
    the mass of all tokens has to be known."""
    groups = []
    without_top_k = columns["parameters"][:, 1] == inf
    for filtered, uses_mass in ((False, True), (True, False), (True, True)):
        alike = (columns["filtered"] == filtered) & ((without_top_k == uses_mass) | (not filtered))
        rows = np.flatnonzero(~columns["greedy"] & alike)
        if not len(rows):
            continue
        parameters = columns["parameters"][rows]
        top_k, min_p, typical_p = parameters[:, 1], parameters[:, 3], parameters[:, 4]
        groups.append(_Group(
            rows=torch.from_numpy(rows).to(device),
            parameters=torch.from_numpy(parameters).to(device),
            filtered=filtered,
            cuts_min_p=bool((min_p > 0).any()),
            cuts_typical=bool((typical_p < inf).any()),
            uses_mass=uses_mass,
            largest_k=int(top_k[top_k < inf].max(initial=0)),
        ))  # fmt: skip
    return tuple(groups)


@dataclass(frozen=True)
class Sampled:
    """``tokens`` [N] int64 and ``best`` [N] float32, the rows' largest logits, on the logits' device.

    A row whose ``best`` is not finite is faulty: its token is 0, which keeps an embedding look-up in bounds and means
    nothing. :meth:`to_host` tells such rows apart; their token must not be kept.
    """

    tokens: torch.Tensor
    best: torch.Tensor

    def to_host(self) -> tuple[list[int], dict[int, str]]:
        """Tokens, and what is wrong by row. Waits for the device."""
        best = self.best.cpu().numpy()
        sound = np.isfinite(best)
        faulty = () if sound.all() else np.flatnonzero(~sound).tolist()
        return self.tokens.tolist(), {row: _fault(float(best[row])) for row in faulty}


NO_TOKEN_LEFT = (
    "no token is left to choose: allowed_token_ids, bad_words, min_tokens and other processors exclude all; allow more "
    "tokens"
)
"""The fault of a row whose logits are -inf throughout."""


def _fault(best: float) -> str:
    if best == -inf:
        return NO_TOKEN_LEFT
    return "the model's logits hold NaN or infinity; the checkpoint, its dtype or a kernel is at fault"


@dataclass(frozen=True)
class _Candidates:
    """Integer weights [n, K] of what the filters left; ``ids`` [n, K] names the tokens, None: all, in order."""

    weights: torch.Tensor
    ids: torch.Tensor | None

    def pick(self, draws: torch.Tensor) -> torch.Tensor:
        """[n] int64, by inverse transform of ``draws`` [n] float64 in [0, 1)."""
        picks = pick(self.weights, draws)
        return picks if self.ids is None else self.ids.gather(1, picks[:, None]).squeeze(1)

    def probs(self, vocab_size: int) -> torch.Tensor:
        """[n, V] float32."""
        probs = (self.weights / self.weights.sum(-1, keepdim=True).double()).float()
        if self.ids is None:
            return probs
        return probs.new_zeros(len(probs), vocab_size).scatter_(1, self.ids, probs)


def sample(logits: torch.Tensor, batch: SamplingBatch, stream: Stream = Stream.SAMPLE) -> Sampled:
    """A token for each row of ``logits`` [N, V], of any floating dtype, which is not changed. ``stream``: what the
    draws are for.

    Greedy rows take the largest logit, the lowest id among equals. The others depend on their logits, parameters, seed
    and position only. Rows with NaN or +inf, or with -inf throughout, are faults of their own.
    """
    if batch.has_greedy:
        tokens, best = most_probable(logits)
    else:
        best = logits.amax(-1).float()
        tokens = torch.zeros_like(best, dtype=torch.int64)
    if batch.groups:
        draws = torch.from_numpy(batch.uniforms(stream)).to(logits.device)
        for rows, candidates in _candidates(logits, best, batch):
            tokens[rows] = candidates.pick(draws[rows])
    return Sampled(_without_faults(tokens, best), best)


def _without_faults(tokens: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
    """``tokens``, which may be changed, with 0 where ``best`` is not finite. On a CPU that is seen by numpy: see
    :func:`most_probable`."""
    if not best.is_cpu:
        return torch.where(best.isfinite(), tokens, 0)
    if not (sound := np.isfinite(best.numpy())).all():
        tokens.numpy()[~sound] = 0
    return tokens


def processed_probs(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The distributions [N, V] float32 that :func:`sample` draws from; greedy rows are certain of one token.

    Faulty rows hold NaN.
    """
    probs = torch.zeros_like(logits, dtype=torch.float32)
    tokens, best = most_probable(logits)
    if batch.has_greedy:
        probs.scatter_(1, tokens[:, None], 1.0)
    for rows, candidates in _candidates(logits, best, batch):
        probs[rows] = candidates.probs(logits.shape[1])
    return probs.masked_fill_(~best.isfinite()[:, None], torch.nan)


def as_weights(probs: torch.Tensor) -> torch.Tensor:
    """int64 weights for :func:`pick` from non-negative ``probs`` [n, V] of any scale."""
    return (probs * (_ONE / probs.amax(-1, keepdim=True).clamp_min(torch.finfo(probs.dtype).tiny))).long()


def _candidates(
    logits: torch.Tensor, best: torch.Tensor, batch: SamplingBatch
) -> Iterator[tuple[torch.Tensor, _Candidates]]:
    """(rows, their candidates) of all rows that are not greedy, in slices of bounded memory."""
    most = max(1, _SLICE_ELEMENTS.get(logits.device.type, _SLICE_ELEMENTS_ELSEWHERE) // logits.shape[1])
    for group in batch.groups:
        for index in torch.split(torch.arange(len(group.rows), device=logits.device), most):
            part = group if len(index) == len(group.rows) else group.take(index)
            rows = _together(part.rows)
            x, top = logits[rows].float(), best[rows]
            if part.filtered:
                yield from _filtered(x, top[:, None], part)
            else:
                weights = _weights(x, top[:, None], part, part.cuts_min_p)
                yield part.rows, _Candidates(_cut_typical(weights, part) if part.cuts_typical else weights, None)


def _together(rows: torch.Tensor) -> "torch.Tensor | slice":
    """``rows``, as a slice where they are neighbours, which is not copied. On an accelerator the host would have to
    wait to see that."""
    if rows.device.type != "cpu" or int(rows[-1]) - int(rows[0]) != len(rows) - 1:
        return rows
    return slice(int(rows[0]), int(rows[-1]) + 1)


def _weights(x: torch.Tensor, top: torch.Tensor, group: _Group, cut_min_p: bool = False) -> torch.Tensor:
    """Logits [n, K], the row's best being ``top`` [n, 1] -> int64 in [0, 2**40] in proportion to probability; what
    min-p leaves, where it comes first.

    The best is taken away before the division, so that no temperature can overflow.
    """
    scale = (1.0 / (group.temperature * log(2.0))).to(x.dtype)
    weights = _exp2_((x - top).mul_(scale)).mul_(_ONE)
    if cut_min_p:
        # Kept is what exceeds the last float32 below the least weight. Operators on bool and int64 take a multiple.
        least = group.least_weight
        nearest = least.to(x.dtype)
        below = torch.where(nearest >= least, torch.nextafter(nearest, torch.full_like(nearest, -inf)), nearest)
        weights.mul_((weights - below).sign_().clamp_(min=0))
    return weights.long()


def _exp2_(x: torch.Tensor) -> torch.Tensor:
    """In place. torch's exp2 on a CPU rounds the last few elements of a tensor, or of a thread's part of it, otherwise
    than the rest, which would make a row's weights depend on the rows beside it; numpy's does not."""
    if x.device.type == "cpu":
        np.exp2(x.numpy(), out=x.numpy())
        return x
    return x.exp2_()


def _surprisal(probs: torch.Tensor) -> torch.Tensor:
    """-log of float64 ``probs``, infinite where they are zero. numpy's on a CPU, for the same reason."""
    if probs.device.type == "cpu":
        with np.errstate(divide="ignore", invalid="ignore"):
            return torch.from_numpy(-np.log(probs.numpy()))
    return -probs.log()


def _filtered(x: torch.Tensor, top: torch.Tensor, group: _Group) -> Iterator[tuple[torch.Tensor, _Candidates]]:
    """Rows with top-k or top-p: best tokens first, as many as it takes.

    A row is done when what top-k and top-p leave of it ends strictly above the worst token tried: then no token beyond
    those tried, and no equal of the last one kept, can matter.
    """
    # Integers even where it is not used: floats would make the sums that stand in for it inexact.
    mass = torch.zeros_like(top, dtype=torch.int64)
    if group.uses_mass:
        mass = _weights(x, top, group).sum(-1, keepdim=True)
    # An accelerator sorts everything at once: looking which rows are done would make the host wait.
    for width in _WIDTHS if x.device.type == "cpu" else ():
        width = max(width, group.largest_k + 1)
        if width >= x.shape[1]:
            break
        values, ids = best_of(x, width)
        weights = _cut_top(_weights(values, top, group), mass, group)
        last_kept = (weights > 0).sum(-1, keepdim=True).sub_(1).clamp_min_(0)
        done = (values.gather(1, last_kept) > values[:, -1:]).squeeze(1)
        found, left = done.nonzero().squeeze(1), (~done).nonzero().squeeze(1)
        if len(found):
            part = group.take(found)
            yield part.rows, _Candidates(_cut_rest(weights[found], part), ids[found])
        if not len(left):
            return
        x, top, mass, group = x[left], top[left], mass[left], group.take(left)
    values, ids = best_of(x, x.shape[1])
    weights = _cut_top(_weights(values, top, group), None, group)
    yield group.rows, _Candidates(_cut_rest(weights, group), ids)


def _cut_top(weights: torch.Tensor, mass: torch.Tensor | None, group: _Group) -> torch.Tensor:
    """Top-k, then top-p of what it left: the smallest set that holds ``top_p`` of the mass. ``mass`` [n, 1] is that of
    the row before top-k; None: ``weights`` [n, K], best first, hold all of it. Changes ``weights``."""
    rank = torch.arange(weights.shape[1], device=weights.device)
    weights.masked_fill_(rank >= group.top_k, 0)
    sums = weights.cumsum(-1)
    left = sums[:, -1:] if mass is None else torch.where(group.top_k < inf, sums[:, -1:], mass)
    return weights.masked_fill_((sums - weights) >= group.top_p * left, 0)


def _cut_rest(weights: torch.Tensor, group: _Group) -> torch.Tensor:
    """Min-p, then typical. Changes ``weights``."""
    if group.cuts_min_p:
        weights.mul_(weights >= group.least_weight.long())  # masked_fill_ has a branch per token
    return _cut_typical(weights, group) if group.cuts_typical else weights


def _cut_typical(weights: torch.Tensor, group: _Group) -> torch.Tensor:
    """The smallest set that holds ``typical_p`` of the mass, of the tokens whose surprisal is nearest the entropy."""
    mass = weights.sum(-1, keepdim=True)
    probs = weights / mass.double()
    surprisal = _surprisal(probs)
    # In fixed point, for the sake of the exact sum.
    entropy = (probs * surprisal).nan_to_num_(0.0).mul_(_ONE).long().sum(-1, keepdim=True) / _ONE
    distance = (surprisal - entropy).abs()
    order = torch.sort(distance, dim=-1, stable=True).indices
    ordered = weights.gather(1, order)
    ordered.masked_fill_((ordered.cumsum(-1) - ordered) >= group.typical_p * mass, 0)
    return weights.scatter_(1, order, ordered)
