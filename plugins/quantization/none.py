"""Weights in the config's dtype, laid out as the device multiplies them."""

import torch

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.quantization import LinearWeight, Packed, Quantization, QuantizationSupport
from hotswap.core.modeling.linear import DenseLinear, dense_weight, tensor_bytes
from hotswap.plugins.quantization.torch_support import BFLOAT16, lacking, needed, no_onednn, operator, processor_has

_REORDER, _MULTIPLY = "mkldnn._reorder_linear_weight", "mkldnn._linear_pointwise"


class NoQuantization(Quantization):
    """Every weight a value of the config's dtype.

    The default. On a processor with bfloat16 instructions, bfloat16 weights are put once into the order in which oneDNN
    reads them, so that no product has to. A tied head then has a copy of its own in that order, and the embedding its
    table: the vocabulary's matrix is in memory twice. ``prepack: false`` saves that copy.
    """

    class Options(ComponentOptions):
        prepack: bool = True
        """Put bfloat16 weights into oneDNN's order, on CPUs."""

    options: Options

    def support(self) -> QuantizationSupport:
        return QuantizationSupport()

    def note(self, device: str, dtype: str) -> str:
        reason = no_bfloat16_kernels() if self.options.prepack and (device, dtype) == ("cpu", "bfloat16") else ""
        return f"bfloat16 weights stay as they are stored, since {reason}" if reason else ""

    def pack(self, weight: LinearWeight) -> Packed:
        return unquantised(weight) if self.options.prepack else DenseLinear(weight)


class PrepackedLinear:
    """Implements ``Packed``: bfloat16, in the blocks that oneDNN's product takes."""

    def __init__(self, weight: LinearWeight) -> None:
        self._weight = needed(_REORDER)(dense_weight(weight), None)
        self._bias, self._multiply = weight.bias, needed(_MULTIPLY)
        self.nbytes = tensor_bytes(self._weight, weight.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._multiply(x, self._weight, self._bias, "none", [], "")
        return y


def unquantised(weight: LinearWeight) -> Packed:
    """The fastest form that keeps every weight."""
    prepacks = weight.device == "cpu" and weight.dtype == torch.bfloat16 and not no_bfloat16_kernels()
    return PrepackedLinear(weight) if prepacks else DenseLinear(weight)


def no_bfloat16_kernels() -> str:
    """Why bfloat16 weights are better left alone; empty where they are not."""
    if reason := no_onednn() or lacking(_REORDER, _MULTIPLY):
        return reason
    if not processor_has(BFLOAT16):
        return "the processor has no bfloat16 instructions"
    supported = operator("mkldnn._is_mkldnn_bf16_supported")
    return "" if supported is None or supported() else "oneDNN computes no bfloat16 on this processor"
