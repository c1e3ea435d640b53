"""Touches a few tokens in each of a few rows of logits with one indexing operation for the whole batch."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Ids = np.ndarray[Any, np.dtype[np.int64]]


def as_ids(tokens: Any) -> Ids:
    """Token ids as int64 [n]."""
    return np.fromiter(tokens, dtype=np.int64)


def index_pairs(rows: Sequence[int], ids: Sequence[Ids], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two int64 tensors that index a batch's logits at ``ids[i]`` of row ``rows[i]``, for each i, in that order."""
    row_index = np.repeat(np.asarray(rows, dtype=np.int64), [len(each) for each in ids])
    return torch.from_numpy(row_index).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def repeat(values: Sequence[float], ids: Sequence[Ids], device: torch.device) -> torch.Tensor:
    """``values[i]`` for each of ``ids[i]``, float32, in the order of :func:`index_pairs`."""
    repeated = np.repeat(np.asarray(values, dtype=np.float32), [len(each) for each in ids])
    return torch.from_numpy(repeated).to(device)


def mask(logits: torch.Tensor, rows: Sequence[int], ids: Sequence[Ids]) -> None:
    """Exclude ``ids[i]`` from row ``rows[i]``."""
    if rows:
        logits[index_pairs(rows, ids, logits.device)] = -torch.inf
