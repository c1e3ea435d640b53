"""What every quantization must do: packed layers against the dense product in float64. The whole test file of one::

    class TestMine(QuantizationSuite):
        def make_quantization(self) -> Quantization:
            return Mine()

What runs on CPUs alone is tested there; ``device`` names another.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier

import numpy as np
import pytest
import torch

from hotswap.core.interfaces.quantization import LinearWeight, Packed, Quantization
from hotswap.core.modeling.gguf import BlockRows
from hotswap.core.modeling.linear import dense_weight, tensor_bytes

ROWS = (1, 2, 3, 7, 8, 16, 33, 70)
_NO_HOLDERS = ("torch", "builtins", "numba", "ctypes", "numpy")
"""Packages in whose objects no weights are looked for."""
OWN_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of a product in the dtype itself, relative to it."""


class QuantizationSuite:
    """Subclass it and provide ``make_quantization``."""

    device = "cpu"
    shapes: Sequence[tuple[int, int]] = ((40, 96), (33, 64), (1, 32), (48, 77), (130, 256), (4, 5))
    """(O, I) of the layers that are packed: most of them odd in one way."""

    def make_quantization(self) -> Quantization:
        raise NotImplementedError("return a new quantization")

    @property
    def dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in self.make_quantization().support().dtypes or ("float32", "bfloat16")]

    def weights(self, shapes: Sequence[tuple[int, int]] | None = None) -> Iterator[LinearWeight]:
        """A layer of each shape and dtype, with a bias and without; and of each format of blocks that it takes, whole
        ones and a part of the columns that begins and ends within some."""
        for number, (outputs, inputs) in enumerate(shapes or self.shapes):
            for dtype in self.dtypes:
                yield self.weight(random_rows(outputs, inputs, number), dtype=dtype, bias=bool(number % 2))
        for format in self.make_quantization().support().blocks:
            blocks = random_blocks(format, 24, 512)
            first, width = blocks.block_values // 2, blocks.block_values * 5 // 4
            for dtype in self.dtypes:
                yield self.weight(random_blocks(format, 24), dtype=dtype, bias=True)
                yield self.weight(replace(blocks, first=first, width=width), dtype=dtype)

    def weight(
        self, *pieces: torch.Tensor | BlockRows, dtype: torch.dtype = torch.float32, bias: bool = False,
    ) -> LinearWeight:
        outputs = sum(piece.shape[0] for piece in pieces)
        offsets = random_rows(1, outputs, 3)[0].to(self.device, dtype) if bias else None
        names = tuple(f"model.layers.0.{number}" for number in range(len(pieces)))
        return LinearWeight(names, pieces, offsets, dtype, self.device)

    def check(self, packed: Packed, weight: LinearWeight, x: torch.Tensor, what: str = "") -> None:
        """``packed(x)`` is the dense product, within the declared rounding and that of the dtype. Few numbers scatter
        more than many, and one may be near zero by chance: so errors are held against what numbers are on average."""
        with torch.inference_mode():
            before, y = x.clone(), packed(x)
        expected, size = product(weight, x)
        assert y.shape == expected.shape and y.dtype == x.dtype, f"{tuple(y.shape)} {y.dtype} {what}"
        assert y.stride(-1) == 1 or y.shape[-1] == 1, f"a row of the result is not contiguous {what}"
        assert torch.equal(x, before), f"the rows that it was given have changed {what}"
        allowed = self.make_quantization().support().rounding + OWN_ROUNDING[weight.dtype]
        error = (y.double().cpu() - expected).norm() / size
        assert error <= allowed * (1 + 3 / expected.numel() ** 0.5), (
            f"{len(x)} rows of {weight.in_features} to {weight.out_features} in {weight.dtype}: the product is off by "
            f"{error:.3g} of itself, allowed are {allowed:.3g} {what}")

    def test_every_product_is_the_dense_one_within_the_declared_rounding(self) -> None:
        quantization = self.make_quantization()
        for weight in self.weights():
            packed = quantization.pack(weight)
            for rows in ROWS:
                self.check(packed, weight, self.rows(rows, weight))

    def test_rows_of_any_strides_are_taken(self) -> None:
        quantization = self.make_quantization()
        for weight in self.weights(self.shapes[:2]):
            packed = quantization.pack(weight)
            for rows in (1, 5, 9):
                wide = self.rows(rows, replace(weight, pieces=(torch.empty(1, 3 * weight.in_features),)))
                self.check(packed, weight, wide[:, 3 : 3 + weight.in_features], "(columns of a wider tensor)")
                self.check(packed, weight, self.rows(weight.in_features, weight).T[:, :rows].T, "(transposed)")
                self.check(packed, weight, self.rows(2 * rows, weight)[::2], "(every other row)")

    def test_no_rows_give_no_rows(self) -> None:
        quantization = self.make_quantization()
        for weight in self.weights(self.shapes[:1]):
            empty = torch.empty(0, weight.in_features, dtype=weight.dtype, device=self.device)
            assert quantization.pack(weight)(empty).shape == (0, weight.out_features)

    def test_a_row_does_not_depend_on_the_others(self) -> None:
        """Beside rows a thousand times as large, which would leave nothing of it under a common scale."""
        quantization = self.make_quantization()
        for weight in self.weights(self.shapes[:2]):
            packed = quantization.pack(weight)
            for rows in (4, 12):
                x = self.rows(rows, weight)
                y, loud = packed(x), x.clone()
                loud[1:] *= 1000
                torch.testing.assert_close(packed(loud)[0], y[0], rtol=1e-2, atol=1e-2 * float(y[0].abs().max()))

    def test_several_projections_lie_one_below_the_other(self) -> None:
        quantization = self.make_quantization()
        formats = quantization.support().blocks
        mixes: list[tuple[torch.Tensor | BlockRows, ...]] = [
            (random_rows(16, 256, 1), random_rows(8, 256, 2), random_rows(24, 256, 3))]
        mixes += [(random_blocks(one, 16), random_blocks(other, 8), random_rows(16, 256, 5))
                  for one in formats for other in formats]
        for pieces in mixes:
            for dtype in self.dtypes:
                weight = self.weight(*pieces, dtype=dtype, bias=True)
                packed = quantization.pack(weight)
                for rows in (1, 20):
                    self.check(packed, weight, self.rows(rows, weight), f"(of {len(pieces)} projections)")

    def test_what_it_was_given_may_change_afterwards(self) -> None:
        """The checkpoint's memory is used for the next layer."""
        quantization = self.make_quantization()
        for weight in self.weights(self.shapes[:1]):
            packed, x = quantization.pack(weight), self.rows(3, weight)
            y = packed(x)
            for piece in weight.pieces:
                (piece if isinstance(piece, torch.Tensor) else piece.data).fill_(1)
            assert torch.equal(packed(x), y), "it looks at the weights that it was given, and does not keep its own"

    def test_packing_leaves_the_weights_alone(self) -> None:
        quantization = self.make_quantization()
        for weight in self.weights(self.shapes[:2]):
            copies = [dense_weight(replace(weight, pieces=(piece,))).clone() for piece in weight.pieces]
            quantization.pack(weight)
            for piece, copy in zip(weight.pieces, copies, strict=True):
                assert torch.equal(dense_weight(replace(weight, pieces=(piece,))), copy), "the weights have changed"

    def test_a_tied_table_stays_what_it_is_and_is_not_counted(self) -> None:
        quantization = self.make_quantization()
        for dtype in self.dtypes:
            table = random_rows(64, 96, 7).to(self.device, dtype)
            weight = replace(self.weight(table, dtype=dtype), head=True, tied=True)
            copy, packed = table.clone(), quantization.pack(weight)
            self.check(packed, weight, self.rows(5, weight), "(of a tied head)")
            assert torch.equal(table, copy), "the embedding's table has changed"
            own = held_bytes(packed, but=table)
            assert packed.nbytes == pytest.approx(own, rel=0.1), f"it says {packed.nbytes} bytes, and holds {own}"

    def test_it_says_how_much_memory_it_holds(self) -> None:
        quantization = self.make_quantization()
        for weight in self.weights(((128, 256), (256, 512))):
            packed = quantization.pack(weight)
            held = held_bytes(packed)
            assert packed.nbytes == pytest.approx(held, rel=0.1), f"it says {packed.nbytes} bytes, and holds {held}"

    def test_nothing_times_anything_is_nothing(self) -> None:
        """Scales of rows, and of weights, that are all zero."""
        quantization = self.make_quantization()
        for dtype in self.dtypes:
            weight = self.weight(random_rows(16, 64, 1), dtype=dtype, bias=True)
            nothing = self.weight(torch.zeros(16, 64), dtype=dtype, bias=True)
            assert weight.bias is not None
            packed, empty = quantization.pack(weight), quantization.pack(nothing)
            for rows in (1, 12):
                x = self.rows(rows, weight)
                bias = weight.bias.expand(rows, -1)
                torch.testing.assert_close(packed(torch.zeros_like(x)), bias, rtol=0, atol=1e-3)
                torch.testing.assert_close(empty(x), bias, rtol=0, atol=1e-3)

    def test_several_threads_may_multiply_at_once(self) -> None:
        quantization = self.make_quantization()
        for weight in self.weights(self.shapes[:1]):
            packed, given = quantization.pack(weight), [self.rows(5, weight, seed) for seed in range(3)]

            def multiply(x: torch.Tensor, start: Barrier, packed: Packed = packed) -> list[torch.Tensor]:
                start.wait()
                return [packed(x) for _ in range(20)]

            # A thread of its own for what is expected, too: it has as many for its operators as the others will have.
            alone = []
            for x in given:
                with ThreadPoolExecutor(1) as pool:
                    alone.append(pool.submit(multiply, x, Barrier(1)).result()[0])
            with ThreadPoolExecutor(len(given)) as pool:
                together = list(pool.map(multiply, given, [Barrier(len(given))] * len(given)))
            assert all(torch.equal(y, expected) for expected, found in zip(alone, together, strict=True)
                       for y in found), "a product has changed beside others"

    def rows(self, count: int, weight: LinearWeight, seed: int = 0) -> torch.Tensor:
        return random_rows(count, weight.in_features, 100 + seed).to(self.device, weight.dtype)


