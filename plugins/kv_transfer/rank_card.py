"""What a rank tells of its part of the cache, and which parts of whose cache another rank needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter

from hotswap.core.interfaces.kv_transfer import AxisShard, CachePages, GroupPages

HEADS = "kv_heads"


class LayoutMismatchError(ValueError):
    """Two caches whose pages cannot be exchanged; the message names both sides."""


@dataclass(frozen=True)
class GroupCard:
    """``shape``: of one page of one tensor, without its heads; ``layers``: of this rank, counted over the model."""

    page_size: int
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    kv_heads: AxisShard
    layers: tuple[int, ...]


@dataclass(frozen=True)
class RankCard:
    """``rank``: a name of its own. ``model``: the checkpoint's revision. ``address``: where the rank can be asked, in
    whatever way its transfer asks."""

    engine: str
    rank: str
    model: str
    dtype: str
    groups: dict[str, GroupCard]
    address: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, cache: CachePages, engine: str, rank: str, model: str, address: Mapping[str, Any]) -> "RankCard":
        return cls(engine, rank, model, cache.dtype, {
            name: GroupCard(
                pages.page_size, pages.axes, _without_heads(pages), pages.kv_heads,
                tuple(layer.layer for layer in pages.layers))
            for name, pages in cache.groups.items()}, dict(address))

    def text(self) -> str:
        return _CARD.dump_json(self).decode()

    @property
    def label(self) -> str:
        return f"rank {self.rank} of engine {self.engine}"


_CARD = TypeAdapter(RankCard)


def card_from(text: str) -> RankCard:
    """ValueError where ``text`` is no card."""
    return _CARD.validate_json(text)


def _without_heads(pages: GroupPages) -> tuple[int, ...]:
    page = pages.layers[0].tensors[0].shape[1:] if pages.layers else ()
    return tuple(size for axis, size in zip(pages.axes[1:], page, strict=False) if axis != HEADS)


class Read(NamedTuple):
    """Layers and heads of one group that one rank has. ``heads`` are counted over the model."""

    rank: str
    group: str
    layers: tuple[int, ...]
    first_head: int
    heads: int


def check_match(mine: RankCard, theirs: RankCard) -> None:
    """LayoutMismatchError where pages of ``theirs`` mean nothing to ``mine``."""
    pairs: list[tuple[str, object, object]] = [
        ("model", mine.model, theirs.model), ("dtype", mine.dtype, theirs.dtype),
        ("cache groups", sorted(mine.groups), sorted(theirs.groups))]
    for name in mine.groups.keys() & theirs.groups.keys():
        one, other = mine.groups[name], theirs.groups[name]
        pairs += [
            (f"page size of group {name!r}", one.page_size, other.page_size),
            (f"page layout of group {name!r}", (one.axes, one.shape), (other.axes, other.shape)),
            (f"KV heads of group {name!r}", one.kv_heads.total, other.kv_heads.total)]
        if HEADS not in one.axes and one.kv_heads != other.kv_heads:
            pairs.append((f"KV heads per rank of group {name!r}, which its layout cannot divide", one.kv_heads,
                          other.kv_heads))
    for what, ours, foreign in pairs:
        if ours != foreign:
            raise LayoutMismatchError(f"{what}: {mine.label} has {ours}, {theirs.label} has {foreign}")


def plan_reads(mine: RankCard, peers: Sequence[RankCard]) -> list[Read]:
    """From whom ``mine`` reads what, so that each of its layers and heads is read once. Where several ranks have the
    same, the first is asked. LayoutMismatchError where something is nowhere."""
    for peer in peers:
        check_match(mine, peer)
    reads: dict[tuple[str, str, int, int], list[int]] = {}
    for name, group in mine.groups.items():
        for layer in group.layers:
            head, end = group.kv_heads.start, group.kv_heads.start + group.kv_heads.count
            while head < end:
                having = [peer for peer in peers if _has(peer.groups[name], layer, head)]
                if not having:
                    raise LayoutMismatchError(
                        f"{mine.label} needs head {head} of layer {layer}, which no rank of its peer has")
                theirs = having[0].groups[name].kv_heads
                count = min(end, theirs.start + theirs.count) - head
                reads.setdefault((having[0].rank, name, head, count), []).append(layer)
                head += count
    return [Read(rank, name, tuple(layers), head, count) for (rank, name, head, count), layers in reads.items()]


def _has(group: GroupCard, layer: int, head: int) -> bool:
    return layer in group.layers and group.kv_heads.start <= head < group.kv_heads.start + group.kv_heads.count


def take(
    pages: GroupPages, ids: Sequence[int], layers: Sequence[int], first_head: int, heads: int,
) -> list[torch.Tensor]:
    """Copies of pages ``ids``, keys and values of each layer in turn: [P, ...] with ``heads`` heads, on the CPU."""
    index = torch.tensor(list(ids), dtype=torch.long, device=_device(pages))
    return [
        part.index_select(0, index).contiguous().cpu() for part in _parts(pages, layers, first_head, heads)]


def put(
    pages: GroupPages, ids: Sequence[int], layers: Sequence[int], first_head: int, heads: int,
    blocks: Sequence[torch.Tensor],
) -> None:
    """The opposite of :func:`take`: write ``blocks`` into pages ``ids``."""
    index = torch.tensor(list(ids), dtype=torch.long, device=_device(pages))
    for part, block in zip(_parts(pages, layers, first_head, heads), blocks, strict=True):
        part.index_copy_(0, index, block.to(part.device))


def block_shape_of(card: GroupCard, count: int, heads: int | None = None) -> tuple[int, ...]:
    """Of what :func:`take` gives for ``count`` pages and ``heads`` heads, by default all of the rank."""
    rest, shape = iter(card.shape), [count]
    for axis in card.axes[1:]:
        shape.append((card.kv_heads.count if heads is None else heads) if axis == HEADS else next(rest))
    return tuple(shape)


def _parts(pages: GroupPages, layers: Sequence[int], first_head: int, heads: int) -> list[torch.Tensor]:
    """Views of the tensors, narrowed to the heads."""
    known = {layer.layer: layer.tensors for layer in pages.layers}
    start = first_head - pages.kv_heads.start
    if HEADS not in pages.axes:
        return [tensor for layer in layers for tensor in known[layer]]
    dim = pages.axes.index(HEADS)
    return [tensor.narrow(dim, start, heads) for layer in layers for tensor in known[layer]]


def _device(pages: GroupPages) -> torch.device:
    return pages.layers[0].tensors[0].device
