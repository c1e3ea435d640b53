"""8-bit weights times 8-bit activations."""

from hotswap.core.interfaces.quantization import LinearWeight, Packed
from hotswap.plugins.quantization.base import CPUQuantization


class Int8(CPUQuantization):
    """Weights are 8-bit numbers with a scale for each group of 32, and so is each row of activations when it comes, so
    that it does not depend on its neighbours (LLM.int8(), Dettmers et al., 2022, has scales for whole rows and leaves
    outliers out; small groups confine them). Where torch's operators multiply, scales are for whole rows.

    A little more than half the memory of bfloat16, and nearly its quality. Choose it on a CPU with VNNI for files that
    are not quantised: products of 8-bit numbers are the fastest there are.
    """

    def _pack(self, weight: LinearWeight) -> Packed:
        return self._eight_bits(weight)
