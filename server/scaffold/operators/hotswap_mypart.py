"""Operators of a decoder: what it computes between its multiplications."""

import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.operators import Operators, OperatorSet


class MySet(OperatorSet):
    """Each by its definition. ``exact``: in float32 from beginning to end.

    T tokens, F features, N heads, D head size.
    """

    def __init__(self, exact: bool = True) -> None:
        self.exact = exact

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """What is computed with."""
        return x.float() if self.exact else x

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., F] -> the same: over the root of its mean square."""
        wide = self.wide(x)
        normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        return normed.to(x.dtype) * weight

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [T, F] becomes the sum, in place; its norm is returned."""
        x += residual
        return self.rms_norm(x, weight, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """x [T, N, D] in place, pairs (i, i + D/2); cos, sin [T, 1, D/2]."""
        first, second = (self.wide(half) for half in x.chunk(2, -1))
        cos, sin = self.wide(cos), self.wide(sin)
        x.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], -1))

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 I] -> [T, I]."""
        gate, up = (self.wide(half) for half in gate_up.chunk(2, -1))
        return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


class MyPart(Operators):
    """Norms, rotary embedding and gates, as they are defined.

    Choose it ... (as the place to begin: one operator after the other becomes a kernel of your own).
    """

    class Options(ComponentOptions):
        exact: bool = True
        """Compute in float32. Without it in the tensors' own type: less memory is moved, and sums are coarser."""

    def bind(self, device: str, dtype: torch.dtype) -> OperatorSet:
        """Refuses what it has nothing for, and says so."""
        if not dtype.is_floating_point:
            raise ConfigError(f"{self.label} has no operators for {dtype}; choose float32 or bfloat16", "dtype")
        return MySet(self.options.exact)
