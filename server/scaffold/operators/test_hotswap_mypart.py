"""The kit holds every operator against its definition in float64; then what is its own."""

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.testing.operators import OperatorsSuite
from hotswap_mypart import MyPart


class TestMyPart(OperatorsSuite):
    def make_operators(self) -> MyPart:
        return MyPart()

    def test_it_takes_every_dtype_of_the_kit(self) -> None:
        assert [dtype for dtype, _ in self.sets()] == [torch.float32, torch.float16, torch.bfloat16]


def test_what_it_has_nothing_for_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="int8"):
        MyPart().bind("cpu", torch.int8)
