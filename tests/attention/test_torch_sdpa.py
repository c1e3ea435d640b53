"""The torch backend passes the conformance kit, and the kit fails backends that deserve it."""

import resource
import sys
from dataclasses import replace

import pytest
import torch

from hotswap.core.interfaces.attention import BatchLimits, GroupShape
from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention, check_static_attention
from hotswap.plugins.attention.torch_sdpa import TorchAttention


@pytest.mark.parametrize("case", attention_cases(TorchAttention().support()), ids=str)
def test_agrees_with_dense_attention(case):
    check_attention(TorchAttention(), case)


STATIC = [
    AttentionCase("plain"), AttentionCase("window", window=21, page_size=4), AttentionCase("softcap", softcap=5.0)]


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("case", STATIC, ids=str)
def test_steps_of_a_static_layout_agree_with_dense_attention(case, queries):
    check_static_attention(TorchAttention(TorchAttention.Options(graphs=True)), case, queries)


class RowForgetter(TorchAttention):
    """Keeps the pages of the step before."""

    def plan(self, state, layout):
        super().plan(state, layout)
        if layout.static:
            state.first = getattr(state, "first", state.short[0].blocks.clone())
            state.short[0].blocks.copy_(state.first)


def test_the_kit_finds_a_static_step_that_sees_an_earlier_one():
    with pytest.raises(AssertionError, match="static layout"):
        check_static_attention(RowForgetter(), AttentionCase("plain"))


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has other units elsewhere")
def test_a_large_cache_takes_memory_only_when_it_is_written():
    limits, pages = BatchLimits(1, 1, 1, "cpu", "bfloat16"), 1 << 19
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    keys, values = TorchAttention().allocate(GroupShape(1, 1, 64, 16, 1.0), pages, limits)  # 1 GiB each
    assert keys.shape == values.shape == (pages, 1, 16, 64)
    assert keys.dtype == torch.bfloat16
    assert not keys[-1].any()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 19  # KiB


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
