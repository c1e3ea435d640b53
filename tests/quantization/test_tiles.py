"""bfloat16 weights in tiles: products are exact but for float32 sums, and a row has the same bits in any company."""

from importlib import import_module

import pytest
import torch

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.testing.quantization import random_rows
from hotswap.plugins.cpu import bfloat16_words as w
from hotswap.plugins.cpu import memory
from hotswap.plugins.cpu.team import Kernel
from hotswap.plugins.quantization import tiled_linear
from hotswap.plugins.quantization.none import PrepackedLinear, no_bfloat16_kernels, unquantised
from hotswap.plugins.quantization.tiled_linear import TiledLinear, no_tiles, tiles

pytestmark = pytest.mark.skipif(bool(no_tiles()), reason=no_tiles())

BFLOAT16 = torch.bfloat16


def weight_of(outputs, inputs, bias=None, pieces=1):
    weight = random_rows(outputs, inputs, 1).to(BFLOAT16)
    return LinearWeight(("test",), tuple(weight.chunk(pieces)), bias, BFLOAT16, "cpu"), weight


@pytest.mark.parametrize("shape", [(48, 32), (1, 2), (16, 64), (33, 6), (50, 70), (100, 96), (144, 576)])
def test_products_are_exact_but_for_sums_in_float32(shape):
    bias = random_rows(1, shape[0], 2)[0].to(BFLOAT16)
    packed, weight = weight_of(*shape, bias, pieces=min(3, shape[0]))
    layer = TiledLinear(packed)
    for count in (0, 1, 2, 3, 5, 8, 9, 15, 300):
        x = random_rows(count, shape[1], count).to(BFLOAT16)
        expected = x.double() @ weight.double().T + bias.double()
        found = layer(x)
        assert found.dtype == BFLOAT16
        torch.testing.assert_close(found, expected.to(BFLOAT16), rtol=2**-7, atol=1e-5 * shape[1] ** 0.5)


def test_a_row_has_the_same_bits_in_every_company():
    layer = TiledLinear(weight_of(200, 512)[0])
    x = random_rows(300, 512, 3).to(BFLOAT16)
    together = layer(x)
    for count in (1, 2, 3, 4, 7, 8, 11, 23, 129):
        assert torch.equal(layer(x[:count]), together[:count])
        assert torch.equal(layer(x[300 - count :]), together[300 - count :])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(layer(x), together)
    finally:
        torch.set_num_threads(threads)


def test_rows_may_have_any_strides():
    layer, x = TiledLinear(weight_of(64, 32)[0]), random_rows(6, 64, 1).to(BFLOAT16)
    expected = layer(x[:, :32].contiguous())
    assert torch.equal(layer(x[:, :32]), expected)
    assert torch.equal(layer(x[:, :32].T.contiguous().T), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_seen_in_its_row_and_in_no_other(value):
    layer, x = TiledLinear(weight_of(70, 96)[0]), random_rows(9, 96, 2).to(BFLOAT16)
    healthy = layer(x)
    x[4, 50] = value
    found = layer(x)
    assert not found[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(found[others], healthy[others])


def test_weights_of_large_layers_lie_in_large_pages(monkeypatch):
    monkeypatch.setattr(memory, "_chunk", None)  # somebody else may be in it
    small, large = (tiles([torch.ones(rows, 64, dtype=BFLOAT16)], rows, 64) for rows in (48, 1200))
    begin = torch.frombuffer(memory._chunk(), dtype=torch.uint8).data_ptr()
    assert 0 <= large[0].data_ptr() - begin < memory.PAGE
    assert not 0 <= small[0].data_ptr() - begin < memory.CHUNK


@pytest.mark.parametrize("outputs", [40, 48, 50, 96, 130])
def test_tiles_are_laid_out_as_their_words_say(outputs):
    weight = weight_of(outputs, 6)[1]
    packed = tiles(iter(weight.split(7)), outputs, 6)
    assert len(packed) == -(-outputs // w.TILE) and packed[0].data_ptr() % 64 == 0
    for number, tile in enumerate(packed):
        begin = packed[0].data_ptr() + 2 * number * w.TILE * 6
        assert tile.data_ptr() == begin and tile.is_contiguous() and tile.shape[1] % w.VECTOR == 0
        rows = weight[number * w.TILE : (number + 1) * w.TILE]
        assert torch.equal(tile.transpose(0, 1)[: len(rows)].flatten(1), rows)
        assert not tile[:, len(rows) :].any() and tile.shape[1] - len(rows) < w.VECTOR


def test_the_kernel_multiplies_where_it_is_the_fastest(monkeypatch):
    even, odd = weight_of(48, 32)[0], weight_of(48, 31)[0]
    assert isinstance(unquantised(even), TiledLinear)
    if no_bfloat16_kernels():
        return
    assert isinstance(unquantised(odd), PrepackedLinear), "its input features cannot be taken in pairs"
    assert isinstance(unquantised(even, "torch"), PrepackedLinear)
    monkeypatch.setattr(tiled_linear, "processor_has", lambda names: True)
    assert "AMX" in no_tiles() and isinstance(unquantised(even), PrepackedLinear)


def test_without_the_instructions_nothing_is_compiled_instead_of_the_products(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("hotswap.plugins.cpu.bfloat16_loops.pairs_are_multiplied", lambda context, kind: False)
    assert "without AVX-512 products" in no_tiles()
    kernels = import_module("hotswap.plugins.cpu.bfloat16_kernels")
    with pytest.raises(RuntimeError, match="need AVX-512 with BF16"):
        Kernel(kernels.multiply_bfloat16._function).compile()
