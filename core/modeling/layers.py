"""Layers for inference, written with logical axes: each holds this rank's part of its weights.

Legend of shapes: T tokens, I input features, O output features. A linear layer has no weight until ``load``, which
takes it from the checkpoint and keeps what the source's ``quantization`` makes of it: loading needs the model and one
layer more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from hotswap.core.interfaces.operators import OperatorSet
from hotswap.core.interfaces.quantization import LinearWeight, Packed
from hotswap.core.modeling.mesh import Mesh, Shard
from hotswap.core.modeling.operators import TORCH_OPERATORS
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

    linear: Packed
    """Since :meth:`load`."""

    def __init__(
        self, mesh: Mesh, in_features: int, outputs: Sequence[tuple[str, Axis]], bias: bool,
        dtype: torch.dtype, device: str,
    ) -> None:
        self.in_features, self.bias, self.dtype, self.device = in_features, bias, dtype, device
        self.outputs = [(name, axis.features, axis.part(mesh)) for name, axis in outputs]
        self.widths = [part.count for _, _, part in self.outputs]

    def load(self, weights: WeightSource, prefix: str) -> None:
        pieces, biases = [], []
        for name, features, part in self.outputs:
            pieces.append(weights.take_rows(f"{prefix}{name}.weight", (features, self.in_features), 0, part))
            if self.bias:
                biases.append(weights.take(f"{prefix}{name}.bias", (features,), 0, part))
        bias = torch.cat(biases).to(self.device, self.dtype) if biases else None
        names = tuple(f"{prefix}{name}" for name, _, _ in self.outputs)
        self.linear = weights.pack(LinearWeight(names, tuple(pieces), bias, self.dtype, self.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class RowLinear:
    """x [T, I'] -> [T, O]: the input features sharded along ``axis``, where the contraction ends with a reduce."""

    linear: Packed
    """Since :meth:`load`; without the bias, which is added once and not once a rank."""

    def __init__(
        self, mesh: Mesh, axis: Axis, out_features: int, bias: bool, dtype: torch.dtype, device: str,
    ) -> None:
        self.mesh, self.axis, self.part = mesh, axis, axis.part(mesh)
        self.out_features, self.dtype, self.device = out_features, dtype, device
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def load(self, weights: WeightSource, name: str) -> None:
        rows = weights.take_rows(f"{name}.weight", (self.out_features, self.axis.features), 1, self.part)
        self.linear = weights.pack(LinearWeight((name,), (rows,), None, self.dtype, self.device))
        if self.bias is not None:
            self.bias.copy_(weights.take(f"{name}.bias", (self.out_features,)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.mesh.reduce(self.axis.name, self.linear(x))
        return y if self.bias is None else y.add_(self.bias)


class RMSNorm:
    """Root-mean-square normalisation; see ``OperatorSet.rms_norm``."""

    def __init__(
        self, features: int, eps: float, dtype: torch.dtype, device: str, operators: OperatorSet = TORCH_OPERATORS,
    ) -> None:
        self.eps, self.operators = eps, operators
        self.weight = torch.empty(features, dtype=dtype, device=device)

    def load(self, weights: WeightSource, name: str) -> None:
        self.weight.copy_(weights.take(f"{name}.weight", self.weight.shape))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.operators.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``x`` [T, F] becomes x + residual; returns the norm of that."""
        return self.operators.add_rms_norm(x, residual, self.weight, self.eps)


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
    """x [N, features] -> logits [N, V] of x's dtype. ``tied``: the embedding whose table is this layer's weight, too;
    what is not packed shares it, and what is packed is a second form of it.
    """

    linear: Packed
    """Since :meth:`load`."""

    def __init__(
        self, mesh: Mesh, vocab_size: int, features: int, dtype: torch.dtype, device: str,
        tied: VocabEmbedding | None = None,
    ) -> None:
        self.mesh, self.vocab_size, self.features, self.tied = mesh, vocab_size, features, tied
        self.part, self.dtype, self.device = mesh.shard("vocab", vocab_size), dtype, device

    def load(self, weights: WeightSource, name: str, stored: str | None = None) -> None:
        """``stored``: the name of its tensor, where that is another's, too: the table's, which must have been loaded if
        this rank has it."""
        table = None if self.tied is None else self.tied.weight
        rows = weights.take_rows(f"{stored or name}.weight", (self.vocab_size, self.features), 0, self.part, table)
        self.linear = weights.pack(LinearWeight(
            (name,), (rows,), None, self.dtype, self.device, head=True, tied=self.tied is not None))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.mesh.gather("vocab", self.linear(x), -1, self.vocab_size)
