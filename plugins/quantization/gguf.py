"""A GGUF file's own quantised blocks, kept as they are. The formats are llama.cpp's."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import torch

from hotswap.core.interfaces.quantization import LinearWeight, Packed, QuantizationSupport
from hotswap.core.modeling.gguf import BlockRows
from hotswap.core.modeling.linear import row_parts
from hotswap.plugins.cpu.linear_words import GROUP
from hotswap.plugins.quantization.base import FourBitOptions, FourBitQuantization
from hotswap.plugins.quantization.grouped import Groups, joined
from hotswap.plugins.quantization.kernel_linear import KernelLinear
from hotswap.plugins.quantization.none import unquantised
from hotswap.plugins.quantization.torch_linear import int8_linear

logger = logging.getLogger(__name__)


class GGUFOptions(FourBitOptions):
    q8_0: Literal["int8", "dense"] = "int8"
    """Where torch's operators multiply, what Q8_0 blocks become: 8 bits with a scale for each output feature instead of
    one for each 32 weights; or values of the config's dtype."""


class GGUFBlocks(FourBitQuantization):
    """The quantised weights of a GGUF file as it has them (llama.cpp's formats): nothing is quantised again.

    Q4_0, Q4_1 and Q8_0 are kept to the last bit; so are the numbers of Q4_K, whose two levels of scales are multiplied
    out to float16. Activations are brought to 8 bits, each row in groups of 32, as llama.cpp does. Other formats are
    dequantised and kept dense, which is said at the start. Where torch's operators multiply, the scales of 4-bit blocks
    are rounded to the dtype of the activations.

    Choose it for a .gguf file on a CPU: the file's own loss and hardly another, and the least to read for each token.
    """

    Options = GGUFOptions
    options: GGUFOptions

    def __init__(self, options: GGUFOptions | None = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self._told = False

    def support(self) -> QuantizationSupport:
        return replace(super().support(), blocks=tuple(FORMATS), needs_blocks=True)

    def _pack(self, weight: LinearWeight) -> Packed:
        for name, piece in zip(weight.names, weight.pieces, strict=True):
            if isinstance(piece, BlockRows) and not _is_grouped(piece):
                self._tell(name, piece)
        parts = [self._pack_alike(part, bits) for part, bits in _alike(weight)]
        return parts[0] if len(parts) == 1 else Stacked(parts)

    def _pack_alike(self, weight: LinearWeight, bits: int) -> Packed:
        """``weight``: all of its pieces in formats of so many bits; 0: none is quantised."""
        if not bits:
            return unquantised(weight)
        if bits == 8 and self._no_kernels():
            return unquantised(weight) if self.options.q8_0 == "dense" else int8_linear(weight)
        groups = joined(_converted(weight), weight.out_features)
        return self._four_bits(groups, weight) if bits == 4 else KernelLinear(groups, weight.bias, weight.dtype)

    def _tell(self, name: str, piece: BlockRows) -> None:
        """Once: all ranks divide all layers alike."""
        if not self._told:
            self._told = True
            logger.warning(
                "%s dequantises %s, stored as %s, and all that is divided alike: this rank's columns begin within a "
                "group of %d; a size of tensor parallelism that gives multiples of it keeps the blocks",
                self.label, name, piece.type, GROUP)


class Stacked:
    """Implements ``Packed``: layers of the same input, their outputs side by side."""

    def __init__(self, parts: Sequence[Packed]) -> None:
        self._parts = tuple(parts)
        self.nbytes = sum(part.nbytes for part in parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(x) for part in self._parts], -1)


def _alike(weight: LinearWeight) -> Iterator[tuple[LinearWeight, int]]:
    """The layer in parts: neighbouring pieces of formats with as many bits together; 0 bits: dense ones."""
    start = 0
    for bits, members in groupby(range(len(weight.pieces)), lambda at: _bits(weight.pieces[at])):
        at = list(members)
        pieces, names = tuple(weight.pieces[i] for i in at), tuple(weight.names[i] for i in at)
        rows = sum(piece.shape[0] for piece in pieces)
        bias = None if weight.bias is None else weight.bias[start : start + rows]
        yield replace(weight, names=names, pieces=pieces, bias=bias), bits
        start += rows


