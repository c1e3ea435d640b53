"""The most probable token of each row of logits, in whatever dtype they are."""

import numpy as np
import torch

from hotswap.core.execution.randomness import Array

_NEGATIVE_INFINITY = {torch.bfloat16: 0xFF80, torch.float16: 0xFC00}
"""How 16 bits spell it. What is larger, read as an unsigned integer, is NaN."""


def most_probable(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of ``logits`` [N, V], the id of the largest [N] int64, the lowest among equals, and its value [N] as
    float32: NaN where there is any in the row."""
    if logits.device.type != "cpu":
        return logits.argmax(-1), logits.amax(-1).float()
    if logits.dtype in _NEGATIVE_INFINITY:
        return _largest_of_16_bits(logits)
    # numpy's search is twenty times as fast as torch's, and ends at the first NaN.
    return _with_values(logits, logits.detach().numpy().argmax(-1))


def _largest_of_16_bits(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`most_probable`, without making float32 of all logits: read as integers, positive numbers are in the
    same order, and larger than all negative ones. Rows without a positive number go the long way; so do those with a
    negative NaN, which is the largest of what begins with a minus."""
    bits = logits.detach().view(torch.int16).numpy()
    tokens, best = _with_values(logits, bits.argmax(-1))
    no_numbers = bits.view(np.uint16).max(-1) > _NEGATIVE_INFINITY[logits.dtype]
    rows = torch.from_numpy(np.flatnonzero(no_numbers | ~(best.numpy() > 0)))
    if len(rows):
        some = logits[rows].detach().float()
        tokens[rows], best[rows] = _with_values(some, some.numpy().argmax(-1))
    return tokens, best


def _with_values(logits: torch.Tensor, tokens: Array) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.from_numpy(tokens)
    return ids, logits.gather(1, ids[:, None]).squeeze(1).float()
