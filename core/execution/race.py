"""Draws a token of each row by a race: the first one wins, and the time of each is a random number over its weight.

Where the random numbers are exponential a token wins with its share of the row's weight. (Taking logarithms of both
makes it the Gumbel-max trick.) A token's number is a function of the row's key and of the token's id, so that another
rounding of the weights, as another order of additions in a model brings it, changes the winner only where two tokens
are about as fast; of a running sum, by which one number picks, every rounding moves all that lies behind it.

Numbers for all of 50,000 tokens would cost more than what they are for. So tokens lie in blocks: the smallest number of
a block is drawn, and which token has it; how much larger each of the others is, which is as if nothing had been drawn
before, is only looked at in blocks that may hold the winner. (Maddison et al., "A* Sampling", 2014, go from the top
down in this way.) The numbers are those of SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators",
2014), which hashes a counter; a key is a row's own.
"""

from collections.abc import Callable

import numpy as np
import torch

_BLOCK_BITS, _APART_BITS = 5, 6
_CHUNK_BITS = _BLOCK_BITS + _APART_BITS

_BLOCK = 1 << _BLOCK_BITS
"""Tokens of a block."""

_APART = 1 << _APART_BITS
"""How far its ids lie apart: so that the best of neighbouring blocks are taken together."""

_CHUNK = 1 << _CHUNK_BITS
_BLOCKS_FROM = 1 << 40
"""Counters of blocks begin here, behind those of tokens."""

_STEP, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E37_79B9_7F4A_7C15, 0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB))
"""SplitMix64's, as torch's int64 has them."""

_SLACK = 1.0 + 2.0**-20
"""A weight's rounding need not rise with the logit to the last bit."""

Weigh = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [m], ids [m, K]) -> their weights [m, K] of any dtype, zero for ids beyond the vocabulary."""


def split_mix(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """64 random bits, int64, for each of ``counters``, which ``keys`` are broadcast to: SplitMix64's output number
    ``counters`` + 1 from the state ``keys``."""
    bits = (counters + 1).mul_(_STEP) + keys
    bits.bitwise_xor_((bits >> 30).bitwise_and_((1 << 34) - 1)).mul_(_FIRST)
    bits.bitwise_xor_((bits >> 27).bitwise_and_((1 << 37) - 1)).mul_(_SECOND)
    return bits.bitwise_xor_((bits >> 31).bitwise_and_((1 << 33) - 1))


def numbers(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Exponential random numbers, float64, each above zero, of ``ids`` [n, K] in rows with ``keys`` [n] int64."""
    keys = keys[:, None]
    least, whose = _least(keys, _block_of(ids))
    beyond = _exponentials(split_mix(keys, ids))
    return beyond.masked_fill_(whose == _place_of(ids), 0.0).add_(least)


def winners(weights: torch.Tensor, ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n] int64: of each row of ``ids`` [n, K] one, by ``weights`` [n, K] of any dtype; none of weight zero, unless all
    are."""
    return ids.gather(1, (weights / numbers(keys, ids)).argmax(-1, keepdim=True)).squeeze(1)


def winners_of_all(peaks: torch.Tensor, weigh: Weigh, keys: torch.Tensor) -> torch.Tensor:
    """[n] int64: as :func:`winners` of all tokens of each row, of which only those are weighed that may win. ``peaks``
    [n, B]: the largest weight of each block, or more; see :func:`block_peaks`."""
    rows = torch.arange(len(peaks), device=peaks.device)
    least, _ = _least(keys[:, None], torch.arange(peaks.shape[1], device=peaks.device)[None])
    bounds = peaks.double().mul_(_SLACK).div_(least)
    speeds, tokens = _fastest(weigh, rows, bounds.argmax(-1), keys)
    rows, blocks = (bounds > speeds[:, None]).nonzero(as_tuple=True)
    if len(rows):
        found, ids = _fastest(weigh, rows, blocks, keys[rows])
        fastest = speeds.scatter_reduce(0, rows, found, "amax")
        won = (found == fastest[rows]) & (found > speeds[rows])
        tokens[rows[won]] = ids[won]
    return tokens


def winners_of_rows(weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[n] int64: as :func:`winners`, of all columns of ``weights`` [n, V]."""
    last = weights.shape[1] - 1

    def weigh(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return weights[rows[:, None], ids.clamp(max=last)].masked_fill_(ids > last, 0)

    return winners_of_all(block_peaks(weights), weigh, keys).clamp_(max=last)  # where all are NaN


def block_peaks(x: torch.Tensor) -> torch.Tensor:
    """The largest of each block [n, B] of a row of ``x`` [n, V]: NaN where there is any."""
    whole = x.shape[1] // _CHUNK
    peaks = x[:, : whole * _CHUNK].view(len(x), whole, _BLOCK, _APART).amax(2).flatten(1)
    rest = x[:, whole * _CHUNK :]
    if rest.shape[1] <= _APART:
        return torch.cat([peaks, rest], 1)
    lowest = -torch.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    padded = torch.nn.functional.pad(rest, (0, -rest.shape[1] % _APART), value=lowest)
    return torch.cat([peaks, padded.view(len(x), -1, _APART).amax(1)], 1)


def _fastest(
    weigh: Weigh, rows: torch.Tensor, blocks: torch.Tensor, keys: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fastest token of each of ``blocks`` [m] in ``rows`` [m] with ``keys`` [m]: its speed and its id, [m] each."""
    ids = _ids_of(blocks)
    speeds, at = (weigh(rows, ids) / numbers(keys, ids)).max(-1)
    return speeds, ids.gather(1, at[:, None]).squeeze(1)


def _block_of(ids: torch.Tensor) -> torch.Tensor:
    """The block in which each of ``ids`` lies."""
    return (ids >> _CHUNK_BITS << _APART_BITS).bitwise_or_(ids & (_APART - 1))


def _place_of(ids: torch.Tensor) -> torch.Tensor:
    """Which of its block's tokens each of ``ids`` is."""
    return (ids >> _APART_BITS).bitwise_and_(_BLOCK - 1)


def _ids_of(blocks: torch.Tensor) -> torch.Tensor:
    """The ids [m, 32] that lie in each of ``blocks`` [m]."""
    first = (blocks >> _APART_BITS << _CHUNK_BITS).bitwise_or_(blocks & (_APART - 1))
    return first[:, None] + _APART * torch.arange(_BLOCK, device=blocks.device)


def _least(keys: torch.Tensor, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest number of each of ``blocks``, and the place in the block of the token whose it is."""
    bits = split_mix(keys, blocks + _BLOCKS_FROM)
    return _exponentials(bits).div_(_BLOCK), bits & (_BLOCK - 1)


def _exponentials(bits: torch.Tensor) -> torch.Tensor:
    """Of the upper 52 of ``bits``, from 1e-16 to 37. numpy's logarithm on a CPU: torch's rounds the last elements of a
    tensor otherwise than the rest."""
    halves = (bits >> 12).bitwise_and_((1 << 52) - 1).double().add_(0.5).mul_(2.0**-52)
    if halves.is_cpu:
        np.log(halves.numpy(), out=halves.numpy())
        return halves.neg_()
    return halves.log_().neg_()
