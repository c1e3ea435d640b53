"""The mesh: which part of each logical axis this rank holds, and how partial results meet.

Models name the axes of their weights ("heads", "kv_heads", "mlp", "vocab", "expert", "expert_mlp", "layers" …) and
call ``reduce`` where a contraction over a sharded axis ends. A sharding strategy subclasses :class:`Mesh`; no model
knows it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """Indices ``start <= i < start + count`` of an axis."""

    start: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.count


class Routed(NamedTuple):
    """Tokens and the experts that they go to: x [T, hidden], experts [T, k] int64 (numbers on the whole axis), weights
    [T, k] float32. ``back`` is the mesh's own, for the way back."""

    x: "torch.Tensor"
    experts: "torch.Tensor"
    weights: "torch.Tensor"
    back: Any = None


class Mesh:
    """One device: every axis whole, every operation the identity."""

    def shard(self, axis: str, total: int) -> Shard:
        """This rank's part of an axis with ``total`` indices."""
        return Shard(0, total)

    def reduce(self, axis: str, x: "torch.Tensor") -> "torch.Tensor":
        """The sum of ``x`` over the ranks that share ``axis``; may overwrite ``x``."""
        return x

    def gather(self, axis: str, x: "torch.Tensor", dim: int) -> "torch.Tensor":
        """The shards of ``axis`` joined along ``dim`` of ``x``, in the axis's order."""
        return x

    def dispatch(self, axis: str, routed: Routed) -> Routed:
        """The tokens that this rank's part of ``axis`` has to work on; T may be another than before, 0 too.

        The identity where the ranks that share ``axis`` see the same tokens; an exchange where each has its own. A
        token may arrive with experts of other ranks beside one of this rank's: those are left out here, done there."""
        return routed

    def combine(self, axis: str, y: "torch.Tensor", routed: Routed) -> "torch.Tensor":
        """The way back: ``y`` [T, hidden] of what ``dispatch`` gave, summed over the ranks that share ``axis``, for the
        tokens that went into ``dispatch``."""
        return self.reduce(axis, y)


LOCAL_MESH = Mesh()
