"""The host tier's worker half: copies pages between a rank's cache and its part of the tier's memory."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import torch

from hotswap.core.interfaces.kv_transfer import CachePages, GroupPages, TransferWorker
from hotswap.core.interfaces.messages import EndedTransfer

logger = logging.getLogger(__name__)

STAGED_BYTES = 64 * 2**20
"""Most bytes that are gathered at a time on their way."""

Moves = dict[str, Sequence[Sequence[int]]]
"""Per cache group: page ids, and the slots that belong to them."""


class Copier(Protocol):
    """Carries out copies, now or beside the steps."""

    def start(self, copy: Callable[[], None]) -> Callable[[], bool]:
        """Returns what says whether it is done, and raises what went wrong."""

    def wait(self, seconds: float) -> None:
        """Until one of those under way has ended, or so long."""

    def close(self) -> None: ...


class InOrder:
    """Copies within the step. On CUDA they are queued in the stream of the step itself, so that whatever comes later
    finds them done."""

    def start(self, copy: Callable[[], None]) -> Callable[[], bool]:
        copy()
        return lambda: True

    def wait(self, seconds: float) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing to end."""


class OnAThread:
    """Copies on one thread, in order, while steps go on. torch's copies release the interpreter's lock."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "hotswap-host-tier")
        self._running: set[Future[None]] = set()

    def start(self, copy: Callable[[], None]) -> Callable[[], bool]:
        future = self._pool.submit(copy)
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return lambda: future.done() and future.result() is None

    def wait(self, seconds: float) -> None:
        wait(list(self._running), seconds, "FIRST_COMPLETED")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


class OnAStream:
    """Copies on a CUDA stream of their own, behind what was queued when they were started."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own gap
        self._events: list[Any] = []  # torch.cuda.Event, whose methods have no types

    def start(self, copy: Callable[[], None]) -> Callable[[], bool]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._events = [earlier for earlier in self._events if not earlier.query()] + [event]
        return event.query

    def wait(self, seconds: float) -> None:
        """Until the oldest has ended: an event cannot be waited for with a limit, and nothing else is to be done."""
        if self._events:
            self._events[0].synchronize()

    def close(self) -> None:
        self._stream.synchronize()


class GroupMemory:
    """One cache group's part of the tier: ``memory`` [slots, words of a page on this rank], pinned where the cache is
    on a CUDA device."""

    def __init__(self, pages: GroupPages, slots: int, cuda: bool) -> None:
        tensors = [tensor for layer in pages.layers for tensor in layer.tensors]
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ValueError(f"the pages of group {pages.group!r} do not lie in one piece each")
        word = _widest_word([tensor[0].nbytes for tensor in tensors])
        self._pages = [tensor.flatten(1).view(word) for tensor in tensors]
        self._widths = [words.shape[1] for words in self._pages]
        self._cuda = cuda
        self.memory = torch.empty(slots, sum(self._widths), dtype=word, pin_memory=cuda)
        self._most = max(1, STAGED_BYTES // max(1, self.memory[0].nbytes))

    def save(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        for some, theirs in self._portions(pages, slots):
            index = torch.tensor(some, device=self._pages[0].device)
            staged = torch.cat([words.index_select(0, index) for words in self._pages], 1)
            if self._cuda:
                for row, slot in zip(staged, theirs, strict=True):
                    self.memory[slot].copy_(row, non_blocking=True)
            else:
                self.memory[torch.tensor(theirs)] = staged

    def load(self, pages: Sequence[int], slots: Sequence[int]) -> None:
        for some, theirs in self._portions(pages, slots):
            index = torch.tensor(some, device=self._pages[0].device)
            if self._cuda:
                staged = torch.empty(len(some), self.memory.shape[1], dtype=self.memory.dtype, device=index.device)
                for row, slot in zip(staged, theirs, strict=True):
                    row.copy_(self.memory[slot], non_blocking=True)
            else:
                staged = self.memory[torch.tensor(theirs)]
            for words, part in zip(self._pages, torch.split(staged, self._widths, 1), strict=True):
                words[index] = part

    def _portions(self, pages: Sequence[int], slots: Sequence[int]) -> list[tuple[Sequence[int], Sequence[int]]]:
        return [(pages[i : i + self._most], slots[i : i + self._most]) for i in range(0, len(pages), self._most)]


class HostTierWorker(TransferWorker):
    """``overlap``: copies run beside the steps. ``copier``: what carries them out; by default chosen by device."""

    def __init__(self, overlap: bool, copier: Copier | None = None) -> None:
        self._overlap, self._copier = overlap, copier
        self._groups: dict[str, GroupMemory] = {}
        self._running: dict[str, tuple[Callable[[], bool], int]] = {}
        self._ended: list[EndedTransfer] = []

    def register(self, cache: CachePages, terms: Any) -> None:
        cuda = cache.device.startswith("cuda")
        self._groups = {name: GroupMemory(pages, terms["slots"], cuda) for name, pages in cache.groups.items()}
        if self._copier is None:
            self._copier = (OnAStream(cache.device) if cuda else OnAThread()) if self._overlap else InOrder()

    def begin(self, message: Any) -> None:
        for name, moves in message["save"]:
            self._start(name, 0, moves, GroupMemory.save)
        failed = [
            name for name, cached, moves in message["load"] if not self._start(name, cached, moves, GroupMemory.load)]
        if failed and not self._overlap:
            raise RuntimeError(f"the pages of {', '.join(failed)} could not be filled")

    def report(self, wait_s: float) -> list[EndedTransfer]:
        assert self._copier is not None
        if wait_s and self._running:
            self._copier.wait(wait_s)
        for name in list(self._running):
            self._look_at(name)
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        self._groups.clear()

    def _start(
        self, name: str, cached: int, moves: Moves, copy: Callable[[GroupMemory, Sequence[int], Sequence[int]], None],
    ) -> bool:
        """Whether it could be started."""
        def run() -> None:
            with torch.inference_mode():
                for group, (pages, slots) in moves.items():
                    copy(self._groups[group], pages, slots)

        assert self._copier is not None
        try:
            self._running[name] = self._copier.start(run), cached
        except Exception:
            logger.exception("transfer %s of the host tier failed", name)
            self._ended.append(EndedTransfer(name, cached))
            return False
        return True

    def _look_at(self, name: str) -> None:
        done, cached = self._running[name]
        try:
            if not done():
                return
            self._ended.append(EndedTransfer(name))
        except Exception:
            logger.exception("transfer %s of the host tier failed", name)
            self._ended.append(EndedTransfer(name, cached))
        del self._running[name]


def _widest_word(sizes: Sequence[int]) -> torch.dtype:
    """The widest integer that divides pages of these sizes: single bytes are slow to index."""
    words = (torch.int64, torch.int32, torch.int16)
    return next((word for word in words if not any(size % word.itemsize for size in sizes)), torch.uint8)
