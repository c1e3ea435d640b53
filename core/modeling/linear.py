"""Linear layers in floating point, and what every packed form begins with."""

import torch
from torch.nn import functional

from hotswap.core.interfaces.quantization import LinearWeight


def dense_weight(weight: LinearWeight, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[O, I] on the weight's device, in ``dtype`` (default: the weight's): a tied table itself where it is that
    already, else a new tensor."""
    dtype, first = dtype or weight.dtype, weight.pieces[0]
    if weight.tied and isinstance(first, torch.Tensor) and first.dtype == dtype:
        return first
    dense = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.device)
    start = 0
    for piece in weight.pieces:
        rows = piece if isinstance(piece, torch.Tensor) else piece.dequantize()
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