def product(weight: LinearWeight, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, O] float64 on the CPU, of the weights as the checkpoint stores them; and the norm that it has on average."""
    dense = torch.cat([
        (piece if isinstance(piece, torch.Tensor) else piece.dequantize()).double().cpu() for piece in weight.pieces])
    x = x.double().cpu()
    y = x @ dense.T if weight.bias is None else x @ dense.T + weight.bias.double().cpu()
    return y, x.norm() * dense.norm() / dense.shape[1] ** 0.5


def random_rows(count: int, width: int, seed: int) -> torch.Tensor:
    """[count, width] float32, normally distributed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def random_blocks(format: str, count: int, width: int = 256, seed: int = 0) -> BlockRows:
    """[count, width] values, quantised as llama.cpp would; where the ``gguf`` package cannot, random numbers with
    scales that are finite."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import quantize

    kind = GGMLQuantizationType[format]
    sizes = GGML_QUANT_SIZES[kind]
    try:
        data = quantize(random_rows(count, width, seed).numpy(), kind)
    except NotImplementedError:
        random = np.random.default_rng(seed)
        data = random.integers(0, 256, (count, width // sizes[0], sizes[1]), np.uint8)
        scales = random.uniform(0.01, 0.02, (count, width // sizes[0], 2)).astype(np.float16)
        data[..., :4] = scales.view(np.uint8)  # the K formats of 4 and 5 bits begin with two scales
        data = data.reshape(count, -1)
    return BlockRows(format, torch.from_numpy(np.ascontiguousarray(data)), *sizes)


def held_bytes(holder: object, but: torch.Tensor | None = None) -> int:
    """Of all tensors that can be reached from ``holder``, each storage once, that of ``but`` aside."""
    seen: dict[object, int] = {}
    left, known = [holder], set[int]()
    while left:
        value = left.pop()
        if id(value) in known:
            continue
        known.add(id(value))
        if isinstance(value, torch.Tensor):
            if value is not but:
                strided = value.layout == torch.strided
                key = value.untyped_storage().data_ptr() if strided else id(value)
                seen[key] = value.untyped_storage().nbytes() if strided else tensor_bytes(value)
        elif isinstance(value, (list, tuple, set)):
            left.extend(value)
        elif isinstance(value, dict):
            left.extend(value.values())
        elif type(value).__module__.partition(".")[0] not in _NO_HOLDERS:
            left.extend(getattr(value, "__dict__", {}).values())
    return sum(seen.values())
