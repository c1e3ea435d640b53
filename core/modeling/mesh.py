"""The mesh: which part of each logical axis this rank holds, and how partial results meet.

Models name the axes of their weights ("heads", "kv_heads", "mlp", "vocab", "layers" …) and call ``reduce`` where a
contraction over a sharded axis ends. A sharding strategy subclasses :class:`Mesh`; no model knows it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


LOCAL_MESH = Mesh()
