"""Pages through NIXL: one-sided reads over UCX, by RDMA, NVLink, shared memory or sockets, whatever the machine has."""

import base64
import importlib
import importlib.util
import logging
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hotswap.core.errors import ConfigError
from hotswap.core.execution.channel import Channel, ChannelClosedError, Frame, decode, encode
from hotswap.core.interfaces.kv_transfer import GroupPages, TransferWorker
from hotswap.plugins.kv_transfer.peer import Ticket
from hotswap.plugins.kv_transfer.peer_worker import Span
from hotswap.plugins.kv_transfer.rank_card import HEADS, GroupCard, RankCard, Read
from hotswap.plugins.kv_transfer.tcp import TcpTransfer, TcpWorker, Wanted, ask

logger = logging.getLogger(__name__)

PACKAGES = ("nixl", "nixl_cu12")
POLL_S = 0.0005
PROGRESS_S = 0.001
"""How often an agent is moved on while a peer is connected, and while a close waits for reads."""
ADDRESS = np.int64
_HELD: list[Any] = []
"""Agents, and the caches into which they may write until the process ends."""


class NixlTransfer(TcpTransfer):
    """The next engine's ranks read the keeper's cache themselves, without its help, through NVIDIA's NIXL.

    Choose it between GPUs, and wherever UCX knows a faster way than sockets. It needs the extra `nixl`. What is read is
    agreed on over the connections of `tcp`, with its proofs: before a read the keeper says where the pages lie, and
    after it that it still has them, so that pages that were given away in the middle are never used.
    """

    wire = "nixl"

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        if not any(map(importlib.util.find_spec, PACKAGES)):
            raise ConfigError(
                "the package nixl-cu12 is not installed; install hotswap[nixl], or choose shm or tcp", "use")

    def worker(self) -> TransferWorker:
        return NixlWorker()


