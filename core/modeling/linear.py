"""Linear layers in floating point, and what every packed form begins with."""

from collections.abc import Iterator

import torch
from torch.nn import functional

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.modeling.gguf import BlockRows

PART_VALUES = 1 << 20
"""Most weights of a layer that are converted at a time, each taking some bytes for each step on the way."""


def row_parts(weight: LinearWeight) -> Iterator[torch.Tensor | BlockRows]:
    """The pieces, some rows of one at a time, as they are stored."""
    rows = max(1, PART_VALUES // weight.in_features)
    for piece in weight.pieces:
        for start in range(0, piece.shape[0], rows):
            yield piece[start : start + rows]


def dense_parts(weight: LinearWeight) -> Iterator[torch.Tensor]:
    """[n, I] one below the other, some rows of the weight at a time: in the dtype that is stored, blocks as float32.
    None may be changed."""
    return (part if isinstance(part, torch.Tensor) else part.dequantize() for part in row_parts(weight))


def dense_weight(weight: LinearWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[O, I] on the weight's device, in ``dtype`` (default: the weight's): a tied table itself where it is that
    already, else a new tensor."""
    dtype, first = dtype or weight.dtype, weight.pieces[0]
    if weight.tied and isinstance(first, torch.Tensor) and first.dtype == dtype:
        return first
    dense = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.device)
    start = 0
    for rows in dense_parts(weight):
        dense[start : start + len(rows)].copy_(rows)
        start += len(rows)
    return dense


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """What they take, those in an order of oneDNN's with their padding."""
    sized = getattr(torch.ops.mkldnn, "_nbytes", None)
    return sum(
        int(sized(tensor)) if tensor.is_mkldnn and sized is not None else tensor.numel() * tensor.itemsize
        for tensor in tensors if tensor is not None)


class DenseLinear:
    """Implements ``Packed`` by torch's own product, on any device. A tied table is shared, not copied."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight, self.bias = dense_weight(weight), weight.bias
        shared = weight.tied and self.weight is weight.pieces[0]
        self.nbytes = tensor_bytes(self.bias, None if shared else self.weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)
