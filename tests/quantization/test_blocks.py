"""GGUF blocks are computed with as they are, and reach a rank as its part of the tensor, rows in our order."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from hotswap.core.interfaces.quantization import LinearWeight, QuantizationSupport
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.gguf import BlockRows
from hotswap.core.modeling.mesh import Shard
from hotswap.core.testing.quantization import product, random_blocks, random_rows
from hotswap.core.testing.rig import build
from hotswap.plugins.quantization.gguf import FORMATS
from hotswap.plugins.quantization.kernel_linear import no_kernels
from hotswap.plugins.quantization.torch_linear import Int4Linear


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_scales_and_least_values_are_exactly_what_the_blocks_stand_for(name, dense):
    """Q4_K has products of two scales, which are rounded to float16."""
    blocks = random_blocks(name, 48, 512)
    groups = FORMATS[name].read(blocks.data)
    assert groups.bits == FORMATS[name].bits
    assert groups.numbers.dtype == torch.uint8 and int(groups.numbers.max()) < 1 << groups.bits
    for values in (groups.scales, groups.least):
        assert torch.equal(values.half().float(), values), "the kernels keep float16"
    exact = blocks.dequantize()
    allowed = 5e-4 * float(exact.abs().max()) if name == "Q4_K" else 1e-7
    torch.testing.assert_close(dense(groups), exact, rtol=1e-6, atol=allowed)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "Q8_0"])
def test_torch_s_product_is_that_of_the_same_weights_up_to_the_rounding_of_scale_and_zero(name, dense):
    """In float32 nothing is rounded; in bfloat16 scales and zeros, each to 8 bits."""
    blocks = random_blocks(name, 48, 512)
    for dtype, allowed in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3)):
        groups = FORMATS[name].read(blocks.data)
        values, exact = Int4Linear(groups, None, dtype)(torch.eye(512, dtype=dtype)).T.float(), dense(groups)
        assert (values - exact).norm() / exact.norm() <= allowed


def weights_of(path, blocks=("Q4_0", "Q4_1", "Q8_0")):
    """A source of weights whose quantization takes these formats."""
    weights = open_checkpoint(str(path), progress=False).weights()
    weights.quantization = SimpleNamespace(support=lambda: QuantizationSupport(blocks=blocks))
    return weights


@pytest.mark.parametrize("part", [None, (0, 16), (32, 32)])
def test_rows_come_in_our_order_and_a_part_of_them_is_a_part_of_the_blocks(make_gguf, part):
    """q's rows are interleaved in the file."""
    path, shard = make_gguf(), part and Shard(*part)
    for name, shape in (("q_proj", (64, 64)), ("v_proj", (32, 64))):
        if shard and shard.stop > shape[0]:
            continue
        tensor = f"model.layers.1.self_attn.{name}.weight"
        blocks = weights_of(path).take_rows(tensor, shape, 0, shard)
        dense = open_checkpoint(str(path), progress=False).weights().take(tensor, shape, 0, shard)
        assert (blocks.type, blocks.shape) == ("Q4_1", tuple(dense.shape))
        assert torch.equal(blocks.dequantize(), dense)