class NixlWorker(TcpWorker):
    """The cache's tensors are registered once. An agent is not safe for threads, and has a lock. A read is over when
    NIXL says so, and nothing else ends one: UCX takes a request back without stopping what writes into the pages.

    An agent has no thread of its own: NIXL's spins as long as the agent lives. UCX is moved on by who waits for a read,
    and at the other end by the thread that serves the reader, as long as that is connected."""

    def open(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        api = importlib.import_module(f"{next(filter(importlib.util.find_spec, PACKAGES))}._api")
        tensors = [
            tensor for group in self.cache.groups.values() for layer in group.layers for tensor in layer.tensors]
        if not all(tensor.is_contiguous() for tensor in tensors):
            raise ConfigError("the attention backend's pages do not lie in one piece, which NIXL needs", "kv_transfer")
        self._agents, self._given_up = threading.Condition(), threading.Event()
        self._under_way: set[Any] = set()  # handles
        self._complained = False
        self._memory = "VRAM" if self.cache.device.startswith("cuda") else "DRAM"
        self._device = max(0, tensors[0].get_device())
        self._agent = api.nixl_agent(f"hotswap-{self.rank}", api.nixl_agent_config(
            enable_prog_thread=False, backends=["UCX"]))
        self._registered: Any = self._agent.register_memory(tensors)
        self._remote: dict[str, str] = {}
        starts = {
            name: {layer.layer: [tensor.data_ptr() for tensor in layer.tensors] for layer in group.layers}
            for name, group in self.cache.groups.items()}
        return {**super().open(terms), "nixl": {
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(), "memory": self._memory,
            "device": self._device, "starts": starts}}

    def answer(self, wanted: Wanted) -> bytes:
        """Where the pages are; the bytes are read without asking."""
        with self._changed:
            _, ids = self.find(wanted)
            return encode(ids)

    def heard(self, channel: Channel) -> Frame:
        """A connected peer may be reading: it gets to know this agent first, and where the transport is no hardware
        that reads by itself, each read needs an answer. Asking for notifications, of which there are none, does that.
        """
        while not channel.readable(PROGRESS_S):
            with self._agents:
                if self._registered is not None:
                    self._move_on()
        return super().heard(channel)

    def _move_on(self) -> None:
        """Under the lock. What fails is told once and tried again: for the reader nothing else moves this end."""
        try:
            self._agent.get_new_notifs()
        except Exception:  # of NIXL's own kinds
            if not self._complained:
                logger.exception("NIXL's agent of rank %s cannot be moved on; it is tried again", self.rank)
            self._complained = True

    def read(self, ticket: Ticket, peer: RankCard, wanted: Sequence[tuple[Read, Span]]) -> None:
        channel = self.connected(peer)
        try:
            def ids(read: Read, span: Span) -> list[int]:
                return decode(list[int], ask(channel, peer, Wanted(
                    ticket.key, read.group, read.layers[0], read.first_head, read.heads, span.first, len(span.ids))))

            located = [(read, span, ids(read, span)) for read, span in wanted]
            self._end(channel, peer, *self._begin(peer, *self._tables(peer, located)))
            if any(ids(read, span) != before for read, span, before in located):
                raise ChannelClosedError(f"{peer.label} gave the pages away while they were read")
        finally:
            channel.close()

    def shut(self) -> None:
        super().shut()
        with self._agents:
            registered, self._registered = self._registered, None  # from here on no read begins
            if registered is None:
                return
            for _ in range(int(self.timeout_s / PROGRESS_S)):  # who is read from may read from here, and close, too
                if self._agents.wait_for(lambda: not self._under_way, PROGRESS_S):
                    break
                self._move_on()
            if not self._under_way:
                self._agent.deregister_memory(registered)
                del self._agent
            else:
                logger.error("rank %s closes while NIXL still reads into its cache, which stays in memory", self.rank)
                _HELD.append((self._agent, registered, self.cache, set(self._under_way)))
                self._given_up.set()

    def _tables(
        self, peer: RankCard, located: Sequence[tuple[Read, Span, Sequence[int]]],
    ) -> "tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]":
        """Where the pieces lie here, and where at the peer."""
        theirs = peer.address["nixl"]
        rows: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]] = []
        for read, span, ids in located:
            group = self.cache.groups[read.group]
            whole = read.heads == group.kv_heads.count == peer.groups[read.group].kv_heads.count
            mine, other = Pieces(_card(group), whole), Pieces(peer.groups[read.group], whole)
            size = mine.size(read, _itemsize(group))
            for layer, part in ((layer, part) for layer in read.layers for part in range(2)):
                rows.append((
                    _starts(group, layer)[part] + mine.offsets(span.ids, read, _itemsize(group)),
                    theirs["starts"][read.group][str(layer)][part] + other.offsets(ids, read, _itemsize(group)), size))
        return (_table(((row[0], row[2]) for row in rows), self._device),
                _table(((row[1], row[2]) for row in rows), theirs["device"]))

    def _begin(self, peer: RankCard, mine: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> tuple[Any, str]:
        """The transfer's handle, and its state."""
        theirs = peer.address["nixl"]
        with self._agents:
            if self._registered is None:
                raise ChannelClosedError("the cache is closed")
            if peer.rank not in self._remote:
                name = self._agent.add_remote_agent(base64.b64decode(theirs["metadata"]))
                self._remote[peer.rank] = name.decode() if isinstance(name, bytes) else name
            handle = self._agent.initialize_xfer(
                "READ", self._agent.get_xfer_descs(mine, self._memory),
                self._agent.get_xfer_descs(other, theirs["memory"]), self._remote[peer.rank])
            state = self._agent.transfer(handle)
            self._under_way.add(handle)
            return handle, state

    def _end(self, channel: Channel, peer: RankCard, handle: Any, state: str) -> None:
        """Wait until the transfer has ended, however long that takes, and whether or not the peer has hung up: until
        then the pages are not free. NIXL tells nobody, it has to be asked; asking is also what moves UCX on."""
        polls = 0
        try:
            while state == "PROC" and not self._given_up.wait(POLL_S):
                with self._agents:
                    state = self._agent.check_xfer_state(handle)
                polls += 1
                if polls == int(self.timeout_s / POLL_S):
                    gone = ", which has hung up," if channel.readable(0) else ""  # unasked it says nothing
                    logger.warning("NIXL reads from %s%s for more than %g s; the pages are held until it has ended",
                                   peer.label, gone, self.timeout_s)
        finally:
            with self._agents:
                if not self._given_up.is_set():
                    self._agent.release_xfer_handle(handle)
                self._under_way.discard(handle)
                self._agents.notify_all()
        if state != "DONE":
            raise ChannelClosedError(f"NIXL could not read from {peer.label}: {state}")


class Pieces:
    """Where some heads of some pages lie in a tensor: pieces without a gap, as many a page as there are indices of the
    dimensions before the heads; one where all heads are meant (``whole``)."""

    def __init__(self, card: GroupCard, whole: bool) -> None:
        rest = iter(card.shape)
        shape = [card.kv_heads.count if axis == HEADS else next(rest) for axis in card.axes[1:]]
        self._page, self._start = math.prod(shape), card.kv_heads.start
        place = card.axes.index(HEADS) - 1 if HEADS in card.axes and not whole else 0
        self._outer = math.prod(shape[:place])
        self._inner = math.prod(shape[place + 1 :])
        self._whole = whole or HEADS not in card.axes

    def size(self, read: Read, itemsize: int) -> int:
        """Bytes of a piece."""
        return (self._page if self._whole else read.heads * self._inner) * itemsize

    def offsets(self, ids: Sequence[int], read: Read, itemsize: int) -> "np.ndarray[Any, Any]":
        """Of each piece, page by page, in bytes."""
        pages = np.array(ids, ADDRESS)[:, None] * self._page
        if self._whole:
            return pages.ravel() * itemsize
        rows = np.arange(self._outer, dtype=ADDRESS)[None, :] * (self._page // self._outer)
        return (pages + rows + (read.first_head - self._start) * self._inner).ravel() * itemsize


def _card(group: GroupPages) -> GroupCard:
    page = group.layers[0].tensors[0].shape[1:]
    shape = tuple(size for axis, size in zip(group.axes[1:], page, strict=True) if axis != HEADS)
    return GroupCard(group.page_size, group.axes, shape, group.kv_heads, tuple(layer.layer for layer in group.layers))


def _starts(group: GroupPages, layer: int) -> list[int]:
    return next([tensor.data_ptr() for tensor in one.tensors] for one in group.layers if one.layer == layer)


def _itemsize(group: GroupPages) -> int:
    return group.layers[0].tensors[0].itemsize


def _table(parts: "Iterator[tuple[np.ndarray[Any, Any], int]]", device: int) -> "np.ndarray[Any, Any]":
    """[pieces, 3]: address, length, device."""
    return np.concatenate([
        np.stack([starts, np.full_like(starts, size), np.full_like(starts, device)], 1) for starts, size in parts])
