"""A model by itself: whole sequences, attended by the definition, on one rank or on several that are threads."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.parallel import MeshDim, RankPlan
from hotswap.core.modeling.checkpoint import Checkpoint
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh, Shard

Result = TypeVar("Result")


class PlainAttention:
    """Implements ``Attend``: causal attention over one sequence, keys and values of earlier calls included."""

    def __init__(self, model: Model) -> None:
        shapes = model.attention_shapes({})
        self.shapes = {layer: shapes[spec.group] for spec in model.cache_specs() for layer in spec.layers}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        shape = self.shapes[layer]
        assert q.shape[1:] == (shape.heads, shape.head_dim) and k.shape == v.shape, f"q {q.shape} and k {k.shape}"
        assert k.shape[1:] == (shape.kv_heads, shape.head_dim), f"k {tuple(k.shape)}, where {shape} was announced"
        for known, new in ((self.keys, k), (self.values, v)):
            known[layer] = torch.cat([known[layer], new]) if layer in known else new
        k, v = (x.repeat_interleave(shape.heads // shape.kv_heads, 1) for x in (self.keys[layer], self.values[layer]))
        scores = torch.einsum("qhd,khd->hqk", q, k) * shape.scale
        if shape.softcap is not None:
            scores = shape.softcap * (scores / shape.softcap).tanh()
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = distance < 0
        if shape.window is not None:
            hidden |= distance >= shape.window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def loaded(model: Model, checkpoint: Checkpoint, mesh: Mesh = LOCAL_MESH) -> Model:
    """``model``, built and loaded in float32 on the CPU."""
    model.build(checkpoint.config, mesh, torch.float32, "cpu")
    with checkpoint.weights() as weights:
        model.load(weights)
    return model


@torch.inference_mode()
def logits_of(
    model: Model, ids: Sequence[int], chunks: Sequence[int] | None = None, mesh: Mesh = LOCAL_MESH,
) -> torch.Tensor:
    """Logits [T, V] of one sequence, computed in chunks of the given lengths (default: at once); empty where the rank
    is in no last stage."""
    attend, rows, start = PlainAttention(model), [], 0
    for length in chunks or [len(ids)]:
        part = torch.tensor(ids[start : start + length])
        hidden = torch.empty(0) if mesh.is_first else mesh.receive(torch.empty(0))
        x = model.forward(part if mesh.is_first else hidden, torch.arange(start, start + length), attend)
        if mesh.is_last:
            rows.append(model.head(x))
        else:
            mesh.pass_on(x)
        start += length
    return torch.cat(rows) if rows else torch.empty(0)


class ThreadMesh(Mesh):
    """One rank of a plan whose ranks are threads of this process. An axis is divided as :class:`MeshDim` says."""

    alone = False

    def __init__(self, plan: RankPlan, rank: int, ranks: "_Ranks") -> None:
        self._dims, self._ranks, self.rank = plan.dims, ranks, rank
        places, left = [], rank
        for dim in reversed(plan.dims):
            left, place = divmod(left, dim.size)
            places.append(place)
        self._places = tuple(reversed(places))
        stage = next((i for i, dim in enumerate(plan.dims) if "layers" in dim.axes), None)
        self._stage = stage
        self.is_first = stage is None or self._places[stage] == 0
        self.is_last = stage is None or self._places[stage] == plan.dims[stage].size - 1
        self._step = 1
        for dim in plan.dims[len(plan.dims) if stage is None else stage + 1 :]:
            self._step *= dim.size

    def shard(self, axis: str, total: int) -> Shard:
        index = self._index(axis)
        return Shard(0, total) if index is None else _part(self._dims[index], self._places[index], axis, total)

    def reduce(self, axis: str, x: torch.Tensor) -> torch.Tensor:
        index = self._index(axis)
        return x if index is None else torch.stack(self._ranks.exchange(self.rank, self._group(index), x)).sum(0)

    def gather(self, axis: str, x: torch.Tensor, dim: int, total: int) -> torch.Tensor:
        index = self._index(axis)
        return x if index is None else torch.cat(self._ranks.exchange(self.rank, self._group(index), x), dim)

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_first else self._ranks.take(self.rank - self._step, self.rank)

    def pass_on(self, x: torch.Tensor) -> None:
        if not self.is_last:
            self._ranks.put(self.rank, self.rank + self._step, x)

    def _index(self, axis: str) -> int | None:
        return next((i for i, dim in enumerate(self._dims) if axis in dim.axes and dim.size > 1), None)

    def _group(self, index: int) -> tuple[int, ...]:
        """The ranks that differ from this one in dimension ``index`` alone."""
        stride = 1
        for dim in self._dims[index + 1 :]:
            stride *= dim.size
        first = self.rank - self._places[index] * stride
        return tuple(first + i * stride for i in range(self._dims[index].size))


def _part(dim: MeshDim, place: int, axis: str, total: int) -> Shard:
    if cuts := dim.cuts.get(axis):
        return Shard(cuts[place], cuts[place + 1] - cuts[place])
    start = place * total // dim.size
    return Shard(start, max(1, (place + 1) * total // dim.size - start))


class _Ranks:
    """Where the threads meet. A thread that waits for one that has failed fails, too."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: dict[Any, Any] = {}
        self.counts: dict[Any, int] = {}
        self.failed = False

    def exchange(self, rank: int, group: tuple[int, ...], x: torch.Tensor) -> list[torch.Tensor]:
        """What every rank of the group has given in its call of the same number."""
        number = self.counts[group, rank] = self.counts.get((group, rank), 0) + 1
        self._put((group, rank, number), x.clone())
        return [self._get((group, other, number)) for other in group]

    def put(self, source: int, target: int, x: torch.Tensor) -> None:
        number = self.counts[source, target] = self.counts.get((source, target), 0) + 1
        self._put((source, target, number), x.clone())

    def take(self, source: int, target: int) -> torch.Tensor:
        key = ("taken", source, target)
        number = self.counts[key] = self.counts.get(key, 0) + 1
        return self._get((source, target, number))

    def fail(self) -> None:
        with self.changed:
            self.failed = True
            self.changed.notify_all()

    def _put(self, key: Any, x: torch.Tensor) -> None:
        with self.changed:
            self.values[key] = x
            self.changed.notify_all()

    def _get(self, key: Any) -> torch.Tensor:
        with self.changed:
            met = self.changed.wait_for(lambda: key in self.values or self.failed, 60)
            if not met or key not in self.values:
                raise RuntimeError(f"another rank has failed, or takes no part in {key}")
            value: torch.Tensor = self.values[key]
            return value


def on_ranks(plan: RankPlan, work: Callable[[ThreadMesh], Result]) -> list[Result]:
    """``work(mesh)`` on every rank of the plan, side by side; their results in order. The first error is raised."""
    ranks, errors = _Ranks(), list[BaseException]()
    results: dict[int, Result] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadMesh(plan, rank, ranks))
        except BaseException as error:
            errors.append(error)
            ranks.fail()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(plan.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(plan.world_size)]
