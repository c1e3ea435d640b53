"""Memory in large pages, for weights and for the cache of keys and values: a step reads all of them once, and where
pages are small, finding them takes the processor about as long as reading them, the more so in a virtual machine.

Linux is asked for them with ``madvise``; where it gives none, or where there is no such call, pages are small and all
else is the same. Large pages are shared by the layers of a model: they lie one behind the other, as they were asked
for, and what they lie in is given back with the last of them. What fills many is by itself.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch

from hotswap.plugins.cpu.clearing import PAGE, clear_soon

CHUNK = 16 * PAGE
"""Bytes that are mapped at a time; those that nobody writes to take no memory."""

LEAST = 1 << 16
"""Bytes: less is not worth a large page."""

LINE = 64

_lock = threading.Lock()
_chunk: weakref.ref[mmap.mmap] | None = None  # what is in it keeps it alive, and nothing else
_next = 0


def empty(size: int) -> torch.Tensor:
    """uint8 [size], of any content, which begins with a cache line."""
    mapped = _mapped(size)
    return torch.empty(size, dtype=torch.uint8) if mapped is None else _tensor(size, *mapped)


def zeros(size: int) -> torch.Tensor:
    """uint8 [size], zero. It costs nothing until it is written to: the system clears a page then, or, of the first ones
    of a few large tensors, before (:mod:`.clearing`)."""
    mapped = _mapped(size)
    if mapped is None:
        return torch.from_numpy(np.zeros(size, np.uint8))
    zeroed = _tensor(size, *mapped)
    clear_soon(mapped[0], zeroed.data_ptr(), size)
    return zeroed


def _tensor(size: int, chunk: mmap.mmap, start: int) -> torch.Tensor:
    return torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=start)


def _mapped(size: int) -> tuple[mmap.mmap, int] | None:
    """Where memory is that nobody has had before; None where large pages are not worth it, or unknown."""
    global _chunk, _next
    if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    if size >= CHUNK:  # a mapping of its own, which nothing small keeps alive
        return _map(size)
    with _lock:
        shared = _chunk() if _chunk is not None else None
        if shared is None or _next + size > len(shared):
            shared, _next = _map(CHUNK)
            _chunk = weakref.ref(shared)
        start, _next = _next, _next + -(-size // LINE) * LINE
        return shared, start


def _map(size: int) -> tuple[mmap.mmap, int]:
    """So many bytes at least, and where a large page begins in them. MemoryError, as numpy has it, where the system
    refuses them."""
    try:
        chunk = mmap.mmap(-1, -(-size // PAGE) * PAGE + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes cannot be mapped: {error.strerror}") from error
    with suppress(OSError):  # a kernel without them
        chunk.madvise(mmap.MADV_HUGEPAGE)
    return chunk, -torch.frombuffer(chunk, dtype=torch.uint8).data_ptr() % PAGE
