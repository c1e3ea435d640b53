"""The Triton kernels in Triton's interpreter, or on a GPU where there is one: the conformance kit, and what it is blind
to."""

import random

import pytest
import torch

from hotswap.core.interfaces.attention import NHD, GroupShape
from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention, check_static_attention
from hotswap.plugins.attention.triton.backend import TritonAttention

pytest.importorskip("triton")

SEEDS = range(20, 30)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("case", attention_cases(TritonAttention().support()), ids=str)
def test_agrees_with_dense_attention(case):
    check_attention(TritonAttention(), case, DEVICE)


def random_case(seed: int) -> AttentionCase:
    """Rows of any kind: prompts, chunks behind a past, drafts, decodes; page sizes, head ratios and features at random.
    """
    rng = random.Random(seed)
    kinds = [
        lambda: (rng.randint(1, 50), 0), lambda: (rng.randint(17, 40), rng.randint(1, 60)),
        lambda: (rng.randint(2, 16), rng.randint(0, 60)), lambda: (1, rng.randint(0, 99)),
    ]
    kv_heads = rng.choice([1, 2])
    return AttentionCase(
        f"random {seed}", rows=tuple(rng.choice(kinds)() for _ in range(rng.randint(1, 4))),
        heads=kv_heads * rng.choice([1, 3, 4, 8]), kv_heads=kv_heads, head_dim=rng.choice([64, 80, 96, 128]),
        page_size=rng.choice([8, 16, 32, 64]), window=rng.choice([None, None, rng.randint(1, 100)]),
        softcap=rng.choice([None, 5.0, 30.0]), dtype=rng.choice(["float32", "float16", "bfloat16"]),
        padding=rng.choice([0, 2]))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_batches_agree_with_dense_attention(seed):
    check_attention(TritonAttention(), random_case(seed), DEVICE)


def test_the_random_batches_have_every_page_size_head_ratio_head_size_and_dtype():
    cases = [random_case(seed) for seed in SEEDS]
    assert {case.page_size for case in cases} == {8, 16, 32, 64}
    assert {case.heads // case.kv_heads for case in cases} == {1, 3, 4, 8}
    assert {case.head_dim for case in cases} == {64, 80, 96, 128}
    assert {case.dtype for case in cases} == {"float32", "float16", "bfloat16"}


@pytest.mark.parametrize(("queries", "window"), [(1, 21), (4, None)])
def test_steps_of_a_static_layout_agree_with_dense_attention(queries, window):
    case = AttentionCase("static", heads=2, kv_heads=1, window=window)
    check_static_attention(TritonAttention(), case, queries, DEVICE)


class TokensFirst(TritonAttention):
    """The same kernels over pages in the other layout."""

    def allocate(self, shape, num_pages, limits):
        keys, values = super().allocate(laid_out(shape), num_pages, limits)
        assert keys.shape[1:] == (shape.page_size, shape.kv_heads, shape.head_dim)
        return keys, values

    def bind(self, group, shape, limits):
        return super().bind(group, laid_out(shape), limits)


def laid_out(shape: GroupShape) -> GroupShape:
    return GroupShape(**{**shape.__dict__, "layout": NHD})


@pytest.mark.parametrize("case", [AttentionCase("ragged"), AttentionCase("window", window=6, page_size=4)], ids=str)
def test_both_page_layouts_give_the_same(case):
    check_attention(TokensFirst(), case, DEVICE)
