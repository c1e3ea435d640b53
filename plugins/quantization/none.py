"""Weights in the config's dtype, laid out as the device multiplies them."""

from typing import Literal

import torch

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.quantization import LinearWeight, Packed, Quantization, QuantizationSupport
from hotswap.core.modeling.linear import DenseLinear, dense_weight, tensor_bytes
from hotswap.plugins.quantization.tiled_linear import TiledLinear, fits, no_tiles
from hotswap.plugins.quantization.torch_support import (
    AMX,
    BFLOAT16,
    lacking,
    needed,
    no_onednn,
    operator,
    processor_has,
)

Kernels = Literal["auto", "torch"]

_REORDER, _MULTIPLY = "mkldnn._reorder_linear_weight", "mkldnn._linear_pointwise"


class NoQuantization(Quantization):
    """Every weight a value of the config's dtype.

    The default. On a processor with bfloat16 instructions, bfloat16 weights are put once into the order in which they
    are multiplied: for a kernel of our own where the processor has AVX512_BF16, else for oneDNN. A tied head then has a
    copy of its own in that order, and the embedding its table: the vocabulary's matrix is in memory twice. ``prepack:
    false`` saves that copy.
    """

    class Options(ComponentOptions):
        prepack: bool = True
        """Put bfloat16 weights into the order in which they are multiplied, on CPUs."""
        kernels: Kernels = "auto"
        """Who multiplies them then: auto: a kernel of our own where the processor has AVX512_BF16, and no AMX; torch:
        oneDNN."""

    options: Options

    def support(self) -> QuantizationSupport:
        return QuantizationSupport()

    def note(self, device: str, dtype: str) -> str:
        if not self.options.prepack or (device, dtype) != ("cpu", "bfloat16"):
            return ""
        why = no_tiles() if self.options.kernels == "auto" else "the config says so"
        if why and (worse := no_bfloat16_kernels()):
            return f"bfloat16 weights stay as they are stored, since {worse}"
        return f"oneDNN multiplies bfloat16 weights, since {why}" if why and not processor_has(AMX) else ""

    def pack(self, weight: LinearWeight) -> Packed:
        return unquantised(weight, self.options.kernels) if self.options.prepack else DenseLinear(weight)


class PrepackedLinear:
    """Implements ``Packed``: bfloat16, in the blocks that oneDNN's product takes."""

    def __init__(self, weight: LinearWeight) -> None:
        self._weight = needed(_REORDER)(dense_weight(weight), None)
        self._bias, self._multiply = weight.bias, needed(_MULTIPLY)
        self.nbytes = tensor_bytes(self._weight, weight.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return y


def unquantised(weight: LinearWeight, kernels: Kernels = "auto") -> Packed:
    """The fastest form that keeps every weight."""
    if weight.device != "cpu" or weight.dtype != torch.bfloat16:
        return DenseLinear(weight)
    if kernels == "auto" and fits(weight) and not no_tiles():
        return TiledLinear(weight)
    return DenseLinear(weight) if no_bfloat16_kernels() else PrepackedLinear(weight)


def no_bfloat16_kernels() -> str:
    """Why oneDNN gains nothing by another order of bfloat16 weights; empty where it does."""
    if reason := no_onednn() or lacking(_REORDER, _MULTIPLY):
        return reason
    if not processor_has(BFLOAT16):
        return "the processor has no bfloat16 instructions"
    supported = operator("mkldnn._is_mkldnn_bf16_supported")
    return "" if supported is None or supported() else "oneDNN computes no bfloat16 on this processor"
