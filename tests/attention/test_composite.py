"""Two backends over the same pages: the conformance kit, who computes what, and what is refused."""

from dataclasses import replace

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import HND, NHD, AttentionSupport, GraphLevel
from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention, check_static_attention
from hotswap.plugins.attention.composite import CompositeAttention
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.attention.triton.backend import TritonAttention


class Limited(TorchAttention):
    """The torch backend, with the given differences in what it supports; counts its steps by query lengths."""

    def __init__(self, **support):
        super().__init__()
        self.differences, self.planned = support, []

    def support(self):
        return replace(super().support(), **self.differences)

    def plan(self, state, layout):
        self.planned.append(layout.query_lens)
        super().plan(state, layout)


def composite(prefill, decode):
    options = CompositeAttention.Options(prefill=prefill.name, decode=decode.name)
    return CompositeAttention(options, {"prefill": prefill, "decode": decode})


CASES = attention_cases(composite(TorchAttention(), TorchAttention()).support())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_torch_backends_agree_with_dense_attention(case):
    prefill, decode = Limited(), Limited()
    check_attention(composite(prefill, decode), case)
    assert all(set(lengths) == {1} for lengths in decode.planned)
    assert all(set(lengths) != {1} for lengths in prefill.planned)
    assert decode.planned or not any(queries == 1 for queries, _ in case.rows)
    assert prefill.planned or all(row == (1, 0) for row in case.rows)


@pytest.mark.parametrize("queries", [1, 4])
def test_steps_of_a_static_layout_agree_with_dense_attention(queries):
    prefill, decode = (TorchAttention(TorchAttention.Options(graphs=True)) for _ in range(2))
    assert composite(prefill, decode).support().graph_level is GraphLevel.UNIFORM
    check_static_attention(composite(prefill, decode), AttentionCase("static"), queries)


PAIRS = {
    "torch, then triton": (TorchAttention, TritonAttention),
    "triton, then torch": (TritonAttention, TorchAttention),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("case", [
    AttentionCase("decodes that begin pages", rows=((1, 16), (1, 32), (1, 5)), heads=2, kv_heads=1),
    AttentionCase("window", rows=((1, 16), (3, 30), (20, 5)), heads=2, kv_heads=1, window=6, page_size=4, padding=1),
], ids=str)
def test_torch_and_triton_share_pages(case, pair):
    prefill, decode = PAIRS[pair]
    check_attention(composite(prefill(), decode()), case)


def test_it_supports_what_both_do():
    support = composite(
        Limited(page_sizes=(8, 16, 32), layouts=(NHD, HND), dtypes=None, rounding=1e-3, devices=("cuda", "cpu")),
        Limited(page_sizes=(32, 16), layouts=(HND, NHD), dtypes=("float32",), softcap=False, head_dims=(64, 80)),
    ).support()
    assert support == AttentionSupport(
        devices=("cuda", "cpu"), dtypes=("float32",), head_dims=(64, 80), page_sizes=(16, 32), layouts=(NHD, HND),
        needs_clean_pages=True, leaves_clean_pages=True, windows=True, softcap=False, graph_level=GraphLevel.NEVER,
        rounding=1e-3)


@pytest.mark.parametrize(("what", "prefill", "decode", "sides"), [
    ("page size", {"page_sizes": (256, 512)}, {"page_sizes": (16,)}, "takes 256, 512; decode .* takes 16"),
    ("device", {"devices": ("cuda",)}, {"devices": ("cpu", "xpu")}, "takes cuda; decode .* takes cpu, xpu"),
    ("dtype", {"dtypes": ("bfloat16",)}, {"dtypes": ("float32",)}, "takes bfloat16; decode .* takes float32"),
    ("head size", {"head_dims": (128,)}, {"head_dims": (64,)}, "takes 128; decode .* takes 64"),
    ("page layout", {"layouts": (NHD,)}, {"layouts": (HND,)}, "takes .*'token', 'kv_heads'.*; decode .* takes .*"),
    ("page layout", {"layouts": ()}, {"layouts": (HND,)}, "takes none that others read; decode .* takes .*"),
])
def test_backends_that_have_nothing_in_common_are_refused_with_both_sides(what, prefill, decode, sides):
    with pytest.raises(ConfigError, match=f"no {what} suits both backends: prefill attention:Limited {sides}"):
        composite(Limited(**prefill), Limited(**decode))


@pytest.mark.parametrize(("prefill", "decode", "level"), [
    ((GraphLevel.UNIFORM, ""), (GraphLevel.UNIFORM, ""), GraphLevel.UNIFORM),
    ((GraphLevel.NEVER, ""), (GraphLevel.UNIFORM, ""), GraphLevel.ONE_TOKEN),
    ((GraphLevel.ANY, ""), (GraphLevel.NEVER, ""), GraphLevel.NEVER),
    ((GraphLevel.UNIFORM, "needs leaves"), (GraphLevel.UNIFORM, ""), GraphLevel.NEVER),  # decodes clear for prefill
    ((GraphLevel.UNIFORM, "needs leaves"), (GraphLevel.UNIFORM, "leaves"), GraphLevel.UNIFORM),
    ((GraphLevel.UNIFORM, ""), (GraphLevel.ONE_TOKEN, "needs leaves"), GraphLevel.ONE_TOKEN),
])
def test_its_steps_are_captured_as_far_as_each_backend_allows_for_its_own(prefill, decode, level):
    assert composite(*map(limited, (prefill, decode))).support().graph_level is level


def limited(has):
    graphs, pages = has
    return Limited(
        graph_level=graphs, needs_clean_pages="needs" in pages, leaves_clean_pages="leaves" in pages)


@pytest.mark.parametrize(("prefill", "decode", "needs", "leaves"), [
    ("", "", False, False),
    ("leaves", "", False, False),
    ("leaves", "leaves", False, True),
    ("needs leaves", "", True, True),  # what decoding begins is cleared for prefill
    ("needs leaves", "leaves", True, True),
])
def test_it_leaves_clean_pages_where_each_side_does_or_is_cleared_after(prefill, decode, needs, leaves):
    support = composite(*(limited((GraphLevel.NEVER, pages)) for pages in (prefill, decode))).support()
    assert (support.needs_clean_pages, support.leaves_clean_pages) == (needs, leaves)
