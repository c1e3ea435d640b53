"""Pages of caches that are cleared before they are needed."""

import ctypes
import mmap
import sys
import threading
import time
import weakref

import pytest
import torch

from hotswap.plugins.cpu import clearing as clearing_module
from hotswap.plugins.cpu import memory
from hotswap.plugins.cpu.clearing import PAGE, Clearing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for pages")


def mapped(pages: int) -> tuple[mmap.mmap, int]:
    """Memory, and where a large page begins in it, with as many behind it."""
    owner, start = memory._map(pages * PAGE)
    return owner, torch.frombuffer(owner, dtype=torch.uint8).data_ptr() + start


def resident(address: int, size: int) -> int:
    """Bytes of it that are there."""
    pages = size // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), found) == 0
    return sum(each & 1 for each in found) * mmap.PAGESIZE


def populates() -> bool:
    owner, address = mapped(1)
    done = ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(PAGE), 23)
    return bool(done == 0 and owner)


needs_populate = pytest.mark.skipif(not populates(), reason="this kernel clears no pages when asked")


def ended(clearing: Clearing) -> None:
    until = time.monotonic() + 60
    while clearing._thread is not None:
        assert time.monotonic() < until, "it goes on"
        time.sleep(0.005)


@needs_populate
def test_first_pages_of_all_come_first_and_no_more_than_it_may(monkeypatch):
    clearing, ranges = Clearing(5 * PAGE), [mapped(8) for _ in range(3)]
    all_are_there = threading.Event()
    clear = clearing_module._Range.clear
    monkeypatch.setattr(clearing_module._Range, "clear", lambda some: all_are_there.wait() and clear(some))
    for owner, address in ranges:
        clearing.add(owner, address, 8 * PAGE)
    all_are_there.set()
    ended(clearing)
    assert [resident(address, 8 * PAGE) // PAGE for _, address in ranges] == [2, 2, 1]
    assert not clearing._waiting


@needs_populate
def test_what_was_written_stays():
    clearing, (owner, address) = Clearing(), mapped(2)
    numbers = torch.frombuffer(owner, dtype=torch.uint8)
    numbers[:] = 7
    clearing.add(owner, address, 2 * PAGE)
    ended(clearing)
    assert bool((numbers == 7).all())


def test_nothing_is_kept_alive_for_it():
    clearing, (owner, address) = Clearing(), mapped(64)
    gone = weakref.ref(owner)
    clearing.add(owner, address, 64 * PAGE)
    del owner
    ended(clearing)
    assert gone() is None


def test_a_system_that_cannot_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr("hotswap.plugins.cpu.clearing._madvise", lambda: lambda *words: asked.append(words) or -1)
    clearing, (owner, address) = Clearing(), mapped(8)
    clearing.add(owner, address, 8 * PAGE)
    ended(clearing)
    assert len(asked) == 1 and not clearing._waiting


@needs_populate
def test_a_cache_has_its_first_pages_soon():
    zeroed = memory.zeros(memory.CHUNK)
    until = time.monotonic() + 60
    while resident(zeroed.data_ptr(), 2 * PAGE) < 2 * PAGE:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not bool(zeroed.any())


@pytest.mark.parametrize("make", [memory.empty, memory.zeros])
def test_memory_that_the_system_refuses_is_a_memory_error(make):
    with pytest.raises(MemoryError, match=f"^{1 << 50} bytes cannot be mapped: "):
        make(1 << 50)
