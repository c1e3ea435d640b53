"""Kernels for CPUs keep the kit's promises, on one thread and on several; where they cannot run, others do."""

import importlib.util
import logging

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.operators import Operators, OperatorSet
from hotswap.core.modeling.operators import TORCH_OPERATORS
from hotswap.core.testing.operators import OperatorsSuite
from hotswap.core.testing.rig import build
from hotswap.plugins.cpu import team
from hotswap.plugins.operators import cpu


class TestCPU(OperatorsSuite):
    def make_operators(self) -> Operators:
        return build("operators", "cpu")

    def test_it_takes_float32_and_bfloat16(self) -> None:
        assert [dtype for dtype, _ in self.sets()] == [torch.float32, torch.bfloat16]


class TestCPUOnThreads(TestCPU):
    """The smallest step is divided."""

    @pytest.fixture(autouse=True)
    def divided(self, monkeypatch: pytest.MonkeyPatch):
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        monkeypatch.setattr(cpu, "SHARED_FROM", 16)
        yield
        torch.set_num_threads(before)

    def test_two_rows_ask_for_no_smaller_team_than_torch_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """libgomp would end the other threads, and start new ones for torch's next operator."""
        asked, parallel = [], team._parallel()
        monkeypatch.setattr(team, "_parallel", lambda: lambda *call: (asked.append(call[2]), parallel(*call)))
        operators = self.make_operators().bind("cpu", torch.float32)
        for rows in (1, 2):
            operators.silu_mul(torch.ones(rows, 64))
        assert asked == [3], "one row is for one thread"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_rounding_is_that_of_torch_s_operators_but_for_the_order_of_sums(dtype: torch.dtype) -> None:
    """Steps of one unit in the last place in a few values, of which sums are made in another order."""
    operators = build("operators", "cpu").bind("cpu", dtype)
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, generator=random).to(dtype) for size in ((500, 576), (576,)))
    for name, values in (("rms_norm", (x, weight, 1e-5)), ("silu_mul", (x,))):
        found, expected = (getattr(one, name)(*values) for one in (operators, TORCH_OPERATORS))
        same = (found == expected).double().mean().item()
        assert same > (0.99 if dtype == torch.bfloat16 else 0.2), f"{name}: only {same:.1%} of the values are equal"


def auto() -> OperatorSet:
    return build("operators", "auto").bind("cpu", torch.float32)


def test_auto_takes_the_kernels_where_they_run_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hotswap")
    assert type(auto()) is type(build("operators", "cpu").bind("cpu", torch.float32))
    assert caplog.messages == ["operators: cpu"]


def test_without_numba_torch_s_operators_are_taken_and_the_reason_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("hotswap.plugins.cpu.team.find_spec", lambda name: None if name == "numba" else find(name))
    caplog.set_level(logging.INFO, "hotswap")
    assert auto() is TORCH_OPERATORS
    [message] = caplog.messages
    assert message.startswith("operators: torch (") and "numba" in message
    with pytest.raises(ConfigError, match="numba"):
        build("operators", "cpu").bind("cpu", torch.float32)


@pytest.mark.parametrize(("device", "dtype"), [("cuda:0", torch.float32), ("cpu", torch.float16)])
def test_what_the_kernels_cannot_is_refused_by_name_and_left_to_torch_by_auto(device: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=device if device != "cpu" else "float16"):
        build("operators", "cpu").bind(device, dtype)
    assert build("operators", "auto").bind(device, dtype) is TORCH_OPERATORS


def test_auto_without_any_that_fits_says_why_of_each() -> None:
    with pytest.raises(ConfigError, match="runs on cpu, not on cuda:0"):
        build("operators", "auto", candidates=["cpu"]).bind("cuda:0", torch.float32)
