"""The Triton kernels compiled, on a GPU: accuracy at the sizes they are meant for, and whole models through engines."""

import pytest
import torch

from hotswap.core.testing.attention import AttentionCase, attention_cases, check_attention, check_static_attention
from hotswap.plugins.attention.composite import CompositeAttention
from hotswap.plugins.attention.torch_sdpa import TorchAttention
from hotswap.plugins.attention.triton.backend import TritonAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGE = [
    AttentionCase(
        f"{head_dim}, {heads} heads over {kv_heads}, {dtype}, pages of {page_size}", head_dim=head_dim, heads=heads,
        kv_heads=kv_heads, dtype=dtype, page_size=page_size, window=window, softcap=softcap, padding=2,
        rows=((1, 9000), (1, 300), (1200, 0), (90, 2000), (5, 4100), (1, 0)))
    for head_dim, heads, kv_heads, dtype, page_size, window, softcap in (
        (128, 32, 8, "bfloat16", 16, None, None),
        (64, 9, 3, "float16", 64, None, None),
        (80, 32, 32, "bfloat16", 8, 1000, None),
        (96, 32, 32, "float16", 32, 2047, None),
        (256, 8, 4, "bfloat16", 16, 4096, 50.0),
        (128, 8, 1, "float32", 16, None, None),
        (64, 71, 1, "bfloat16", 1, None, None),
    )
]


@pytest.mark.parametrize("case", [*attention_cases(TritonAttention().support()), *LARGE], ids=str)
def test_agrees_with_dense_attention(case):
    check_attention(TritonAttention(), case, "cuda")


@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_of_a_static_layout_agree_with_dense_attention(dtype, queries):
    check_static_attention(TritonAttention(), AttentionCase("static", dtype=dtype, window=21), queries, "cuda")


@pytest.mark.parametrize("pair", [(TorchAttention, TritonAttention), (TritonAttention, TorchAttention)])
def test_torch_and_triton_share_pages(pair):
    prefill, decode = (backend() for backend in pair)
    options = CompositeAttention.Options(prefill=prefill.name, decode=decode.name)
    composite = CompositeAttention(options, {"prefill": prefill, "decode": decode})
    for rows in (((1, 16), (1, 32), (1, 5)), ((1, 16), (3, 30), (20, 5))):
        check_attention(composite, AttentionCase("shared", rows=rows), "cuda")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_kernels_run_on_the_device_that_was_asked_for():
    torch.cuda.set_device(0)
    check_attention(TritonAttention(), AttentionCase("second device"), "cuda:1")


@pytest.fixture
def pool() -> AttentionCase:
    """More elements of keys than 32 bits count: 4.3 GiB, and as much of values."""
    return AttentionCase("far", rows=((1, 40), (20, 5)), dtype="float16")


def test_a_pool_may_hold_more_elements_than_32_bits_count(pool):
    class Distant(TritonAttention):
        def allocate(self, shape, num_pages, limits):
            self.far = 2**31 // (shape.kv_heads * shape.page_size * shape.head_dim)
            self.pools = super().allocate(shape, self.far + num_pages, limits)
            return tuple(tensor[-num_pages:] for tensor in self.pools)

        def plan(self, state, layout):
            pages = layout.groups["group"]
            pages.page_table.add_(self.far)
            pages.slots.add_(self.far * pages.page_size)
            super().plan(state, layout)

        def run(self, state, q, k, v, cache, out):
            super().run(state, q, k, v, self.pools, out)

    check_attention(Distant(), pool, "cuda")