@pytest.mark.parametrize(("part", "stored"), [((64, 64), 64), ((96, 32), 32), ((48, 32), 64), ((5, 100), 128)])
def test_a_part_of_the_columns_is_the_blocks_in_which_it_lies(make_gguf, part, stored):
    path, name, shape, shard = make_gguf(), "model.layers.0.mlp.down_proj.weight", (64, 128), Shard(*part)
    dense = open_checkpoint(str(path), progress=False).weights().take(name, shape)[:, shard.start : shard.stop]
    blocks = weights_of(path).take_rows(name, shape, 1, shard)
    assert (blocks.type, blocks.shape) == ("Q4_1", (64, shard.count)) and torch.equal(blocks.dequantize(), dense)
    assert blocks.data.shape == (64, stored // blocks.block_values * blocks.block_bytes), "more than it touches"
    taken = open_checkpoint(str(path), progress=False).weights().take(name, shape, 1, shard)
    assert torch.equal(taken, dense)


@pytest.mark.parametrize("part", [None, Shard(0, 32), Shard(32, 32)])
def test_only_a_part_of_the_file_is_copied_for_a_part_of_a_tensor(make_gguf, part, monkeypatch):
    """And the formats that are taken as they are stored are asked for once."""
    asked, read, from_numpy = [], [], torch.from_numpy

    def support():
        asked.append(1)
        return QuantizationSupport(blocks=("Q4_1",))

    def counted(array):
        read.append(array.nbytes)
        return from_numpy(array)

    weights = open_checkpoint(str(make_gguf()), progress=False).weights()
    weights.quantization = SimpleNamespace(support=support)
    monkeypatch.setattr(torch, "from_numpy", counted)
    for name in ("q_proj", "o_proj"):
        weights.take_rows(f"model.layers.1.self_attn.{name}.weight", (64, 64), 0, part)
    assert len(asked) == 1
    rows = part.count if part else 64
    assert read == [rows * 2 * 20] * 2, "blocks of 20 bytes hold 32 values"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_part_that_ends_within_a_block_is_multiplied_as_it_is_stored(name, kernels, caplog):
    """Blocks of 256 hold 8 groups, of which tensor parallelism may leave 5."""
    quantization = build("quantization", "gguf", kernels=kernels, many_rows=None)
    whole = random_blocks(name, 64, 512)
    part = replace(whole, first=96, width=320)
    weight = LinearWeight(("a",), (part,), None, torch.float32, "cpu")
    packed, x = quantization.pack(weight), random_rows(3, 320, 6)
    expected, size = product(weight, x)
    assert (packed(x).double() - expected).norm() / size <= 0.02
    assert packed.nbytes < 64 * 320 * 2, "it was dequantised"
    assert not caplog.records


@pytest.mark.skipif(bool(no_kernels()), reason=no_kernels())
@pytest.mark.parametrize("name", FORMATS)
def test_what_kernels_multiply_as_it_is_stored_is_not_dequantised(name, monkeypatch):
    blocks, packer = random_blocks(name, 24, 512), build("quantization", "gguf")
    monkeypatch.setattr(BlockRows, "dequantize", lambda self: pytest.fail("dequantised for nothing"))
    packer.pack(LinearWeight(("a",), (blocks,), None, torch.float32, "cpu"))


def test_a_part_that_begins_within_a_group_is_dequantised_and_that_is_said_once(caplog):
    quantization = build("quantization", "gguf")
    part = replace(random_blocks("Q4_1", 16, 128), first=48, width=32)
    weight = LinearWeight(("model.layers.0.mlp.down_proj",), (part,), None, torch.float32, "cpu")
    x = random_rows(3, 32, 6)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            found = quantization.pack(weight)(x).double()
            torch.testing.assert_close(found, product(weight, x)[0], rtol=1e-4, atol=1e-4)
    [told] = caplog.messages
    assert "dequantises model.layers.0.mlp.down_proj, stored as Q4_1" in told and "group of 32" in told


def test_formats_that_it_does_not_take_come_dequantised(make_gguf):
    name, shape = "model.layers.0.mlp.down_proj.weight", (64, 128)
    assert isinstance(weights_of(make_gguf("Q5_0")).take_rows(name, shape), torch.Tensor)
    assert isinstance(weights_of(make_gguf("Q4_1"), ("Q4_0",)).take_rows(name, shape), torch.Tensor)


def test_projections_of_different_formats_are_multiplied_in_parts_and_keep_their_order():
    quantization = build("quantization", "gguf", many_rows=None, q8_0="dense", kernels="torch")
    pieces = (random_blocks("Q4_0", 16, 64), random_blocks("Q8_0", 8, 64), random_blocks("Q4_1", 24, 64),
              random_blocks("Q4_0", 8, 64), random_rows(16, 64, 4))
    weight = LinearWeight(tuple("abcde"), pieces, random_rows(1, 72, 5)[0], torch.float32, "cpu")
    x = random_rows(3, 64, 6)
    torch.testing.assert_close(
        quantization.pack(weight)(x).double(), product(weight, x)[0], rtol=1e-4, atol=1e-4)
