"""The kit compares every product with the dense one in float64; then what is its own."""

import torch

from hotswap.core.testing.quantization import QuantizationSuite, random_rows
from hotswap_mypart import MyPart


class TestMyPart(QuantizationSuite):
    def make_quantization(self) -> MyPart:
        return MyPart()

    def test_a_layer_takes_a_quarter_of_its_memory_in_float32(self) -> None:
        weight = self.weight(random_rows(256, 512, 0), dtype=torch.float32)
        assert MyPart().pack(weight).nbytes < 0.26 * 256 * 512 * 4

    def test_what_is_kept_is_not_packed(self) -> None:
        quantization = MyPart(MyPart.Options(keep=["*layers.0.*"]))
        weight = self.weight(random_rows(8, 16, 0), dtype=torch.float32)
        assert quantization.pack(weight).nbytes == 8 * 16 * 4
