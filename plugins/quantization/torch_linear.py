"""Layers whose weights torch's operators multiply, on CPUs without kernels of our own.

Legend of shapes: T rows, I input features, O output features, G = I / 32 groups of an output feature.
"""

import torch
from torch.nn import functional

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.modeling.linear import PART_VALUES, dense_parts, tensor_bytes
from hotswap.plugins.cpu.linear_words import GROUP
from hotswap.plugins.quantization.grouped import Groups
from hotswap.plugins.quantization.torch_support import INT8, lacking, needed, no_onednn, processor_has

LARGEST = 127
"""Of the 8-bit numbers, symmetric around 0."""

_SHIFT = 128
"""Is added to the 8-bit numbers of rows."""

_PREPACK_8, _MULTIPLY_8 = "onednn.qlinear_prepack", "onednn.qlinear_pointwise"
_PACK_4, _MULTIPLY_4 = "aten._convert_weight_to_int4pack_for_cpu", "aten._weight_int4pack_mm_for_cpu"
_TILE_ROWS = 16
"""The 4-bit product takes a multiple of so many output features."""
_BLOCK_ROWS = 64
"""It is laid out in blocks of so many output features, or a divisor of it."""


def no_int8_products() -> str:
    """Why 8-bit products are better not asked for; empty where they are."""
    if reason := no_onednn() or lacking(_PREPACK_8, _MULTIPLY_8):
        return reason
    return "" if processor_has(INT8) else "the processor has no instructions for products of 8-bit numbers"


def no_int4_products() -> str:
    return lacking(_PACK_4, _MULTIPLY_4)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, I] -> whole numbers [T, I] and scales [T, 1], float32: the largest magnitude of a row becomes 127."""
    peaks = torch.linalg.vector_norm(x, torch.inf, -1, keepdim=True).float()
    scales = peaks.div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x / scales).round_(), scales


def int8_linear(weight: LinearWeight) -> "Int8Linear | WidenedLinear":
    rows = torch.empty(weight.out_features, weight.in_features, dtype=torch.int8)
    scales, start = torch.empty(weight.out_features, 1), 0
    for part in dense_parts(weight):
        place = slice(start, start := start + len(part))
        rows[place], scales[place] = quantize_rows(part)
    return (WidenedLinear if no_int8_products() else Int8Linear)(rows, scales, weight.bias)


class Int8Linear:
    """Implements ``Packed``: a scale for each output feature and one for each row; oneDNN adds up products of 8-bit
    numbers exactly."""

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``rows`` int8 [O, I], ``scales`` float32 [O, 1]."""
        self._out_features, self._bias, self._multiply = len(rows), bias, needed(_MULTIPLY_8)
        self._weight, self._scales = needed(_PREPACK_8)(rows, None), scales.flatten()
        self._zeros = torch.zeros(len(rows), dtype=torch.int32)
        self.nbytes = tensor_bytes(self._weight, self._scales, self._zeros, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self._out_features)
        rows, scales = quantize_rows(x.contiguous())
        shifted = rows.add_(_SHIFT).to(torch.uint8)  # oneDNN multiplies numbers with a sign by a loop of plain C++
        y: torch.Tensor = self._multiply(
            shifted, 1.0, _SHIFT, self._weight, self._scales, self._zeros, None, 1.0, 0, x.dtype, "none", [], "")
        y.mul_(scales)
        return y if self._bias is None else y.add_(self._bias)


class WidenedLinear:
    """Implements ``Packed`` for processors without products of 8-bit numbers: the memory is saved, no time."""

    def __init__(self, rows: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        """``rows`` int8 [O, I], ``scales`` float32 [O, 1]."""
        self._weight, self._scales, self._bias = rows, scales.flatten(), bias
        self.nbytes = tensor_bytes(rows, self._scales, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.linear(x, self._weight.to(x.dtype)).mul_(self._scales)
        return y if self._bias is None else y.add_(self._bias)


class Int4Linear:
    """Implements ``Packed`` by torch's 4-bit product, which makes the weights floating-point as it reads them: a number
    q stands for (q - 8) * scale + zero, both in the dtype of the activations."""

    def __init__(self, groups: Groups, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """I is a multiple of 32."""
        self._out_features, self._bias, self._multiply = len(groups.numbers), bias, needed(_MULTIPLY_4)
        more = (0, 0, 0, -self._out_features % _TILE_ROWS)
        scales, zeros = (
            functional.pad(x, more).to(dtype).t() for x in (groups.scales, groups.least + 8 * groups.scales))
        self._scales_zeros = torch.stack([scales, zeros], -1).contiguous()  # [G, O, 2]
        numbers, pack = functional.pad(groups.numbers, more), needed(_PACK_4)
        rows = max(1, PART_VALUES // (_BLOCK_ROWS * numbers.shape[1])) * _BLOCK_ROWS
        self._weight = torch.cat([
            pack(numbers[first : first + rows].int(), 1) for first in range(0, len(numbers), rows)])
        self.nbytes = tensor_bytes(self._weight, self._scales_zeros, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self._out_features)
        y: torch.Tensor = self._multiply(x.contiguous(), self._weight, GROUP, self._scales_zeros)
        y = y[:, : self._out_features]
        return y if self._bias is None else y.add_(self._bias)


class ByRows:
    """Implements ``Packed``: ``few`` multiplies up to ``many_rows`` - 1 rows, ``many`` what is more.

    Reading weights is what a few rows cost, multiplying what many do: of torch's operators the one that reads least is
    not the one that multiplies fastest.
    """

    def __init__(self, few: Int4Linear, many: Int8Linear | WidenedLinear, many_rows: int) -> None:
        self._few, self._many, self._many_rows = few, many, many_rows
        self.nbytes = few.nbytes + many.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return (self._few if len(x) < self._many_rows else self._many)(x)
