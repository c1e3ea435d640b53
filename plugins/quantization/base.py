"""What quantizations on CPUs have in common: options, requirements, and the choice between kernels and operators."""

from abc import abstractmethod
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.quantization import (
    PACKED_WEIGHTS,
    LinearWeight,
    Packed,
    Quantization,
    QuantizationSupport,
)
from hotswap.plugins.cpu.linear_words import GROUP
from hotswap.plugins.quantization.grouped import Groups, quantize_weight
from hotswap.plugins.quantization.kernel_linear import KernelLinear, no_kernels
from hotswap.plugins.quantization.none import unquantised
from hotswap.plugins.quantization.torch_linear import (
    ByRows,
    Int4Linear,
    int8_linear,
    no_int4_products,
    no_int8_products,
)
from hotswap.plugins.quantization.torch_support import AVX512, processor_has

ROUNDING = 0.02
"""Of weights and activations in 8 bits, for normally distributed ones."""


class PackingOptions(ComponentOptions):
    keep: list[str] = []
    """Layers that stay unquantised: patterns of the checkpoint's names, such as "lm_head" or "*.down_proj"."""
    kernels: Literal["auto", "torch"] = "auto"
    """Who multiplies: auto: kernels of our own where the processor has AVX-512 with VNNI; torch: torch's operators."""


class FourBitOptions(PackingOptions):
    many_rows: Annotated[int, Field(ge=2)] | None = 7
    """Where torch's operators multiply: from so many rows a step on, a second form of the weights in 8 bits does, which
    is faster there; null: there is none, and its memory is saved."""


class CPUQuantization(Quantization):
    """Packs weights for processors with products of 8-bit numbers: by kernels of our own, or by torch's operators."""

    Options = PackingOptions
    options: PackingOptions

    def describe(self) -> Description:
        return Description(requires=(Requirement(
            Model.kind, PACKED_WEIGHTS, "its layers are what is packed", "the quantization, or the model component"),))

    def patterns(self) -> Mapping[str, str]:
        return {f"keep[{number}]": pattern for number, pattern in enumerate(self.options.keep)}

    def support(self) -> QuantizationSupport:
        return QuantizationSupport(devices=("cpu",), dtypes=("float32", "bfloat16"), rounding=ROUNDING)

    def note(self, device: str, dtype: str) -> str:
        why = self._no_kernels()
        if not why:
            return ""
        reasons = self._slow(dtype)
        return "; ".join([f"torch's operators multiply the packed weights, since {why}", *reasons])

    def pack(self, weight: LinearWeight) -> Packed:
        if any(fnmatchcase(name, pattern) for name in weight.names for pattern in self.options.keep):
            return unquantised(weight)
        return self._pack(weight)

    @abstractmethod
    def _pack(self, weight: LinearWeight) -> Packed:
        """A layer that is not to be kept."""

    def _eight_bits(self, weight: LinearWeight) -> Packed:
        if self._no_kernels():
            return int8_linear(weight)
        return KernelLinear(quantize_weight(weight, 8), weight.bias, weight.dtype)

    def _no_kernels(self) -> str:
        return "the config says so" if self.options.kernels == "torch" else no_kernels()

    def _slow(self, dtype: str) -> list[str]:
        """What torch's operators lack here."""
        reason = no_int8_products()
        return [f"8-bit weights are made {dtype} again for each product, since {reason}"] if reason else []


class FourBitQuantization(CPUQuantization):
    """With 4-bit forms, which torch's operators multiply, too."""

    Options = FourBitOptions
    options: FourBitOptions

    def support(self) -> QuantizationSupport:
        """ConfigError where nobody could multiply."""
        if (reason := no_int4_products()) and self._no_kernels():
            raise ConfigError(
                f"{self.label} cannot multiply 4-bit weights: {reason}, and {self._no_kernels()}; choose int8, or none")
        return super().support()

    def _slow(self, dtype: str) -> list[str]:
        reasons = [] if processor_has(AVX512) else ["4-bit weights are multiplied without AVX-512, which is slow"]
        return [*reasons, *(super()._slow(dtype) if self.options.many_rows is not None else [])]

    def _four_bits(self, groups: Groups, weight: LinearWeight) -> Packed:
        """``weight``: in ``groups`` already, and what a form for many rows is made of."""
        if not self._no_kernels():
            return KernelLinear(groups, weight.bias, weight.dtype)
        if weight.in_features % GROUP:
            return int8_linear(weight)
        few, many_rows = Int4Linear(groups, weight.bias, weight.dtype), self.options.many_rows
        return few if many_rows is None or weight.tied else ByRows(few, int8_linear(weight), many_rows)
