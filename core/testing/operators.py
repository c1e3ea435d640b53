"""What every set of operators must do: the definitions in float64, in place and not. The whole test file::

    class TestMine(OperatorsSuite):
        def make_operators(self):
            return MyOperators()
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.operators import Operators, OperatorSet

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Greatest error of a value, as a part of the largest that its row and head have, or the first half of them."""

EPS = 1e-5
TOKENS = (0, 1, 3, 64, 257)
FEATURES = (8, 72, 576)
NAMES = ("rms_norm", "add_rms_norm", "rotate", "silu_mul")

Call = Callable[[OperatorSet, torch.dtype, slice], torch.Tensor]
"""An operator on the given rows of the same inputs each time."""


class OperatorsSuite:
    """Subclass it and provide ``make_operators``."""

    device = "cpu"

    def make_operators(self) -> Operators:
        raise NotImplementedError("return a new instance of the component under test")

    def sets(self) -> Iterator[tuple[torch.dtype, OperatorSet]]:
        """Of each dtype that it takes on the device."""
        found = False
        for dtype in TOLERANCE:
            try:
                operators = self.make_operators().bind(self.device, dtype)
            except ConfigError:
                continue
            found = True
            yield dtype, operators
        if not found:
            pytest.skip(f"it takes no dtype on {self.device}")

    def test_norms_agree_with_their_definition(self) -> None:
        for dtype, operators in self.sets():
            for tokens in TOKENS:
                for features in FEATURES:
                    x, weight = self._random(dtype, tokens, features), self._random(dtype, features)
                    self._compare(operators.rms_norm(x, weight, EPS), _normed(x, weight), "rms_norm")

    def test_a_norm_takes_heads_of_a_wider_tensor_and_leaves_them_alone(self) -> None:
        for dtype, operators in self.sets():
            wide, weight = self._random(dtype, 5, 7, 64), self._random(dtype, 64)
            before = wide.clone()
            normed = operators.rms_norm(wide[:, 2:5], weight, EPS)
            assert normed.is_contiguous()
            self._compare(normed, _normed(wide[:, 2:5], weight), "rms_norm of heads")
            assert torch.equal(wide, before), "rms_norm has changed its input"

    def test_large_and_small_values_are_normed_without_overflow(self) -> None:
        for dtype, operators in self.sets():
            for scale in (1e4, 1e-3):  # whose squares are beyond float16
                x, weight = self._random(dtype, 3, 576) * scale, self._random(dtype, 576)
                self._compare(operators.rms_norm(x, weight, EPS), _normed(x, weight), f"rms_norm at {scale:g}")

    def test_the_sum_is_left_in_the_first_and_the_residual_is_not_touched(self) -> None:
        for dtype, operators in self.sets():
            for tokens in TOKENS:
                for features in FEATURES:
                    x, residual = self._random(dtype, tokens, features), self._random(dtype, tokens, features)
                    total, before, weight = x + residual, residual.clone(), self._random(dtype, features)
                    normed = operators.add_rms_norm(x, residual, weight, EPS)
                    assert torch.equal(x, total), "x is not the sum, rounded to its dtype"
                    assert torch.equal(residual, before), "the residual was changed"
                    self._compare(normed, _normed(total, weight), "add_rms_norm")

    def test_pairs_are_rotated_in_place_and_what_lies_beside_them_is_not(self) -> None:
        for dtype, operators in self.sets():
            for tokens, dim in ((0, 8), (1, 64), (9, 64), (70, 80), (5, 2)):
                wide, angles = self._random(dtype, tokens, 5, dim), torch.rand(tokens, 1, dim // 2) * 100
                cos, sin = angles.cos().to(self.device, dtype), angles.sin().to(self.device, dtype)
                before = wide.clone()
                operators.rotate(wide[:, :3], cos, sin)
                assert torch.equal(wide[:, 3:], before[:, 3:]), "heads were changed that were not given"
                self._compare(wide[:, :3], _rotated(before[:, :3], cos, sin), "rotate")

    def test_a_gate_agrees_with_its_definition_whatever_it_is_given(self) -> None:
        for dtype, operators in self.sets():
            for tokens in TOKENS:
                for inner in (4, 36, 1536):
                    gate_up = self._random(dtype, tokens, 2 * inner) * 4
                    before = gate_up.clone()
                    self._compare(operators.silu_mul(gate_up), _gated(before), "silu_mul")
                    assert torch.equal(gate_up, before), "silu_mul has changed its input"
            extreme = torch.tensor([[-3e4, -100, -20, 20, 100, 3e4, 0.0, 1.0] + [1.0] * 8], device=self.device)
            self._compare(operators.silu_mul(extreme.to(dtype)), _gated(extreme.to(dtype)), "silu_mul of extremes")

    @pytest.mark.parametrize("name", NAMES)
    def test_a_row_does_not_depend_on_its_neighbours(self, name: str) -> None:
        for dtype, operators in self.sets():
            together = self._call(name)(operators, dtype, slice(0, 40))
            for rows in (slice(0, 1), slice(7, 8), slice(20, 33), slice(39, 40)):
                alone = self._call(name)(operators, dtype, rows)
                assert torch.equal(alone, together[rows]), f"{name}: rows {rows} by themselves are not what they were"

    @pytest.mark.parametrize("name", NAMES)
    def test_what_is_no_number_stays_in_its_row(self, name: str) -> None:
        for dtype, operators in self.sets():
            sound = self._call(name)(operators, dtype, slice(0, 40))
            spoilt = self._call(name, spoilt=17)(operators, dtype, slice(0, 40))
            assert spoilt[17].isnan().any(), f"{name} has made a number of NaN"
            others = [row for row in range(40) if row != 17]
            assert torch.equal(spoilt[others], sound[others]), f"{name}: NaN in a row has changed others"

    @pytest.mark.parametrize("name", NAMES)
    def test_threads_may_use_one_set_at_once(self, name: str) -> None:
        """On rows of their own, and each time they begin together."""
        parts = [slice(first, first + 500) for first in range(0, 2000, 500)]
        for dtype, operators in self.sets():
            together = Barrier(len(parts), timeout=60)
            alone = partial(self._call(name, tokens=2000), operators, dtype)
            beside = partial(self._call(name, tokens=2000, meet=together.wait), operators, dtype)

            def turns(rows: slice, call: Callable[[slice], torch.Tensor] = beside) -> list[torch.Tensor]:
                return [call(rows) for _ in range(5)]

            # A thread of its own for what is expected, too: it has as many for its operators as the others will have.
            with ThreadPoolExecutor(1) as pool:
                expected = list(pool.map(alone, parts))
            with ThreadPoolExecutor(len(parts)) as pool:
                found = list(pool.map(turns, parts))
            for rows, own, right in zip(parts, found, expected, strict=True):
                assert all(torch.equal(each, right) for each in own), (
                    f"{name}: beside other threads the result of {rows} in {dtype} is another")

    def _call(
        self, name: str, spoilt: int | None = None, tokens: int = 40, meet: Callable[[], object] = lambda: None,
    ) -> Call:
        """``name`` on rows of ``tokens`` fixed ones, the first value of row ``spoilt`` being NaN; ``meet`` is called
        just before."""

        def call(operators: OperatorSet, dtype: torch.dtype, rows: slice) -> torch.Tensor:
            x, residual = self._random(dtype, tokens, 3, 32), self._random(dtype, tokens, 96, seed=1)
            weight, angles = self._random(dtype, 96, seed=2), torch.arange(float(tokens))[rows, None, None]
            cos, sin = (turn(angles * torch.ones(16)).to(self.device, dtype) for turn in (torch.cos, torch.sin))
            if spoilt is not None:
                x[spoilt, 0, 0] = torch.nan
            x, residual = x[rows], residual[rows]
            flat = x.flatten(1)
            meet()
            if name == "rotate":
                operators.rotate(x, cos, sin)
                return x
            if name == "rms_norm":
                return operators.rms_norm(flat, weight, EPS)
            if name == "add_rms_norm":
                return operators.add_rms_norm(flat, residual, weight, EPS)
            return operators.silu_mul(flat)

        return call

    def _random(self, dtype: torch.dtype, *size: int, seed: int = 0) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(self.device, dtype)

    @staticmethod
    def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        assert found.shape == expected.shape, f"{what} gives {tuple(found.shape)}, not {tuple(expected.shape)}"
        if not found.numel():
            return
        scale = expected.abs().amax(-1, keepdim=True)
        error = ((found.double().cpu() - expected.cpu()).abs() / scale.cpu()).nan_to_num(torch.inf).max().item()
        assert error <= TOLERANCE[found.dtype], (
            f"{what} of {tuple(found.shape)} in {found.dtype} differs from its definition by {error:.3g}, allowed "
            f"{TOLERANCE[found.dtype]}")


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.double().chunk(2, -1)
    return torch.cat([a * cos.double() - b * sin.double(), b * cos.double() + a * sin.double()], -1)


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up
