"""What a decoder's layer computes between its multiplications: norms, rotary embedding, gates. ``operators/1``.

Each is a few operations on every value, which cost more to start and to carry to memory and back than to compute: so
they are asked for together, and one implementation may do each in one pass.

Legend of shapes: T tokens, F features, N heads, D head size, I the inner size of an MLP.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from hotswap.core.interfaces.component import Component

if TYPE_CHECKING:
    import torch


class OperatorSet(ABC):
    """The operators for one device and dtype. A row's result does not depend on the rows beside it; T may be 0. Several
    threads may call one set at once. Inputs are left alone, except where it says in place.

    The last dimension of each input is contiguous, the others need not be: an input may be a part of a wider tensor.
    """

    @abstractmethod
    def rms_norm(self, x: "torch.Tensor", weight: "torch.Tensor", eps: float) -> "torch.Tensor":
        """x [..., F], weight [F] -> [..., F], contiguous: x over the root of its mean square + eps, computed in float32
        and rounded to x's dtype, times ``weight`` (Zhang and Sennrich, 2019)."""

    @abstractmethod
    def add_rms_norm(
        self, x: "torch.Tensor", residual: "torch.Tensor", weight: "torch.Tensor", eps: float,
    ) -> "torch.Tensor":
        """x, residual [T, F] -> [T, F]: ``x`` becomes the sum of both, in place, rounded to its dtype; returns
        :meth:`rms_norm` of that."""

    @abstractmethod
    def rotate(self, x: "torch.Tensor", cos: "torch.Tensor", sin: "torch.Tensor") -> None:
        """x [T, N, D] in place: the pair (a, b) at (i, i + D/2) of each head becomes (a cos - b sin, b cos + a sin), by
        its token's cos and sin [T, 1, D/2] (RoFormer, Su et al., 2021)."""

    @abstractmethod
    def silu_mul(self, gate_up: "torch.Tensor") -> "torch.Tensor":
        """[T, 2 I] -> [T, I], contiguous: silu of the first half times the second (SwiGLU, Shazeer, 2020)."""


class Operators(Component):
    """Makes the operators of a model, which names it in an option of its own. Reads nothing before :meth:`bind`."""

    kind: ClassVar[str] = "operators"
    contract: ClassVar[str] = "operators/1"

    @abstractmethod
    def bind(self, device: str, dtype: "torch.dtype") -> OperatorSet:
        """For tensors of ``dtype`` on ``device`` ("cpu", "cuda:1"). ConfigError where there is nothing for them: it
        says what is missing. Whatever takes long, such as compiling, happens here."""
