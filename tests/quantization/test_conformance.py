"""Each quantization in the box passes the kit, with its options, by kernels of our own and by torch's operators, and on
processors that have less than this one."""

from typing import Any

import pytest

from hotswap.core.interfaces.quantization import Quantization
from hotswap.core.testing.quantization import QuantizationSuite
from hotswap.core.testing.rig import build
from hotswap.plugins.quantization.kernel_linear import no_kernels


class Suite(QuantizationSuite):
    use = ""
    options: dict[str, Any] = {}

    def make_quantization(self) -> Quantization:
        return build("quantization", self.use, **self.options)


class TestNone(Suite):
    use = "none"


class TestNotPrepacked(Suite):
    use, options, shapes = "none", {"prepack": False}, ((40, 96), (33, 64))


@pytest.mark.skipif(bool(no_kernels()), reason=no_kernels())
class TestInt8(Suite):
    use = "int8"


@pytest.mark.skipif(bool(no_kernels()), reason=no_kernels())
class TestInt8InGroupsOf192(Suite):
    use, options = "int8", {"group_size": 192}


@pytest.mark.skipif(bool(no_kernels()), reason=no_kernels())
class TestInt4(Suite):
    use = "int4"


@pytest.mark.skipif(bool(no_kernels()), reason=no_kernels())
class TestGGUF(Suite):
    use = "gguf"


class TestInt8ByTorch(Suite):
    use, options = "int8", {"kernels": "torch"}


class TestInt4ByTorch(Suite):
    use, options = "int4", {"kernels": "torch"}


class TestInt4ByTorchAlone(Suite):
    use, options = "int4", {"kernels": "torch", "many_rows": None}
    shapes = ((40, 96), (33, 64), (1100, 1024))
    """The last one is packed in parts."""


class TestGGUFByTorch(Suite):
    use, options = "gguf", {"kernels": "torch"}


class TestGGUFByTorchWithDenseQ8(Suite):
    use, options, shapes = "gguf", {"kernels": "torch", "q8_0": "dense", "many_rows": None}, ((33, 64), (40, 96))


class OnAnOlderProcessor(Suite):
    shapes = ((40, 96), (33, 64))

    @pytest.fixture(autouse=True)
    def older(self, processor):
        processor("avx2")


class TestNoneOnAnOlderProcessor(OnAnOlderProcessor):
    use = "none"


class TestInt8OnAnOlderProcessor(OnAnOlderProcessor):
    use = "int8"


class TestInt4OnAnOlderProcessor(OnAnOlderProcessor):
    use = "int4"
