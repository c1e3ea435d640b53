"""4-bit weights, rounded to the nearest."""

from dataclasses import replace

from hotswap.core.interfaces.quantization import LinearWeight, Packed, QuantizationSupport
from hotswap.plugins.quantization.base import FourBitQuantization
from hotswap.plugins.quantization.grouped import quantize_weight

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
        return self._eight_bits(weight) if weight.head else self._four_bits(quantize_weight(weight, 4), weight)
