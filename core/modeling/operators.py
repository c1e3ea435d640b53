"""A decoder's elementwise operators in torch's own: what they mean, on any device and in any floating dtype."""

import torch
from torch.nn import functional

from hotswap.core.interfaces.operators import OperatorSet


class TorchOperatorSet(OperatorSet):
    """The reference of other sets, and what models use that are given none."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype)
        return normed.mul_(weight)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(x.add_(residual), weight, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        first, second = x.chunk(2, -1)
        turned = (first * cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(turned)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return functional.silu(gate).mul_(up)


TORCH_OPERATORS = TorchOperatorSet()
