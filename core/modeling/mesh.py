"""The mesh: which part of each logical axis this rank holds, and how partial results meet.

Models name the axes of their weights ("heads", "kv_heads", "mlp", "vocab", "expert", "expert_mlp", "layers" …) and
call ``reduce`` where a contraction over a sharded axis ends. A sharding strategy subclasses :class:`Mesh`; no model
knows it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from hotswap.core.interfaces.parallel import CollectiveCount


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
    """One device: every axis whole, every operation the identity.

    The ranks of one engine form stages, one behind the other; without an axis "layers" on the mesh there is one stage.
    """

    alone: bool = True
    """There are no other ranks."""
    is_first: bool = True
    """This rank is in the stage that takes token ids and proposes drafts."""
    is_last: bool = True
    """This rank is in the stage that gives logits."""
    leads: bool = True
    """This rank decides for its stage."""
    in_step: bool = False
    """Other engines take part in each step: a rank without rows runs an empty one, or they would wait for it."""

    def place(self, device: str) -> str:
        """This rank's device, where the config says ``device``."""
        return device

    def shard(self, axis: str, total: int) -> Shard:
        """This rank's part of an axis with ``total`` indices."""
        return Shard(0, total)

    def reduce(self, axis: str, x: "torch.Tensor") -> "torch.Tensor":
        """The sum of ``x`` over the ranks that share ``axis``; may overwrite ``x``."""
        return x

    def gather(self, axis: str, x: "torch.Tensor", dim: int, total: int) -> "torch.Tensor":
        """The shards of ``axis`` joined along ``dim`` of ``x``, in the axis's order, ``total`` wide; ``x`` is as wide
        there as the part that :meth:`shard` gave of so many."""
        return x

    def dispatch(self, axis: str, routed: Routed, total: int) -> Routed:
        """The tokens that this rank's part of ``axis``, which has ``total`` indices, has to work on; T may be another
        than before, 0 too.

        The identity where the ranks that share ``axis`` see the same tokens; an exchange where each has its own. A
        token may arrive with experts of other ranks beside one of this rank's: those are left out here, done there."""
        return routed

    def combine(self, axis: str, y: "torch.Tensor", routed: Routed) -> "torch.Tensor":
        """The way back: ``y`` [T, hidden] of what ``dispatch`` gave, summed over the ranks that share ``axis``, for the
        tokens that went into ``dispatch``."""
        return self.reduce(axis, y)

    def share(self, x: "torch.Tensor") -> "torch.Tensor":
        """The ``x`` of the rank that leads the stage, on each of its ranks. All give the same shape and dtype."""
        return x

    def receive(self, x: "torch.Tensor") -> "torch.Tensor":
        """``x``, filled with what the stage before has passed on; on the first one as it is."""
        return x

    def pass_on(self, x: "torch.Tensor") -> None:
        """Give ``x`` to the next stage, if there is one, without waiting for it. Must not be written any more."""

    def counts(self) -> "dict[str, CollectiveCount]":
        """Calls and bytes of each operation between ranks, since the start."""
        return {}


LOCAL_MESH = Mesh()
