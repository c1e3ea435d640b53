"""A quantization: the form in which linear layers keep their weights."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch.nn import functional

from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.quantization import (
    PACKED_WEIGHTS,
    LinearWeight,
    Packed,
    Quantization,
    QuantizationSupport,
)
from hotswap.core.modeling.linear import DenseLinear, dense_weight, tensor_bytes


class MyPart(Quantization):
    """Each output feature's weights are 8-bit numbers times one scale, and are made floating-point again when a product
    needs them (absmax quantization).

    Choose it ... (as the place to begin: it saves memory on every device, and costs time).
    """

    class Options(ComponentOptions):
        keep: list[str] = []
        """Layers that stay dense: patterns of the checkpoint's names, such as "*.down_proj"."""

    def describe(self) -> Description:
        """It is of no use to a model whose layers are none of hotswap's: such a one is refused at the start."""
        return Description(requires=(
            Requirement("model", PACKED_WEIGHTS, "its layers are what is packed", "quantization"),))

    def support(self) -> QuantizationSupport:
        """Any device. ``rounding`` is what the kit holds its products against, beyond the dtype's own."""
        return QuantizationSupport(dtypes=("float32", "bfloat16"), rounding=0.01)

    def patterns(self) -> Mapping[str, str]:
        """Where options name layers: a pattern that fits none is refused at the start."""
        return {f"keep[{number}]": pattern for number, pattern in enumerate(self.options.keep)}

    def pack(self, weight: LinearWeight) -> Packed:
        """``weight.pieces`` are as the checkpoint stores them; ``dense_weight`` joins them."""
        if any(fnmatchcase(name, pattern) for name in weight.names for pattern in self.options.keep):
            return DenseLinear(weight)
        return EightBits(weight)


class EightBits:
    """x [T, I] -> [T, O]."""

    def __init__(self, weight: LinearWeight) -> None:
        dense = dense_weight(weight, torch.float32)
        self.scales = (dense.abs().amax(1) / 127).clamp(min=1e-30)  # [O]
        self.numbers = (dense / self.scales[:, None]).round().to(torch.int8)  # [O, I]
        self.bias = weight.bias
        self.nbytes = tensor_bytes(self.scales, self.numbers, self.bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Several threads may call it at once: it keeps nothing between calls."""
        y = functional.linear(x, self.numbers.to(x.dtype)).mul_(self.scales)
        return y if self.bias is None else y.add_(self.bias)
