"""Quantization: the form in which linear layers keep their weights, and the product with it. ``quantization/1``.

Legend of shapes: T rows, I input features, O output features.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from hotswap.core.interfaces.component import Component

if TYPE_CHECKING:
    import torch

    from hotswap.core.modeling.gguf import BlockRows

PACKED_WEIGHTS = "packed_weights"
"""What a model offers whose linear layers are those of ``core/modeling/layers.py``, and so take weights in any form."""


@dataclass(frozen=True)
class LinearWeight:
    """One linear layer of this rank, as the checkpoint holds it.

    ``pieces``: [O_i, I] each, one below the other: the projections that are multiplied at once. Each is a tensor on the
    CPU in the dtype that is stored (float32 from a GGUF file), or the file's own blocks where
    ``QuantizationSupport.blocks`` names their format: all that a rank's part of the columns touches, and its place in
    them. None may be changed, nor kept: other layers' may lie beside it. ``names``: the checkpoint's, one a
    piece, without ``.weight``; a tied head has one of its own. ``bias`` [O] on ``device`` in ``dtype``, which are those
    of the activations.

    ``head``: its products are logits. ``tied``: the weight is the embedding's table, too, which stays in memory
    whatever this layer keeps. A tensor in ``pieces`` then is that very table, on ``device`` in ``dtype``; it may be
    kept.
    """

    names: tuple[str, ...]
    pieces: "tuple[torch.Tensor | BlockRows, ...]"
    bias: "torch.Tensor | None"
    dtype: "torch.dtype"
    device: str
    head: bool = False
    tied: bool = False

    @property
    def in_features(self) -> int:
        return int(self.pieces[0].shape[1])

    @property
    def out_features(self) -> int:
        return sum(int(piece.shape[0]) for piece in self.pieces)


class Packed(Protocol):
    """A linear layer in its packed form. Several threads may call it at once."""

    @property
    def nbytes(self) -> int:
        """Of all that it keeps; a tied table that it shares is not its own."""

    def __call__(self, x: "torch.Tensor") -> "torch.Tensor":
        """x [T, I] of any strides, T from 0 on -> [T, O] with the bias, a new tensor of x's dtype, contiguous in O. A
        row of it does not depend on the other rows, but for their number."""


@dataclass(frozen=True)
class QuantizationSupport:
    """What the quantization takes; None stands for any. Asked at start, before any weight is read.

    ``blocks``: formats of GGUF files ("Q4_1") that it is given as the file stores them; all others it gets dequantised.
    ``needs_blocks``: it is of use only where a checkpoint holds such blocks. ``rounding``: greatest error of a product,
    relative to it (Frobenius norms, weights and rows drawn from a normal distribution), beyond the dtype's own.
    """

    devices: Sequence[str] | None = None
    dtypes: Sequence[str] | None = None
    blocks: Sequence[str] = ()
    needs_blocks: bool = False
    rounding: float = 0.0


class Quantization(Component):
    """Packs the weights of a model while it is loaded, one layer at a time."""

    kind: ClassVar[str] = "quantization"
    contract: ClassVar[str] = "quantization/1"

    @abstractmethod
    def support(self) -> QuantizationSupport:
        """ConfigError where what it needs is not installed."""

    def note(self, device: str, dtype: str) -> str:
        """What it chooses by itself there, and why, for the operator's eye at the start; empty where that goes without
        saying."""
        return ""

    def patterns(self) -> Mapping[str, str]:
        """Patterns of layers' names that its options hold (``fnmatch``), by the option's path below its own section:
        ``{"keep[0]": "*.down_proj"}``. At the start one that fits none of the model's layers is refused."""
        return {}

    @abstractmethod
    def pack(self, weight: LinearWeight) -> Packed:
        """Takes the layer's dense weight and leaves it alone; what it returns is all that stays in memory."""
