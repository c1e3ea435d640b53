"""The mesh of one rank among others, on torch.distributed: NCCL between CUDA devices, gloo between CPUs."""

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from hotswap.core.interfaces.parallel import CollectiveCount, MeshDim, RankPlan
from hotswap.core.modeling.mesh import Mesh, Routed, Shard
from hotswap.plugins.parallel.exchange import combine, dispatch

STAGES = "layers"
"""The axis whose dimension makes stages."""


def over_engines(plan: RankPlan, engines: int) -> RankPlan:
    """The plan of the mesh that all ``engines`` are in: their dimension is the outermost."""
    if plan.across is None:
        return plan
    return plan.wrapped(MeshDim(plan.across.strategy, engines, plan.across.axes))


def coordinates(plan: RankPlan, rank: int) -> tuple[int, ...]:
    """Where ``rank`` is in each dimension."""
    found = []
    for dim in reversed(plan.dims):
        rank, place = divmod(rank, dim.size)
        found.append(place)
    return tuple(reversed(found))


def shard(dim: MeshDim, place: int, axis: str, total: int) -> Shard:
    """What ``place`` of ``dim`` holds of an axis; see :class:`MeshDim`."""
    if cuts := dim.cuts.get(axis):
        return Shard(cuts[place], cuts[place + 1] - cuts[place])
    start = place * total // dim.size
    return Shard(start, max(1, (place + 1) * total // dim.size - start))


def groups(plan: RankPlan, dims: Sequence[int]) -> list[tuple[int, ...]]:
    """The groups of ranks that differ in ``dims`` alone, in one order on all ranks."""
    sizes = [dim.size for dim in plan.dims]
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(product(*map(range, sizes))):
        others = tuple(0 if index in dims else at for index, at in enumerate(place))
        found.setdefault(others, []).append(rank)
    return [tuple(members) for members in found.values()]


class DistributedMesh(Mesh):
    """Ranks of one engine. Made on all of them together, after ``torch.distributed`` has begun; every operation is
    entered by all ranks of its group in the same order.

    Sums are made by the library's all-reduce, whose result is the same on every rank. Shards of unequal size are padded
    to the largest for ``gather``, and cut again.
    """

    alone = False

    def __init__(self, plan: RankPlan, rank: int, device: str, timeout: timedelta) -> None:
        self.device, self.in_step = device, plan.across is not None
        self._places = coordinates(plan, rank)
        self._dims = plan.dims
        self._of_axis = {axis: index for index, dim in enumerate(plan.dims) for axis in dim.axes}
        stages = self._of_axis.get(STAGES)
        engines = 0 if self.in_step else None  # see ``over_engines``
        within = [index for index in range(len(plan.dims)) if index not in (stages, engines)]
        self._groups = [_join(plan, [index], rank, timeout) for index in range(len(plan.dims))]
        members = next(members for members in groups(plan, within) if rank in members)
        self._stage = _join(plan, within, rank, timeout)
        self._leader, self.leads = members[0], members[0] == rank
        place, count = (0, 1) if stages is None else (self._places[stages], plan.dims[stages].size)
        self.is_first, self.is_last = place == 0, place == count - 1
        step = 1 if stages is None else prod(dim.size for dim in plan.dims[stages + 1 :])
        self._before, self._after = rank - step, rank + step
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()
        self._calls: dict[str, list[int]] = {}

    def place(self, device: str) -> str:
        return self.device

    def shard(self, axis: str, total: int) -> Shard:
        index = self._of_axis.get(axis)
        if index is None:
            return Shard(0, total)
        return shard(self._dims[index], self._places[index], axis, total)

    def reduce(self, axis: str, x: torch.Tensor) -> torch.Tensor:
        index = self._of_axis.get(axis)
        if index is None or self._dims[index].size == 1:
            return x
        x = x.contiguous()
        self._count(f"reduce {self._dims[index].strategy}", x)
        dist.all_reduce(x, group=self._groups[index])
        return x

    def gather(self, axis: str, x: torch.Tensor, dim: int, total: int) -> torch.Tensor:
        index = self._of_axis.get(axis)
        if index is None or self._dims[index].size == 1:
            return x
        dim_of, mine = self._dims[index], x.shape[dim]
        widths = [shard(dim_of, place, axis, total).count for place in range(dim_of.size)]
        padding = [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, max(widths) - mine]
        padded = functional.pad(x, padding).contiguous()
        self._count(f"gather {dim_of.strategy}", padded)
        parts = [torch.empty_like(padded) for _ in widths]
        dist.all_gather(parts, padded, group=self._groups[index])
        return torch.cat([part.narrow(dim, 0, width) for part, width in zip(parts, widths, strict=True)], dim)

    def dispatch(self, axis: str, routed: Routed, total: int) -> Routed:
        if not self._exchanges(axis):
            return routed
        counted = self._counted("dispatch")
        dim = self._dims[0]
        owner = torch.tensor(
            [place for place in range(dim.size) for _ in range(shard(dim, place, axis, total).count)],
            device=routed.experts.device)[routed.experts]
        return dispatch(routed, owner, dim.size, self._groups[0], counted)

    def combine(self, axis: str, y: torch.Tensor, routed: Routed) -> torch.Tensor:
        if not self._exchanges(axis):
            return super().combine(axis, y, routed)
        return combine(y, routed, self._groups[0], self._counted("combine"))

    def _exchanges(self, axis: str) -> bool:
        return self.in_step and self._of_axis.get(axis) == 0

    def _counted(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda x: self._count(f"{name} {self._dims[0].strategy}", x)

    def share(self, x: torch.Tensor) -> torch.Tensor:
        if self._stage is not None:
            self._count("share", x)
            dist.broadcast(x, self._leader, group=self._stage)
        return x

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_first:
            self._count("receive", x)
            dist.recv(x, self._before)
        return x

    def pass_on(self, x: torch.Tensor) -> None:
        if self.is_last:
            return
        x = x.contiguous()
        self._count("pass on", x)
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        self._sending.append((dist.isend(x, self._after), x))

    def counts(self) -> dict[str, CollectiveCount]:
        return {name: CollectiveCount(*count) for name, count in self._calls.items()}

    def _count(self, name: str, x: torch.Tensor) -> None:
        count = self._calls.setdefault(name, [0, 0])
        count[0] += 1
        count[1] += x.nbytes


def _join(plan: RankPlan, dims: Sequence[int], rank: int, timeout: timedelta) -> Any:
    """The process group along ``dims`` that ``rank`` is in; None where it is alone there. All ranks make all groups."""
    mine = None
    for members in groups(plan, dims):
        if len(members) > 1:
            group = dist.new_group(members, timeout=timeout)
            mine = group if rank in members else mine
    return mine
