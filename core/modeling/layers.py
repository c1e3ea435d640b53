"""Layers for inference, written with logical axes: each holds this rank's part of its weights.

Legend of shapes: T tokens, I input features, O output features. Weights are allocated when a layer is made and filled
by ``load``, one tensor of the checkpoint at a time, so that loading needs the model and one tensor more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from hotswap.core.modeling.mesh import Mesh, Shard
from hotswap.core.modeling.weights import WeightSource


@dataclass(frozen=True)
class Axis:
    """``count`` indices along a logical axis, each of which is ``unit`` features wide (a head: its size)."""

    name: str
    count: int
    unit: int = 1

    @property
    def features(self) -> int:
        return self.count * self.unit

    def part(self, mesh: Mesh) -> Shard:
        """This rank's features."""
        shard = mesh.shard(self.name, self.count)
        return Shard(shard.start * self.unit, shard.count * self.unit)


class ColumnLinear:
    """x [T, I] -> [T, O']: one or several projections of the same input, their output features sharded.

    Several projections are one multiplication; ``widths`` says where to split its result.
    """

    def __init__(
        self, mesh: Mesh, in_features: int, outputs: Sequence[tuple[str, Axis]], bias: bool,
        dtype: torch.dtype, device: str,
    ) -> None:
        self.in_features = in_features
        self.outputs = [(name, axis.features, axis.part(mesh)) for name, axis in outputs]
        self.widths = [part.count for _, _, part in self.outputs]
        self.weight = torch.empty(sum(self.widths), in_features, dtype=dtype, device=device)
        self.bias = torch.empty(sum(self.widths), dtype=dtype, device=device) if bias else None

    def load(self, weights: WeightSource, prefix: str) -> None:
        start = 0
        for name, features, part in self.outputs:
            rows = slice(start, start + part.count)
            self.weight[rows].copy_(weights.take(f"{prefix}{name}.weight", (features, self.in_features), 0, part))
            if self.bias is not None:
                self.bias[rows].copy_(weights.take(f"{prefix}{name}.bias", (features,), 0, part))
            start += part.count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


class RowLinear:
    """x [T, I'] -> [T, O]: the input features sharded along ``axis``, where the contraction ends with a reduce."""

    def __init__(
        self, mesh: Mesh, axis: Axis, out_features: int, bias: bool, dtype: torch.dtype, device: str,
    ) -> None:
        self.mesh = mesh
        self.axis = axis
        self.part = axis.part(mesh)
        self.weight = torch.empty(out_features, self.part.count, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def load(self, weights: WeightSource, name: str) -> None:
        out_features = self.weight.shape[0]
        self.weight.copy_(weights.take(f"{name}.weight", (out_features, self.axis.features), 1, self.part))
        if self.bias is not None:
            self.bias.copy_(weights.take(f"{name}.bias", (out_features,)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mesh.reduce(self.axis.name, functional.linear(x, self.weight))
        return y if self.bias is None else y.add_(self.bias)  # once, not once a rank


class RMSNorm:
    """Root-mean-square normalisation (Zhang and Sennrich, 2019), computed in float32."""

    def __init__(self, features: int, eps: float, dtype: torch.dtype, device: str) -> None:
        self.eps = eps
        self.weight = torch.empty(features, dtype=dtype, device=device)

    def load(self, weights: WeightSource, name: str) -> None:
        self.weight.copy_(weights.take(f"{name}.weight", self.weight.shape))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype)
        return normed.mul_(self.weight)


class VocabEmbedding:
    """Token ids [T] -> [T, features]; the vocabulary sharded."""

    def __init__(self, mesh: Mesh, vocab_size: int, features: int, dtype: torch.dtype, device: str) -> None:
        self.mesh = mesh
        self.vocab_size = vocab_size
        self.part = mesh.shard("vocab", vocab_size)
        self.weight = torch.empty(self.part.count, features, dtype=dtype, device=device)

    def load(self, weights: WeightSource, name: str) -> None:
        shape = (self.vocab_size, self.weight.shape[1])
        self.weight.copy_(weights.take(f"{name}.weight", shape, 0, self.part))

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        if self.part.count == self.vocab_size:
            return functional.embedding(ids, self.weight)
        local = ids - self.part.start
        mine = (local >= 0) & (local < self.part.count)
        rows = functional.embedding(local.where(mine, 0), self.weight)
        return self.mesh.reduce("vocab", rows * mine[:, None])


class VocabHead:
    """x [N, features] -> logits [N, V] float32. Shares its weight with ``tied`` where given, else has one to load."""

    def __init__(
        self, mesh: Mesh, vocab_size: int, features: int, dtype: torch.dtype, device: str,
        tied: VocabEmbedding | None = None,
    ) -> None:
        self.mesh = mesh
        self.table = tied or VocabEmbedding(mesh, vocab_size, features, dtype, device)

    def load(self, weights: WeightSource, name: str) -> None:
        self.table.load(weights, name)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(x, self.table.weight)
        return self.mesh.gather("vocab", logits, -1, self.table.vocab_size).float()
