"""8-bit weights times 8-bit activations."""

from typing import Literal

from pydantic import ValidationInfo, field_validator

from hotswap.core.interfaces.quantization import LinearWeight, Packed
from hotswap.plugins.cpu.linear_words import GROUP
from hotswap.plugins.quantization.base import CPUQuantization, PackingOptions
from hotswap.plugins.quantization.grouped import quantize_spans
from hotswap.plugins.quantization.kernel_linear import KernelLinear


class Int8Options(PackingOptions):
    group_size: Literal[32, 192] = 32
    """Weights of an output feature that share a scale, for our kernels: 192 are multiplied faster, where rows are many,
    and rounded more coarsely. torch's operators have one scale for all of them."""

    @field_validator("group_size")
    @classmethod
    def _for_our_kernels(cls, size: int, info: ValidationInfo) -> int:
        if size != GROUP and info.data.get("kernels") == "torch":
            raise ValueError(
                f"{size} is for our kernels, but 'kernels' is torch, whose operators have one scale for all weights of "
                "an output feature; leave one of the two out.")
        return size


class Int8(CPUQuantization):
    """Weights are 8-bit numbers with a scale for each group of 32, and so is each row of activations when it comes, so
    that it does not depend on its neighbours (LLM.int8(), Dettmers et al., 2022, has scales for whole rows and leaves
    outliers out; small groups confine them). Where torch's operators multiply, scales are for whole rows.

    A little more than half the memory of bfloat16, and nearly its quality. Choose it on a CPU with VNNI for files that
    are not quantised: products of 8-bit numbers are the fastest there are, the more so with ``group_size: 192``.
    """

    Options = Int8Options
    options: Int8Options

    def note(self, device: str, dtype: str) -> str:
        said, size = super().note(device, dtype), self.options.group_size
        if not said or size == GROUP:
            return said
        return f"{said}; group_size {size} has no effect: they have one scale for all weights of an output feature"

    def _pack(self, weight: LinearWeight) -> Packed:
        if self.options.group_size == GROUP or self._no_kernels():
            return self._eight_bits(weight)
        return KernelLinear(quantize_spans(weight), weight.bias, weight.dtype)
