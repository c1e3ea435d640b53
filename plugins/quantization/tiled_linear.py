"""Layers whose bfloat16 weights a kernel of our own multiplies: :mod:`hotswap.plugins.cpu.bfloat16_kernels` is told
where they are."""

import struct
from collections.abc import Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch

from hotswap.core.interfaces.quantization import LinearWeight
from hotswap.core.modeling.linear import dense_parts, tensor_bytes
from hotswap.plugins.cpu import bfloat16_words as w
from hotswap.plugins.cpu import memory
from hotswap.plugins.cpu.team import Kernel, ThreadWords, Words, compile_kernels, team_note
from hotswap.plugins.quantization.torch_support import AMX, processor_has

_WORDS = struct.Struct(f"{w.COUNTERS}q{w.NUM_WORDS - w.COUNTERS}q")
_COUNTERS = (0,) * w.COUNTERS
_NO_BIAS = torch.zeros(w.TILE)
ALONE = 1 << 15
"""Bytes of weights that one thread multiplies sooner than it finds another."""

MANY_ROWS = 128
"""Rows of an item: so many that a tile's way to the nearest cache counts for little, and few enough to share."""

FEW_ROWS = 8
"""Of so many an item has several tiles: they are multiplied at once, and a tile alone would be done too soon."""


def no_tiles() -> str:
    """Why they are not the fastest form of bfloat16 weights here; empty where they are."""
    if not processor_has(("avx512_bf16",)):
        return "the processor has no AVX-512 instructions for products of bfloat16"
    if processor_has(AMX):
        return "oneDNN multiplies by AMX here"
    if find_spec("numba") is None:
        return "the package numba is not installed"
    from numba import types
    from numba.core.registry import cpu_target  # late: it takes most of a second

    loops = import_module("hotswap.plugins.cpu.bfloat16_loops")
    if not loops.pairs_are_multiplied(cpu_target.target_context, types.uint16):
        return "numba compiles for a processor without AVX-512 products of bfloat16"
    return team_note()


def fits(weight: LinearWeight) -> bool:
    """Whether its input features are multiplied in pairs."""
    return weight.in_features % 2 == 0


class TiledLinear:
    """Implements ``Packed``: bfloat16 weights in the order in which the kernel reads them, sums in float32."""

    def __init__(self, weight: LinearWeight) -> None:
        self._out_features, self._in_features = weight.out_features, weight.in_features
        packed = tiles(dense_parts(weight), weight.out_features, weight.in_features)
        self._tiles, self._address, self._num_tiles = packed[0], packed[0].data_ptr(), len(packed)
        self._bias: torch.Tensor | None = None
        if weight.bias is not None:
            self._bias = torch.zeros(self._num_tiles * w.TILE)
            self._bias[: self._out_features] = weight.bias
        self._bias_words = (_NO_BIAS.data_ptr(), 0) if self._bias is None else (self._bias.data_ptr(), w.TILE * 4)
        self.nbytes = tensor_bytes(*packed, self._bias)
        self._words, self._alone = ThreadWords(partial(Words, _WORDS.size)), self.nbytes < ALONE
        self._kernel: Kernel = import_module("hotswap.plugins.cpu.bfloat16_kernels").multiply_bfloat16  # imports numba
        compile_kernels([self._kernel])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        tokens, words = x.shape[0], self._words.of_call()  # len() of a tensor takes ten times as long
        out = torch.empty(tokens, self._out_features, dtype=x.dtype)
        x = x if x.stride(1) == 1 else x.contiguous()
        shared = tokens > 1 or not self._alone
        some = max(1, self._num_tiles // (4 * torch.get_num_threads())) if tokens <= FEW_ROWS else 1
        _WORDS.pack_into(
            words.memory, words.skip, *_COUNTERS, words.address, tokens, self._in_features // 2,
            x.data_ptr(), 2 * x.stride(0), self._address, self._num_tiles, some, MANY_ROWS,
            *self._bias_words, out.data_ptr(), 2 * self._out_features, self._out_features)
        self._kernel(words, shared)
        return out


def tiles(parts: Iterable[torch.Tensor], out_features: int, in_features: int) -> list[torch.Tensor]:
    """bfloat16 [I / 2, TILE, 2] each, one behind the other in memory, as :mod:`hotswap.plugins.cpu.bfloat16_words`
    says, of rows that come some at a time. The last has as many output features as fill its vectors."""
    padded = -(-out_features // w.VECTOR) * w.VECTOR
    whole = memory.empty(2 * padded * in_features).view(torch.bfloat16)
    packed = [flat.view(in_features // 2, -1, 2) for flat in torch.split(whole, w.TILE * in_features)]
    packed[-1][:, out_features % w.TILE or w.TILE :] = 0
    row = 0
    for part in parts:
        while len(part):
            tile, place = divmod(row, w.TILE)
            some = part[: w.TILE - place]
            packed[tile][:, place : place + len(some)] = some.view(len(some), -1, 2).transpose(0, 1)
            part, row = part[len(some):], row + len(some)
    return packed
