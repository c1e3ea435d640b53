"""Elementwise operators in torch's own."""

import torch

from hotswap.core.interfaces.operators import Operators, OperatorSet
from hotswap.core.modeling.operators import TORCH_OPERATORS


class TorchOperators(Operators):
    """Each operator as a few calls of torch. The reference.

    Choose it to compare with, and wherever nothing else fits: it runs on every device and in every dtype.
    """

    def bind(self, device: str, dtype: torch.dtype) -> OperatorSet:
        return TORCH_OPERATORS
