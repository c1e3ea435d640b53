"""Layers whose weights kernels of our own multiply: :mod:`hotswap.plugins.cpu.linear_kernels` is told where they are.
"""

import struct
import threading
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn import functional

from hotswap.core.modeling.linear import PART_VALUES, tensor_bytes
from hotswap.plugins.cpu import linear_words as w
from hotswap.plugins.cpu import memory
from hotswap.plugins.cpu.team import Kernel, ThreadWords, Words, compile_kernels, is_recorded, team_note
from hotswap.plugins.quantization.grouped import Groups, Spans
from hotswap.plugins.quantization.torch_support import processor_has

_CALL = struct.Struct(f"7q{8 * (w.LAYER - 7)}x")
"""What changes with each product, before counters that begin at zero."""
_LAYER = struct.Struct(f"{w.NUM_WORDS - w.LAYER}q")

ALONE = 1 << 15
"""Bytes of weights, times rows, that one thread multiplies sooner than it finds another."""

KEPT = 1 << 20
"""Bytes that a thread keeps for its next rows in 8 bits."""


class _Scratch(threading.local):
    """Of each thread its own, for all layers."""

    def __init__(self) -> None:
        self.memory, self.size = torch.empty(0, dtype=torch.uint8), 0

    def of(self, size: int) -> torch.Tensor:
        """At least ``size`` bytes."""
        if is_recorded():
            return torch.empty(size, dtype=torch.uint8)  # which stays where it is for the record
        if size <= self.size:
            return self.memory
        found = torch.empty(size, dtype=torch.uint8)
        if size <= KEPT:
            self.memory, self.size = found, size
        return found


_scratch = _Scratch()


def no_kernels() -> str:
    """Why they cannot be used; empty where they can."""
    if not processor_has(("avx512_vnni",)):
        return "the processor has no AVX-512 instructions for products of 8-bit numbers"
    if find_spec("numba") is None:
        return "the package numba is not installed"
    from numba.core.registry import cpu_target  # late: it takes most of a second

    loops = import_module("hotswap.plugins.cpu.linear_loops")
    if not loops.dots_are_added(cpu_target.target_context):
        return "numba compiles for a processor without AVX-512 products of 8-bit numbers"
    return team_note()


class KernelLinear:
    """Implements ``Packed``: rows are brought to 8 bits in groups of 32, and multiplied with the weights' numbers."""

    def __init__(self, numbers: Groups | Spans, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._out_features, self._in_features = numbers.numbers.shape
        self._weights = tiles(numbers)
        num_tiles, num_groups, _ = self._weights.shape
        form, scales = (numbers.bits, None) if isinstance(numbers, Groups) else ("spans", numbers.scales)
        self._bias = _by_tile(num_tiles, [bias] if scales is None else [bias, *scales.t()])
        self.nbytes = tensor_bytes(self._weights, self._bias)
        self._row_bytes, self._size = w.ROW_BYTES * num_groups, self._weights.numel()
        self._words = ThreadWords(partial(
            _LayerWords, self._in_features, num_groups, self._weights.data_ptr(), self._bias.data_ptr(),
            self._out_features * dtype.itemsize, self._out_features))
        kernels = import_module("hotswap.plugins.cpu.linear_kernels")  # late: it imports numba
        self._kernel: Kernel = getattr(kernels, f"multiply_{form}_{str(dtype).removeprefix('torch.')}")
        compile_kernels([self._kernel])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        words, (tokens, _), (row, column) = self._words.of_call(), x.shape, x.stride()  # quicker than asking one by one
        out = x.new_empty(tokens, self._out_features)
        if not tokens:
            return out
        if column != 1:
            x, row = x.contiguous(), self._in_features
        shared = tokens * self._size > ALONE
        threads = torch.get_num_threads() if shared else 1
        scratch = _scratch.of(tokens * self._row_bytes * (threads if tokens <= w.FEW else 1))
        _CALL.pack_into(
            words.memory, words.skip, 0, tokens, threads, x.data_ptr(), row * x.itemsize, scratch.data_ptr(),
            out.data_ptr())
        self._kernel(words, shared)
        return out


class _LayerWords(Words):
    """With what is the same in each call of a layer."""

    def __init__(self, *layer: int) -> None:
        super().__init__(8 * w.NUM_WORDS)
        _LAYER.pack_into(self.memory, self.skip + 8 * w.LAYER, self.address, *layer)


def _by_tile(num_tiles: int, values: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """float32 [tiles, values, TILE], zero where there are none: each has one for each output feature."""
    own = torch.zeros(len(values), num_tiles * w.TILE)
    for place, each in zip(own, values, strict=True):
        if each is not None:
            place[: len(each)] = each
    return own.view(len(own), num_tiles, w.TILE).transpose(0, 1).contiguous()


def tiles(numbers: Groups | Spans) -> torch.Tensor:
    """uint8 [tiles, G, bytes of a block], as :mod:`hotswap.plugins.cpu.linear_words` says; made some at a time."""
    count, num_groups = (-(-size // by) for size, by in zip(numbers.numbers.shape, (w.TILE, w.GROUP), strict=True))
    size = w.block_bytes(numbers.bits) if isinstance(numbers, Groups) else w.block_bytes(8, scales=False)
    packed = memory.empty(count * num_groups * size).view(count, num_groups, size)
    some = max(1, PART_VALUES // (num_groups * w.GROUP * w.TILE))
    for first in range(0, count, some):
        packed[first : first + some] = _some_tiles(numbers.rows(slice(first * w.TILE, (first + some) * w.TILE)))
    return packed


def _some_tiles(groups: Groups | Spans) -> torch.Tensor:
    outputs, inputs = groups.numbers.shape
    more = (0, -inputs % w.GROUP, 0, -outputs % w.TILE)
    padded = functional.pad(groups.numbers, more)
    numbers = padded.view(-1, w.TILE, padded.shape[1] // w.GROUP, w.GROUP // 4, 4)
    numbers = numbers.permute(0, 2, 3, 1, 4).flatten(3)  # [tiles, G, 8, TILE * 4]
    if isinstance(groups, Spans):
        return numbers.flatten(2)
    if groups.bits == 4:
        numbers = numbers[:, :, 0::2] | (numbers[:, :, 1::2] << 4)
    kept = (groups.scales,) if groups.bits == 8 else (groups.scales, groups.least)
    rest = [functional.pad(each, (0, 0, 0, more[3])).view(-1, w.TILE, each.shape[1]) for each in kept]
    halves = [each.transpose(1, 2).half().contiguous().view(torch.uint8) for each in rest]  # [tiles, G, TILE * 2]
    return torch.cat([numbers.flatten(2), *halves], 2)
