"""Memory for what is alive within recorded steps only: it is given out and taken back while a step is recorded, and all
records share it, since no two are replayed at once."""

import weakref
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import torch

from hotswap.plugins.cpu import memory

LEAST = 1 << 9
"""Bytes of the smallest block. Sizes are powers of two, so that what a step of other rows has left fits."""


class _Block(NamedTuple):
    address: int
    size: int
    numbers: Any  # numpy's uint8 [size], which keeps the memory


class Arena:
    """Blocks of memory, which stay where they are as long as the arena lives. For one thread."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[_Block]] = defaultdict(list)
        self._taken: dict[int, tuple[_Block, weakref.ref[Any]]] = {}
        self.nbytes = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Laid out as ``tensor``, in a storage of its own, of any content. Its memory is taken back when nobody has it
        any more."""
        size = tensor.untyped_storage().nbytes()
        rounded = max(LEAST, 1 << (size - 1).bit_length())
        free = self._free[rounded]
        block = free.pop() if free else self._more(rounded)
        numbers = block.numbers[:]  # an object of its own, which the tensor made of it keeps alive
        self._taken[block.address] = block, weakref.ref(numbers, partial(self._take_back, block))
        return _laid_out(numbers, tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is a block of the arena's."""
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._taken

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers at the same place, and if that is a block of the arena's, without keeping it."""
        if not self.holds(tensor):
            return tensor
        block, _ = self._taken[tensor.untyped_storage().data_ptr()]
        return _laid_out(block.numbers, tensor)

    def _more(self, size: int) -> _Block:
        self.nbytes += size
        numbers = memory.empty(size)
        return _Block(numbers.data_ptr(), size, numbers.numpy())

    def _take_back(self, block: _Block, _: Any) -> None:
        del self._taken[block.address]
        self._free[block.size].append(block)


def _laid_out(numbers: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A view of a block's memory, with the shape, strides and dtype of ``tensor``."""
    whole = torch.frombuffer(numbers, dtype=tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
