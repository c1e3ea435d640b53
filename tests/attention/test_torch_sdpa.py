"""The torch backend passes the conformance kit, and the kit fails backends that deserve it."""

from dataclasses import replace

import pytest
import torch

from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention
from hotswap.plugins.attention.torch_sdpa import TorchAttention


@pytest.mark.parametrize("case", attention_cases(TorchAttention().support()), ids=str)
def test_agrees_with_dense_attention(case):
    check_attention(TorchAttention(), case)


class ShapeDropper(TorchAttention):
    """Ignores parts of the shape that it was bound to."""

    dropped: dict[str, None]

    def bind(self, group, shape, limits):
        return super().bind(group, replace(shape, **self.dropped), limits)


@pytest.mark.parametrize("case", [AttentionCase("softcap", softcap=5.0), AttentionCase("window", window=6)], ids=str)
def test_the_kit_finds_a_feature_that_was_silently_dropped(case):
    backend = ShapeDropper()
    backend.dropped = {case.name: None}
    with pytest.raises(AssertionError, match="differs from dense"):
        check_attention(backend, case)


class PastForgetter(TorchAttention):
    """Aligns the mask of a chunk to its own start."""

    def plan(self, state, layout):
        super().plan(state, layout)
        state.staircase = state.staircase.roll(1, dims=1)


def test_the_kit_finds_a_mask_that_is_off_by_one():
    with pytest.raises(AssertionError, match="differs from dense"):
        check_attention(PastForgetter(), AttentionCase("chunk", rows=((40, 33),)))


class NeighbourReader(TorchAttention):
    """Lets a row see the keys of pages beyond its end."""

    def plan(self, state, layout):
        super().plan(state, layout)
        for rows in state.short:
            rows.mask = torch.zeros_like(rows.mask)


def test_the_kit_finds_rows_that_depend_on_their_neighbours():
    with pytest.raises(AssertionError):
        check_attention(NeighbourReader(), AttentionCase("decode", rows=((1, 7), (1, 40))))
