"""The first pages of a cache are cleared before they are needed.

The system clears a large page when it is first written to. Those of all layers, and of keys and values, come to that in
the same step, since a token has the same place in each: 60 pages of a model of 30 layers, every few thousand tokens. In
a virtual machine, whose host has to find the memory, too, that step took 0.27 s more. A thread does it in the
background while the engine gets ready, in the order in which a cache is filled, but no more than ``MOST`` bytes of what
is allocated together: a cache takes what it holds, and little more.
"""

import ctypes
import heapq
import itertools
import mmap
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

PAGE = 1 << 21
"""Bytes: the large page of x86 and of most other processors."""

MOST = 1 << 30
"""Bytes that one thread clears before it ends: with 30 layers of three key heads of 64, in bfloat16, 46,000 tokens."""

_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux, since 5.14: pages are made as if they were written to, and hold what they held."""


class Clearing:
    """What waits to be cleared, by its distance from the beginning of its tensor."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._lock, self._numbers = most, threading.Lock(), itertools.count()
        self._waiting: list[_Range] = []
        self._thread: threading.Thread | None = None

    def add(self, owner: mmap.mmap, address: int, size: int) -> None:
        """Of ``size`` bytes from ``address`` on, the first ones are cleared as long as ``owner`` lives."""
        if sys.platform != "linux":
            return
        with self._lock:
            heapq.heappush(self._waiting, _Range(0, next(self._numbers), weakref.ref(owner), address, size))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hotswap clears pages", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        left = self._most
        while True:
            with self._lock:
                if not self._waiting or left <= 0:
                    self._waiting.clear()
                    self._thread = None
                    return
                some = heapq.heappop(self._waiting)
                if some.done + PAGE < some.size:
                    heapq.heappush(self._waiting, some._replace(done=some.done + PAGE))
            left = left - PAGE if some.clear() else 0


class _Range(NamedTuple):
    done: int
    number: int  # of what is as far, who came first
    owner: weakref.ref[mmap.mmap]
    address: int
    size: int

    def clear(self) -> bool:
        """The next large page of it; False where the system cannot."""
        owner = self.owner()  # kept from being unmapped meanwhile
        if owner is None:
            return True
        begin = (self.address + self.done) // PAGE * PAGE
        done: int = _madvise()(begin, PAGE, _POPULATE_WRITE)
        del owner
        return done == 0


@cache
def _madvise() -> Callable[[int, int, int], int]:
    """Of the C library: unlike ``mmap.madvise`` it lets other threads of Python run."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


clear_soon = Clearing().add
