"""Memory for what is alive within recorded steps only: it is given out and taken back while a step is recorded, and all
records share it, since no two are replayed at once."""

import weakref
from collections import defaultdict

import torch

from hotswap.plugins.cpu import memory

LEAST = 1 << 9
"""Bytes of the smallest block. Sizes are powers of two, so that what a step of other rows has left fits."""


class Arena:
    """Blocks of memory, which stay where they are as long as the arena lives. For one thread."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        self._taken: dict[int, torch.Tensor] = {}
        self.nbytes = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """As large and laid out as ``tensor``, a whole storage, of any content. Its memory is taken back when nobody
        has it any more."""
        size = tensor.untyped_storage().nbytes()
        rounded = max(LEAST, 1 << (size - 1).bit_length())
        free = self._free[rounded]
        block = free.pop() if free else self._more(rounded)
        bytes_of = block.numpy()[:size]  # an object of its own, which the tensor made of it keeps alive
        weakref.finalize(bytes_of, self._take_back, block)
        self._taken[block.data_ptr()] = block
        return _laid_out(torch.from_numpy(bytes_of), tensor)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether its memory is a block of the arena's."""
        return tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() in self._taken

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers at the same place, and if that is a block of the arena's, without keeping it."""
        if not self.holds(tensor):
            return tensor
        return _laid_out(self._taken[tensor.untyped_storage().data_ptr()], tensor)

    def _more(self, size: int) -> torch.Tensor:
        self.nbytes += size
        return memory.empty(size)

    def _take_back(self, block: torch.Tensor) -> None:
        del self._taken[block.data_ptr()]
        self._free[len(block)].append(block)


def _laid_out(block: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A view of ``block``'s memory, with the shape, strides and dtype of ``tensor``."""
    whole = block[: len(block) // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
