"""Tokens to the ranks of their experts and back, by all-to-all, where each rank has tokens of its own.

After GShard (Lepikhin et al., 2020), without a capacity: every token arrives. A token goes once to each rank that has
any of its experts, not once to each expert.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hotswap.core.modeling.mesh import Routed

Counted = Callable[[torch.Tensor], None]
"""Is told each tensor that this rank puts in."""


class Way(NamedTuple):
    """The way back. ``order``: the tokens that were sent, by rank; ``sent`` and ``received``: how many to and from each
    rank; ``own``: this rank's tokens."""

    order: torch.Tensor
    sent: list[int]
    received: list[int]
    own: int


def dispatch(routed: Routed, owner: torch.Tensor, size: int, group: Any, counted: Counted) -> Routed:
    """``owner`` [T, k]: the rank of each expert that is to work on a token. All ranks of ``group`` call it together."""
    rows = [(owner == rank).any(1).nonzero()[:, 0] for rank in range(size)]
    order, sizes = torch.cat(rows), torch.tensor([len(part) for part in rows], device=owner.device)
    theirs = torch.empty_like(sizes)
    dist.all_to_all_single(theirs, sizes, group=group)
    way = Way(order, sizes.tolist(), theirs.tolist(), len(owner))
    x, experts, weights = (
        _send(part[order], way.sent, way.received, group, counted)
        for part in (routed.x, routed.experts, routed.weights))
    return Routed(x, experts, weights, way)


def combine(y: torch.Tensor, routed: Routed, group: Any, counted: Counted) -> torch.Tensor:
    """``y``: what this rank's experts add, for the tokens that :func:`dispatch` gave -> [T, hidden] of its own tokens.

    Parts are added in the order of ranks, so that the sum does not depend on who answers first."""
    way: Way = routed.back
    back = _send(y, way.received, way.sent, group, counted)
    total = y.new_zeros(way.own, y.shape[1])
    start = 0
    for count in way.sent:
        total[way.order[start : start + count]] += back[start : start + count]  # no token is in a part twice
        start += count
    return total


def _send(x: torch.Tensor, sent: list[int], received: list[int], group: Any, counted: Counted) -> torch.Tensor:
    x = x.contiguous()
    counted(x)
    arrived = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(arrived, x, received, sent, group=group)
    return arrived
