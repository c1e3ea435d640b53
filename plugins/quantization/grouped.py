"""Weights as numbers of 8 bits or of 4, in groups of 32 with a scale and a least value each.

Legend of shapes: I input features, O output features, G = I / 32 groups of an output feature, rounded up.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.nn import functional

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.modeling.linear import dense_parts
from hotswap.plugins.cpu.linear_words import GROUP, SPAN

_RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7)
"""How much of a group's range 4 bits may cover: what lies outside is cut off, the rest becomes finer."""


@dataclass(frozen=True)
class Groups:
    """``numbers`` uint8 [O, I], below 2^``bits``; ``scales``, ``least`` float32 [O, G], of float16's values: a number q
    stands for q * scale + least. Of 8 bits, ``least`` is -128 times the scale."""

    numbers: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor
    bits: int

    def rows(self, rows: slice) -> "Groups":
        """Some of the output features, in the same memory."""
        return Groups(self.numbers[rows], self.scales[rows], self.least[rows], self.bits)

    def columns(self, first: int, width: int) -> "Groups":
        """Some of the input features, in the same memory: ``first`` is the first one of a group."""
        groups = slice(first // GROUP, -(-(first + width) // GROUP))
        return Groups(
            self.numbers[:, first : first + width], self.scales[:, groups], self.least[:, groups], self.bits)


@dataclass(frozen=True)
class Spans:
    """``numbers`` uint8 [O, I], ``scales`` float32 [O, S], one for each 192 input features: a number q stands for
    (q - 128) * scale."""

    numbers: torch.Tensor
    scales: torch.Tensor

    def rows(self, rows: slice) -> "Spans":
        """Some of the output features, in the same memory."""
        return Spans(self.numbers[rows], self.scales[rows])


def joined(parts: Iterable[Groups], out_features: int) -> Groups:
    """One below the other, ``out_features`` in all, of as many bits each. Of an iterator, one part at a time is in
    memory."""
    whole, start = None, 0
    for part in parts:
        if whole is None:
            numbers, scales, least = (
                each.new_empty(out_features, each.shape[1]) for each in (part.numbers, part.scales, part.least))
            whole = Groups(numbers, scales, least, part.bits)
        place = whole.rows(slice(start, start + len(part.numbers)))
        place.numbers.copy_(part.numbers)
        place.scales.copy_(part.scales)
        place.least.copy_(part.least)
        start += len(part.numbers)
    assert whole is not None, "a layer without projections"
    return whole


def quantize_weight(weight: LinearWeight, bits: int) -> Groups:
    """See :func:`quantize_groups`; some rows at a time."""
    return joined((quantize_groups(part.float(), bits) for part in dense_parts(weight)), weight.out_features)


def quantize_spans(weight: LinearWeight) -> Spans:
    """Rounded to the nearest of 8-bit numbers, symmetrically around 0; some rows at a time."""
    outputs, width, span = weight.out_features, weight.in_features, SPAN * GROUP
    whole, start = Spans(
        torch.empty(outputs, width, dtype=torch.uint8), torch.empty(outputs, -(-width // span))), 0
    for part in dense_parts(weight):
        place = slice(start, start := start + len(part))
        spans = functional.pad(part.float(), (0, -width % span)).view(len(part), -1, span)
        scales = spans.abs().amax(-1, keepdim=True) / 127
        whole.numbers[place] = _around_zero(spans, scales).flatten(1)[:, :width]
        whole.scales[place] = scales.squeeze(-1)
    return whole


def quantize_groups(dense: torch.Tensor, bits: int) -> Groups:
    """dense [O, I] float32, rounded to the nearest number: of 8 bits symmetrically around 0; of 4 bits between a least
    and a greatest value, of which the range with the least squared error is taken for each group."""
    width = dense.shape[1]
    groups = functional.pad(dense, (0, -width % GROUP)).view(len(dense), -1, GROUP)
    numbers, scales, least = _symmetric(groups) if bits == 8 else _least_squares(groups)
    return Groups(numbers.flatten(1)[:, :width].contiguous(), scales.squeeze(-1), least.squeeze(-1), bits)


def _symmetric(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = _kept(groups.abs().amax(-1, keepdim=True) / 127)
    return _around_zero(groups, scales), scales, -128 * scales


def _around_zero(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    numbers = (values / scales).nan_to_num_(0.0).round_().clamp_(-127, 127)  # no scale: they are zero
    return numbers.add_(128).to(torch.uint8)


def _least_squares(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = groups.aminmax(dim=-1, keepdim=True)
    smallest = torch.full_like(low, torch.inf)
    numbers = torch.zeros(groups.shape, dtype=torch.uint8)
    scales, least = torch.zeros_like(low), torch.zeros_like(low)
    for share in _RANGES:
        scale, begin = _kept((high - low) * (share / 15)), _kept(low + (high - low) * ((1 - share) / 2))
        number = ((groups - begin) / scale).nan_to_num_(0.0).round_().clamp_(0, 15)
        error = (number * scale).add_(begin).sub_(groups).square_().sum(-1, keepdim=True)
        better = error < smallest
        smallest = torch.where(better, error, smallest)
        numbers = torch.where(better, number.to(torch.uint8), numbers)
        scales, least = torch.where(better, scale, scales), torch.where(better, begin, least)
    return numbers, scales, least


def _kept(values: torch.Tensor) -> torch.Tensor:
    """Rounded as they will be kept, so that the numbers are chosen for what they will mean."""
    return values.half().float()
