"""Layers whose weights kernels of our own multiply: :mod:`hotswap.plugins.cpu.linear_kernels` is told where they are.
"""

import struct
from importlib import import_module
from importlib.util import find_spec

import torch
from torch.nn import functional

from hotswap.core.modeling.linear import PART_VALUES, tensor_bytes
from hotswap.plugins.cpu import linear_words as w
from hotswap.plugins.cpu.team import Kernel, Words, compile_kernels, team_note
from hotswap.plugins.quantization.grouped import Groups
from hotswap.plugins.quantization.torch_support import processor_has

_WORDS = struct.Struct(f"{w.COUNTERS}q{w.NUM_WORDS - w.COUNTERS}q")
_COUNTERS = (0,) * w.COUNTERS
ALONE = 1 << 15
"""Bytes of weights that one thread multiplies sooner than it finds another."""


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

    def __init__(self, groups: Groups, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._out_features, self._in_features = groups.numbers.shape
        self._weights = tiles(groups)
        self._num_tiles, self._num_groups = self._weights.shape[:2]
        self._bias = torch.zeros(self._num_tiles * w.TILE)
        if bias is not None:
            self._bias[: self._out_features] = bias
        self.nbytes = tensor_bytes(self._weights, self._bias)
        self._words, self._alone = Words(_WORDS.size), self._weights.numel() < ALONE
        kernels = import_module("hotswap.plugins.cpu.linear_kernels")  # late: it imports numba
        self._kernel: Kernel = getattr(kernels, f"multiply_{groups.bits}_{str(dtype).removeprefix('torch.')}")
        compile_kernels([self._kernel])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens, groups = len(x), self._num_groups
        out = torch.empty(tokens, self._out_features, dtype=x.dtype)
        if not tokens:
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        scratch = torch.empty(tokens * groups * (w.GROUP + 8), dtype=torch.uint8)
        numbers, words, itemsize = scratch.data_ptr(), self._words, x.itemsize
        scales = numbers + tokens * groups * w.GROUP
        shared = tokens > 1 or not self._alone
        threads = torch.get_num_threads() if shared else 1
        _WORDS.pack_into(
            words.memory, words.skip, *_COUNTERS, words.address, tokens, self._in_features, groups,
            x.data_ptr(), x.stride(0) * itemsize, numbers, scales, scales + tokens * groups * 4,
            self._weights.data_ptr(), self._num_tiles, max(1, self._num_tiles // (4 * threads)),
            self._bias.data_ptr(), out.data_ptr(), self._out_features * itemsize, self._out_features)
        self._kernel(words.address, shared)
        return out


def tiles(groups: Groups) -> torch.Tensor:
    """uint8 [tiles, G, bytes of a block], as :mod:`hotswap.plugins.cpu.linear_words` says; made some at a time."""
    count, num_groups = -(-len(groups.numbers) // w.TILE), groups.scales.shape[1]
    packed = torch.empty(count, num_groups, w.block_bytes(groups.bits), dtype=torch.uint8)
    some = max(1, PART_VALUES // (num_groups * w.GROUP * w.TILE))
    for first in range(0, count, some):
        packed[first : first + some] = _some_tiles(groups.rows(slice(first * w.TILE, (first + some) * w.TILE)))
    return packed


def _some_tiles(groups: Groups) -> torch.Tensor:
    outputs, inputs = groups.numbers.shape
    more = (0, -inputs % w.GROUP, 0, -outputs % w.TILE)
    padded = functional.pad(groups.numbers, more)
    numbers = padded.view(-1, w.TILE, padded.shape[1] // w.GROUP, w.GROUP // 4, 4)
    numbers = numbers.permute(0, 2, 3, 1, 4).flatten(3)  # [tiles, G, 8, TILE * 4]
    if groups.bits == 4:
        numbers = numbers[:, :, 0::2] | (numbers[:, :, 1::2] << 4)
    rest = [functional.pad(each, (0, 0, 0, more[3])).view(-1, w.TILE, each.shape[1]) for each in (
        groups.scales, groups.least)]
    halves = [each.transpose(1, 2).half().contiguous().view(torch.uint8) for each in rest]  # [tiles, G, TILE * 2]
    return torch.cat([numbers.flatten(2), *halves], 2)
