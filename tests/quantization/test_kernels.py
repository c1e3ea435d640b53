"""Kernels of our own: exact but for the rounding of activations, and the same bits for a row wherever it stands."""

import weakref
from importlib import import_module

import numpy as np
import pytest
import torch

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.testing.quantization import random_blocks, random_rows
from hotswap.plugins.cpu import linear_words as w
from hotswap.plugins.cpu import memory
from hotswap.plugins.cpu.team import Kernel
from hotswap.plugins.quantization.gguf import FORMATS
from hotswap.plugins.quantization.grouped import quantize_groups, quantize_spans
from hotswap.plugins.quantization.kernel_linear import KernelLinear, no_kernels, tiles

pytestmark = pytest.mark.skipif(bool(no_kernels()), reason=no_kernels())

DTYPES = (torch.float32, torch.bfloat16)


def rounded(x):
    """x [T, I] as the kernels bring it to 8 bits, float64."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 32)).unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    numbers = (groups / scales.where(scales > 0, 1)).round()
    return (numbers.double() * scales.double()).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(16, 32), (1, 32), (17, 96), (40, 70), (130, 1), (64, 576)])
def test_products_are_exact_but_for_the_rounding_of_rows(bits, shape, dense):
    groups, bias = quantize_groups(random_rows(*shape, 1), bits), random_rows(1, shape[0], 2)[0]
    layer = KernelLinear(groups, bias, torch.float32)
    for count in (1, 2, 3, 5, 8, 15, 19):
        x = random_rows(count, shape[1], count)
        expected = rounded(x) @ dense(groups).double().T + bias.double()
        # Where a value lies halfway between two numbers, either is right.
        error = (layer(x).double() - expected).abs().max() / expected.abs().max()
        assert error < 2e-4, f"{count} rows: {error:.3g}"


def spans(*shape):
    weight = random_rows(*shape, 1)
    weight[shape[0] // 2] = 0
    return quantize_spans(LinearWeight(("test",), (weight,), None, torch.float32, "cpu")), weight


@pytest.mark.parametrize("shape", [(16, 32), (17, 96), (40, 230), (130, 1), (64, 576)])
def test_products_with_a_scale_for_192_weights_are_exact_but_for_the_rounding_of_rows(shape):
    (numbers, weight), bias = spans(*shape), random_rows(1, shape[0], 2)[0]
    scales = numbers.scales.repeat_interleave(192, 1)[:, : shape[1]]
    layer, dense = KernelLinear(numbers, bias, torch.float32), (numbers.numbers - 128.0) * scales
    assert ((dense - weight).abs() <= 0.501 * scales).all()
    for count in (1, 2, 3, 5, 15):
        x = random_rows(count, shape[1], count)
        expected = rounded(x) @ dense.double().T + bias.double()
        error = (layer(x).double() - expected).abs().max() / expected.abs().max()
        assert error < 2e-4, f"{count} rows: {error:.3g}"


@pytest.mark.parametrize("name", [*FORMATS, "spans"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_company(name, dtype):
    numbers = spans(200, 512)[0] if name == "spans" else FORMATS[name].read(random_blocks(name, 200, 512).data)
    layer = KernelLinear(numbers, None, dtype)
    x = random_rows(150, 512, 3).to(dtype)
    together = layer(x)
    for count in (1, 2, 3, 4, 7, 8, 11, 23, 64, 71):
        assert torch.equal(layer(x[:count]), together[:count])
        assert torch.equal(layer(x[150 - count :]), together[150 - count :])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("bits", [4, 8])
def test_outliers_spoil_their_own_group_alone(bits):
    """A thousand in one of 32 inputs: what the others give is not rounded to nothing."""
    groups = quantize_groups(random_rows(16, 128, 1), bits)
    layer, x = KernelLinear(groups, None, torch.float32), random_rows(1, 128, 2)
    quiet = torch.cat([torch.zeros(1, 32), x[:, 32:]], 1)
    x[:, 5] = 1000.0
    loud = torch.cat([x[:, :32], torch.zeros(1, 96)], 1)
    torch.testing.assert_close(layer(x), layer(quiet) + layer(loud), rtol=1e-5, atol=2e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_in_its_row_and_in_no_other(value):
    layer, x = KernelLinear(quantize_groups(random_rows(24, 96, 1), 4), None, torch.float32), random_rows(9, 96, 2)
    healthy = layer(x)
    x[4, 50] = value
    found = layer(x)
    assert not found[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(found[others], healthy[others])


def test_zeros_and_the_smallest_numbers_are_no_trouble():
    layer = KernelLinear(quantize_groups(torch.zeros(16, 64), 8), torch.ones(16), torch.float32)
    for x in (torch.zeros(3, 64), torch.full((3, 64), 1e-44), random_rows(3, 64, 1)):
        assert torch.equal(layer(x), torch.ones(3, 16))


def test_a_bias_is_added_before_the_sum_is_rounded():
    groups = quantize_groups(random_rows(16, 32, 1), 8)
    x = random_rows(4, 32, 2).bfloat16()
    exact = KernelLinear(groups, torch.full((16,), 0.3, dtype=torch.bfloat16), torch.float32)(x.float())
    found = KernelLinear(groups, torch.full((16,), 0.3, dtype=torch.bfloat16), torch.bfloat16)(x)
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_tile_is_laid_out_as_its_words_say(bits):
    groups = quantize_groups(random_rows(60, 64, 1), bits)
    packed = tiles(groups)
    assert packed.shape == (2, 2, w.block_bytes(bits))
    block = packed[1, 1]  # outputs 48 to 59, inputs 32 to 63
    for output, k in ((0, 0), (3, 7), (2, 4), (11, 5)):
        four = groups.numbers[48 + output, 32 + 4 * k : 36 + 4 * k]
        at = (k if bits == 8 else k // 2) * 4 * w.TILE + 4 * output
        raw = block[at : at + 4] if bits == 8 else (block[at : at + 4] >> (4 * (k % 2))) & 15
        assert torch.equal(raw, four)
    scales = block[w.TILE * 32 * bits // 8 :].view(torch.float16)
    assert torch.equal(scales[:12].float(), groups.scales[48:, 1])
    if bits == 4:
        assert torch.equal(scales[w.TILE : w.TILE + 12].float(), groups.least[48:, 1])


def test_blocks_of_spans_are_numbers_alone_and_scales_stand_behind_the_biases():
    numbers, _ = spans(60, 224)
    packed = tiles(numbers)
    assert packed.shape == (2, 7, w.TILE * w.GROUP)
    assert torch.equal(packed[1, 6, 7 * 4 * w.TILE + 12 :][:4], numbers.numbers[48 + 3, 192 + 28 :])
    layer = KernelLinear(numbers, torch.ones(60), torch.float32)
    assert layer.nbytes == packed.numel() + 2 * 3 * 4 * w.TILE  # of two tiles biases, and scales of two spans
    assert torch.equal(layer(torch.zeros(1, 224)), torch.ones(1, 60))


def test_large_weights_lie_in_large_pages_one_behind_the_other_and_are_given_back(monkeypatch):
    monkeypatch.setattr(memory, "_chunk", None)  # somebody else may be in it
    size = memory.LEAST + 1
    first, second = memory.empty(size), memory.empty(size)
    assert second.data_ptr() - first.data_ptr() == memory.LEAST + memory.LINE
    assert first.data_ptr() % memory.LINE == 0
    own, third = memory.empty(2 * memory.CHUNK), memory.zeros(size)
    assert third.data_ptr() - second.data_ptr() == memory.LEAST + memory.LINE, "a large one is by itself"
    first.fill_(1), second.fill_(2), own.fill_(3)
    assert len(own) == 2 * memory.CHUNK and int(first.sum()) == size and int(second.sum()) == 2 * size
    assert not third.any()
    mapped = weakref.ref(memory._chunk())
    del first, second, third, own
    assert mapped() is None


def test_without_the_instructions_nothing_is_compiled_instead_of_the_products(monkeypatch, tmp_path):
    """``no_kernels`` has told before; whoever did not ask must not get a kernel that computes nothing."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("hotswap.plugins.cpu.linear_loops.dots_are_added", lambda context: False)
    assert "without AVX-512 products" in no_kernels()
    kernels = import_module("hotswap.plugins.cpu.linear_kernels")
    with pytest.raises(RuntimeError, match="need AVX-512 with VNNI"):
        Kernel(kernels.multiply_8_float32._function).compile()


def test_rows_are_not_brought_to_8_bits_in_vectors_of_another_width_than_tiles(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("hotswap.plugins.cpu.vectors.lanes_of", lambda context: 8)
    shrink = import_module("hotswap.plugins.cpu.linear_rows").shrink
    form, kind = np.int8(0), np.float32(0)

    def alone(data):
        shrink(0, 0, 0, 0, 0, form, kind)

    with pytest.raises(RuntimeError, match="vectors of 16, and here are such of 8"):
        Kernel(alone).compile()
