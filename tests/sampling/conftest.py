"""Batches in one line, and an independent statement of what the filters mean."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hotswap.core.execution.sampling_table import SamplingBatch, SamplingTable
from hotswap.core.request import SamplingParams

MakeBatch = Callable[..., SamplingBatch]
Reference = Callable[[torch.Tensor, SamplingParams], "np.ndarray[Any, Any]"]


@pytest.fixture
def make_batch() -> MakeBatch:
    def make(params: list[SamplingParams], seeds: Any = None, positions: Any = None) -> SamplingBatch:
        table = SamplingTable()
        names = [str(row) for row in range(len(params))]
        for row, (name, each) in enumerate(zip(names, params, strict=True)):
            table.add(name, each, row if seeds is None else int(seeds[row]))
        return table.batch(names, np.zeros(len(names), int) if positions is None else positions)

    return make


@pytest.fixture
def reference() -> Reference:
    """The processed distribution of one row [V] in float64, by the definitions, one token after the other."""

    def distribution(logits: torch.Tensor, params: SamplingParams) -> "np.ndarray[Any, Any]":
        x = logits.double().numpy()
        if params.greedy:
            return np.eye(len(x))[int(x.argmax())]
        x = (x - x.max()) / params.temperature
        probs = np.exp(x) / np.exp(x).sum()
        best_first = sorted(range(len(x)), key=lambda token: (-x[token], token))
        if params.top_k > 0:
            probs = _only(probs, best_first[: params.top_k])
        if params.top_p < 1:
            probs = _only(probs, _smallest(probs, best_first, params.top_p))
        if params.min_p > 0:
            probs = _only(probs, [token for token in best_first if probs[token] >= params.min_p * probs.max() - 1e-12])
        if params.typical_p < 1:
            alive = [token for token in best_first if probs[token] > 0]
            entropy = -sum(probs[token] * np.log(probs[token]) for token in alive)
            alive.sort(key=lambda token: abs(-np.log(probs[token]) - entropy))
            probs = _only(probs, _smallest(probs, alive, params.typical_p))
        return probs

    return distribution


def _only(probs: Any, kept: list[int]) -> Any:
    result = np.zeros_like(probs)
    result[kept] = probs[kept]
    return result / result.sum()


def _smallest(probs: Any, order: list[int], mass: float) -> list[int]:
    kept, held = [], 0.0
    for token in order:
        if held >= mass:
            break
        kept.append(token)
        held += probs[token]
    return kept