def _bits(piece: torch.Tensor | BlockRows) -> int:
    return FORMATS[piece.type].bits if isinstance(piece, BlockRows) and _is_grouped(piece) else 0


def _is_grouped(blocks: BlockRows) -> bool:
    """Whether the part of the columns begins with a group."""
    return blocks.first % GROUP == 0


def _converted(weight: LinearWeight) -> Iterator[Groups]:
    """Some rows at a time; all pieces are blocks."""
    for part in row_parts(weight):
        assert isinstance(part, BlockRows)
        yield FORMATS[part.type].read(part.data).columns(part.first, part.shape[1])


def _halves(blocks: torch.Tensor, columns: slice) -> torch.Tensor:
    """The float16 numbers in some bytes of each block, [..., n] float32."""
    return blocks[..., columns].contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """[..., B] bytes -> [..., 2 B]: their low halves, then their high ones."""
    return torch.cat([data & 15, data >> 4], -1)


def q4_0(data: torch.Tensor) -> Groups:
    """Blocks of 18 bytes: d, then 32 numbers of 4 bits; a value is (q - 8) d."""
    blocks = data.reshape(len(data), -1, 18)
    scales = _halves(blocks, slice(0, 2)).squeeze(-1)
    return Groups(_nibbles(blocks[..., 2:]).flatten(1), scales, -8 * scales, 4)


def q4_1(data: torch.Tensor) -> Groups:
    """Blocks of 20 bytes: d, m, then 32 numbers of 4 bits; a value is q d + m."""
    blocks = data.reshape(len(data), -1, 20)
    scales, least = _halves(blocks, slice(0, 4)).unbind(-1)
    return Groups(_nibbles(blocks[..., 4:]).flatten(1), scales, least, 4)


def q4_k(data: torch.Tensor) -> Groups:
    """Blocks of 144 bytes: d, e, then 8 scales s and 8 minima t of 6 bits, then 256 numbers of 4 bits in 8 groups; a
    value is q d s - e t. The first four s and t are the low 6 bits of bytes 0 to 3 and 4 to 7; the others have their
    low 4 bits in bytes 8 to 11 and their high 2 above those. d s and e t are rounded to float16."""
    blocks = data.reshape(len(data), -1, 144)
    d, e = _halves(blocks, slice(0, 4))[..., None].unbind(-2)
    first, second, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    s = torch.cat([first & 63, (low & 15) | ((first >> 6) << 4)], -1)
    t = torch.cat([second & 63, (low >> 4) | ((second >> 6) << 4)], -1)
    numbers = _nibbles(blocks[..., 16:].reshape(len(data), -1, GROUP)).flatten(1)
    return Groups(numbers, (d * s).half().float().flatten(1), -(e * t).half().float().flatten(1), 4)


def q8_0(data: torch.Tensor) -> Groups:
    """Blocks of 34 bytes: d, then 32 numbers of 8 bits with a sign; a value is q d."""
    blocks = data.reshape(len(data), -1, 34)
    scales = _halves(blocks, slice(0, 2)).squeeze(-1)
    numbers = blocks[..., 2:].contiguous() ^ 128  # q + 128, without a sign
    return Groups(numbers.flatten(1), scales, -128 * scales, 8)


class Format(NamedTuple):
    """``read``: bytes uint8 [O, bytes of a row] -> groups of 32 numbers of ``bits``."""

    bits: int
    read: Callable[[torch.Tensor], Groups]


FORMATS = {"Q4_0": Format(4, q4_0), "Q4_1": Format(4, q4_1), "Q4_K": Format(4, q4_k), "Q8_0": Format(8, q8_0)}
"""By llama.cpp's names."""
