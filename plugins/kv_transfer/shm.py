"""Pages through files in shared memory: between engines on one machine."""

import contextlib
import logging
import math
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import TypeAdapter
from pydantic_core import to_json

from hotswap.core.interfaces.kv_transfer import TransferWorker
from hotswap.plugins.kv_transfer.peer import PeerTransfer, Ticket
from hotswap.plugins.kv_transfer.peer_worker import PeerWorker, Span
from hotswap.plugins.kv_transfer.rank_card import HEADS, RankCard, Read, block_shape_of, put, take
from hotswap.plugins.kv_transfer.remembered import Remembered

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
POLL_S = 0.002
LATE = 64
"""After so many more transfers no reader of one that has ended is still under way."""
ALIGNED = 64
_HEADER = struct.Struct("<I")
_SPANS = TypeAdapter(dict[str, tuple[int, int]])


class SharedMemoryTransfer(PeerTransfer):
    """Writes the pages of a request into a file in shared memory (mode 0600, a name nobody can guess), from which the
    next engine's ranks read what they need.

    Choose it between engines on one machine: each byte is copied twice, and nothing waits for a peer. The files of what
    is under way take as much memory as its pages.
    """

    wire = "shm"

    def worker(self) -> TransferWorker:
        return SharedMemoryWorker()

    def address(self) -> dict[str, Any]:
        return {}

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._settled: deque[str] = deque()

    def settled(self, key: str) -> None:
        """A reader that was late may leave a file that says so, which goes later."""
        if self.folder is None:
            return
        remove(self.folder, key)
        self._settled.append(key)
        if len(self._settled) > LATE:
            remove(self.folder, self._settled.popleft())

    def place(self) -> Path:
        return SHARED_MEMORY if SHARED_MEMORY.is_dir() else super().place()


