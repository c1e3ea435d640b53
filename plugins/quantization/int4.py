"""4-bit weights, rounded to the nearest."""

from dataclasses import replace

import torch

from hotswap.core.interfaces.quantization import LinearWeight, Packed, QuantizationSupport
from hotswap.core.modeling.linear import dense_weight
from hotswap.plugins.quantization.base import FourBitQuantization
from hotswap.plugins.quantization.grouped import quantize_groups
from hotswap.plugins.quantization.kernel_linear import KernelLinear
from hotswap.plugins.quantization.torch_linear import int8_linear

ROUNDING = 0.12
"""Of normally distributed weights in groups of 32."""


class Int4(FourBitQuantization):
    """Groups of 32 weights are 4-bit numbers with a scale and a least value, chosen for the least squared error: round
    to nearest, without calibration. The head has 8 bits, since errors there are seen at once. Activations are brought
    to 8 bits, each row in groups of 32.

    A third of the memory of bfloat16. Choose it on a CPU where memory is short or requests are few, of a file that is
    not quantised, and where the loss (docs/quantization.md) is small enough; the 4-bit blocks of a GGUF file are better
    kept by ``gguf``.
    """

    def support(self) -> QuantizationSupport:
        return replace(super().support(), rounding=ROUNDING)

    def _pack(self, weight: LinearWeight) -> Packed:
        dense = dense_weight(weight, torch.float32)
        if not weight.head:
            return self._four_bits(quantize_groups(dense, 4), weight, dense)
        if self._no_kernels():
            return int8_linear(dense, weight.bias)
        return KernelLinear(quantize_groups(dense, 8), weight.bias, weight.dtype)
