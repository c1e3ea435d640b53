"""Memory in large pages, for weights: a step reads all of them once, and where pages are small, finding them takes the
processor about as long as reading them, the more so in a virtual machine.

Linux is asked for them with ``madvise``; where it gives none, or where there is no such call, pages are small and all
else is the same. Large pages are shared by the layers of a model: they lie one behind the other, as they were asked
for, and what they lie in is given back with the last of them.
"""

import mmap
import threading
import weakref
from contextlib import suppress

import torch

PAGE = 1 << 21
"""Bytes: the large page of x86 and of most other processors."""

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
    global _chunk, _next
    if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    with _lock:
        chunk = _chunk() if _chunk is not None else None
        if chunk is None or _next + size > len(chunk):
            chunk = mmap.mmap(-1, -(-max(size, CHUNK) // PAGE) * PAGE + PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                chunk.madvise(mmap.MADV_HUGEPAGE)
            whole = torch.frombuffer(chunk, dtype=torch.uint8)
            _chunk, _next = weakref.ref(chunk), -whole.data_ptr() % PAGE
        start, _next = _next, _next + -(-size // LINE) * LINE
        return torch.frombuffer(chunk, dtype=torch.uint8, count=size, offset=start)