class SharedMemoryWorker(PeerWorker):
    """``KEY.RANK``: what this rank has kept, one block a tensor, group by group and layer by layer, behind a header
    that says which pages. A reader that is done leaves ``KEY.done.READER``, the last one ``KEY.over``, by which the
    keepers know. What has been written never changes, so that it may be read even while it is removed."""

    def open(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        self._writing: set[str] = set()  # keys that have not expired before their file was written
        self._kept: dict[str, str] = {}  # key -> transfer; only of files that have been written
        self._missed: Remembered[str, None] = Remembered()  # keys whose files never came
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._writers = ThreadPoolExecutor(1, "hotswap-kv-write")  # readers may all wait, for one that does too
        return {}

    def keep(self, name: str, key: str, spans: Mapping[str, Span]) -> None:
        with self._lock:
            self._writing.add(key)
        self._writers.submit(self._write, name, key, dict(spans))

    def expire(self, key: str) -> None:
        with self._lock:
            self._writing.discard(key)  # then its transfer ends with the writing, which reads the pages
            name = self._kept.pop(key, None)
        self._path(self.folder, key, self.rank).unlink(missing_ok=True)
        if name is not None:
            self.told(name, 0)

    def look(self) -> None:
        with self._lock:
            over = [(key, self._kept.pop(key)) for key in list(self._kept) if (self.folder / f"{key}.over").exists()]
        for key, name in over:
            self._path(self.folder, key, self.rank).unlink(missing_ok=True)
            self.told(name)

    def read(self, ticket: Ticket, peer: RankCard, wanted: Sequence[tuple[Read, Span]]) -> None:
        path = self._path(Path(ticket.folder), ticket.key, peer.rank)
        with self._opened(path) as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # gone with the last tensor that reads it
        blocks = _Blocks(memory, peer)
        for read, span in wanted:
            pages = self.cache.groups[read.group]
            for layer in read.layers:
                put(pages, span.ids, [layer], read.first_head, read.heads, blocks.of(read, layer, span))

    def done(self, ticket: Ticket, peers: Sequence[RankCard], all_readers: bool) -> None:
        folder = Path(ticket.folder)
        with self._lock:
            if ticket.key in self._missed:  # it has expired, and nobody would remove what is left here
                del self._missed[ticket.key]
                return
        _touch(folder / f"{ticket.key}.done.{self.rank}")
        if all_readers or len(list(folder.glob(f"{ticket.key}.done.*"))) >= self.readers:
            _touch(folder / f"{ticket.key}.over")

    def shut(self) -> None:
        self._closed.set()
        self._writers.shutdown(wait=False, cancel_futures=True)

    def _write(self, name: str, key: str, spans: Mapping[str, Span]) -> None:
        path = self._path(self.folder, key, self.rank)
        draft = path.with_name(f"{path.name}.draft")
        try:
            header = to_json({group: (span.first, len(span.ids)) for group, span in spans.items()})
            with torch.inference_mode(), os.fdopen(
                    os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_HEADER.pack(len(header)) + header + bytes(_padding(len(header))))
                for group, pages in self.cache.groups.items():
                    heads = pages.kv_heads
                    for layer in pages.layers:
                        for block in take(pages, spans[group].ids, [layer.layer], heads.start, heads.count):
                            file.write(block.view(-1).view(torch.uint8).numpy().tobytes())
            with self._lock:
                if key not in self._writing:
                    raise TimeoutError("they were to be kept no longer before they had been written")
                draft.replace(path)
                self._kept[key] = name
        except Exception as error:
            logger.error("pages could not be kept in %s: %s", self.folder, error)
            draft.unlink(missing_ok=True)
            self.told(name, 0)
        finally:
            with self._lock:
                self._writing.discard(key)

    def _opened(self, path: Path) -> BinaryIO:
        """The file, which may be on its way yet. TimeoutError."""
        for _ in range(max(1, int(self.timeout_s / POLL_S))):
            with contextlib.suppress(FileNotFoundError):
                return path.open("rb")
            if self._closed.wait(POLL_S):
                break
        with self._lock:
            self._missed[path.name.partition(".")[0]] = None
        raise TimeoutError(f"{path.name} was not written within {self.timeout_s:g} s")

    @staticmethod
    def _path(folder: Path, key: str, rank: str) -> Path:
        return folder / f"{key}.{rank}"


class _Blocks:
    """The blocks of one file."""

    def __init__(self, memory: mmap.mmap, peer: RankCard) -> None:
        self._memory = memory
        (size,) = _HEADER.unpack_from(memory)
        self._spans = _SPANS.validate_json(bytes(memory[_HEADER.size : _HEADER.size + size]))
        self._peer, self._dtype = peer, getattr(torch, peer.dtype)
        self._starts: dict[tuple[str, int], int] = {}
        place = _HEADER.size + size + _padding(size)
        for group, card in peer.groups.items():
            for layer in card.layers:
                self._starts[group, layer] = place
                place += 2 * self._bytes(group)
        if place != len(memory):
            raise ValueError(f"the file of {peer.label} has {len(memory)} bytes, its header promises {place}")

    def of(self, read: Read, layer: int, span: Span) -> list[torch.Tensor]:
        """Keys and values of one layer: the pages of ``span``, with the heads of ``read``."""
        first, count = self._spans[read.group]
        skip = span.first - first
        if skip < 0 or skip + len(span.ids) > count:
            raise ValueError(f"pages {span.first} to {span.first + len(span.ids) - 1} are asked for, {count} were kept")
        card, size = self._peer.groups[read.group], self._bytes(read.group)
        blocks = []
        for part in range(2):
            start = self._starts[read.group, layer] + part * size
            block = torch.frombuffer(
                self._memory, dtype=self._dtype, count=size // self._dtype.itemsize, offset=start,
            ).view(block_shape_of(card, count))
            block = block[skip : skip + len(span.ids)]
            if HEADS in card.axes:
                block = block.narrow(card.axes.index(HEADS), read.first_head - card.kv_heads.start, read.heads)
            blocks.append(block)
        return blocks

    def _bytes(self, group: str) -> int:
        shape = block_shape_of(self._peer.groups[group], self._spans[group][1])
        return math.prod(shape) * int(self._dtype.itemsize)


def _padding(size: int) -> int:
    """Behind a header of ``size`` bytes, so that blocks begin where tensors may."""
    return -(_HEADER.size + size) % ALIGNED


def _touch(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))


def remove(folder: Path, key: str) -> None:
    """All files of a key, once every keeper has reported."""
    for path in folder.glob(f"{key}.*"):
        path.unlink(missing_ok=True)
