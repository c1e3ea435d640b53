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


def test_without_exactness_it_computes_in_the_tensors_own_type() -> None:
    gates = torch.tensor([[0.3, 1.7, 2.3, 0.1]], dtype=torch.bfloat16)
    exact, coarse = (MyPart(MyPart.Options(exact=exact)).bind("cpu", torch.bfloat16) for exact in (True, False))
    wide = gates.float()
    wanted = wide[:, :2] * torch.sigmoid(wide[:, :2]) * wide[:, 2:]
    assert torch.equal(exact.silu_mul(gates), wanted.to(torch.bfloat16))
    torch.testing.assert_close(coarse.silu_mul(gates).float(), wanted, rtol=0.02, atol=0)
    same = torch.tensor([[0.3, 1.7]])
    assert torch.equal(exact.rms_norm(same, torch.ones(2), 1e-6), coarse.rms_norm(same, torch.ones(2), 1e-6))


def test_what_it_has_nothing_for_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="int8"):
        MyPart().bind("cpu", torch.int8)
