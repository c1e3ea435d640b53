"""Pages over TCP connections: between engines wherever they run, with nothing but sockets."""

import contextlib
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field

from hotswap.core.execution.channel import Channel, ChannelClosedError, Kind, Listener, connect, decode, encode
from hotswap.core.interfaces.kv_transfer import TransferWorker
from hotswap.plugins.kv_transfer.peer import PeerOptions, PeerTransfer, Ticket
from hotswap.plugins.kv_transfer.peer_worker import PeerWorker, Span
from hotswap.plugins.kv_transfer.rank_card import RankCard, Read, block_shape_of, put, take

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 * 2**20
"""About so many bytes are asked for at a time."""
ACCEPT_S = 0.2
REMEMBERED = 4096
"""Keys that have gone."""


class TcpOptions(PeerOptions):
    host: str = Field(default="127.0.0.1")
    """The address at which ranks listen and are found. Ports are chosen by the system."""


class TcpTransfer(PeerTransfer):
    """Every rank listens, and the next engine's ranks ask for the layers and heads that they need.

    Choose it where engines share no memory and NIXL is not installed. Both ends prove with HMAC-SHA256 that they belong
    to the same server; what travels is numbers of bounded length, never code. Bytes are not encrypted.
    """

    Options = TcpOptions
    options: TcpOptions
    wire = "tcp"

    def worker(self) -> TransferWorker:
        return TcpWorker()

    def address(self) -> dict[str, Any]:
        return {"host": self.options.host}


@dataclass(frozen=True)
class Wanted:
    """One request for bytes: ``count`` logical pages from ``first`` on, keys and values of one layer."""

    key: str
    group: str
    layer: int
    first_head: int
    heads: int
    first: int
    count: int


@dataclass(frozen=True)
class Finished:
    """``reader`` needs no more of ``key``; the pages may go when ``readers`` have said so, or ``everybody`` is done."""

    key: str
    reader: str
    readers: int
    everybody: bool = False


@dataclass
class _Kept:
    """``name`` is empty until the pages have come. ``over``: nobody will read them."""

    name: str = ""
    spans: dict[str, Span] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    over: bool = False


def ask(channel: Channel, peer: RankCard, wanted: Wanted) -> bytes:
    """ChannelClosedError where the peer refuses."""
    channel.send(Kind.FETCH, encode(wanted))
    frame = channel.receive()
    if frame.kind is not Kind.PAGES:
        raise ChannelClosedError(f"{peer.label} refuses: {frame.payload.decode(errors='replace')}")
    return frame.payload


class TcpWorker(PeerWorker):
    """One thread listens, one more serves each peer. Pages are copied under a lock, so that a reader gets them while
    they are kept or not at all."""

    def open(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        self._kept: dict[str, _Kept] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()  # keys whose pages have gone, or will not be wanted
        self._changed = threading.Condition()
        self._closed = False
        self._channels: set[Channel] = set()
        self._listener = Listener(self.secret, host=terms["host"])
        threading.Thread(target=self._listen, name="hotswap-kv-listen", daemon=True).start()
        return {"tcp": self._listener.address}

    def keep(self, name: str, key: str, spans: Mapping[str, Span]) -> None:
        with self._changed:
            kept = self._kept.setdefault(key, _Kept())
            kept.name, kept.spans = name, dict(spans)
            if kept.over:
                self._let_go(key)
            self._changed.notify_all()
        if kept.over:
            self.told(name)

    def expire(self, key: str) -> None:
        with self._changed:
            kept = self._let_go(key)
        if kept is not None:
            self.told(kept.name, 0)

    def _let_go(self, key: str) -> _Kept | None:
        """Whoever asks for it from now on is refused at once."""
        self._gone[key] = None
        while len(self._gone) > REMEMBERED:
            self._gone.popitem(last=False)
        self._changed.notify_all()
        return self._kept.pop(key, None)

    def read(self, ticket: Ticket, peer: RankCard, wanted: Sequence[tuple[Read, Span]]) -> None:
        channel = self.connected(peer)
        try:
            for read, span in wanted:
                self._read(channel, ticket.key, peer, read, span)
        finally:
            channel.close()

    def _read(self, channel: Channel, key: str, peer: RankCard, read: Read, span: Span) -> None:
        card, dtype = peer.groups[read.group], getattr(torch, peer.dtype)
        page_bytes = 2 * math.prod(block_shape_of(card, 1, read.heads)) * dtype.itemsize
        most = max(1, CHUNK_BYTES // page_bytes)
        for layer in read.layers:
            for begin in range(0, len(span.ids), most):
                ids = span.ids[begin : begin + most]
                data = ask(channel, peer, Wanted(
                    key, read.group, layer, read.first_head, read.heads, span.first + begin, len(ids)))
                if len(data) != page_bytes * len(ids):
                    raise ChannelClosedError(
                        f"{peer.label} sent {len(data)} bytes for {len(ids)} pages of {page_bytes}")
                both = torch.frombuffer(bytearray(data), dtype=dtype)
                blocks = both.view(2, *block_shape_of(card, len(ids), read.heads))
                put(self.cache.groups[read.group], ids, [layer], read.first_head, read.heads, list(blocks))

    def done(self, ticket: Ticket, peers: Sequence[RankCard], all_readers: bool) -> None:
        for peer in peers:
            with contextlib.suppress(OSError):
                channel = self.connected(peer)
                try:
                    channel.send(Kind.DONE, encode(Finished(ticket.key, self.rank, self.readers, all_readers)))
                    channel.receive()  # that it was heard
                finally:
                    channel.close()

    def shut(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            channels = list(self._channels)
        self._listener.close()
        for channel in channels:
            channel.close()

    def connected(self, peer: RankCard) -> Channel:
        channel = connect(peer.address["tcp"], self.secret, 0)
        channel.set_timeout(self.timeout_s)
        return channel

    # serving

    def _listen(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept(ACCEPT_S)
            except TimeoutError:
                continue
            except OSError:
                return  # it was closed
            threading.Thread(target=self._admit, args=(connection,), name="hotswap-kv-serve", daemon=True).start()

    def _admit(self, connection: Any) -> None:
        try:
            channel, _ = self._listener.admit(connection)
        except ChannelClosedError as error:
            logger.warning("a peer was refused: %s", error)
            return
        with self._changed:
            self._channels.add(channel)
        try:
            self._serve(channel)
        except (ChannelClosedError, OSError):
            pass  # it has what it wanted, or went away
        finally:
            with self._changed:
                self._channels.discard(channel)
            channel.close()

    def _serve(self, channel: Channel) -> None:
        while True:
            frame = channel.receive()
            if frame.kind is Kind.FETCH:
                try:
                    data = self.answer(decode(Wanted, frame.payload))
                except (KeyError, ValueError) as error:
                    channel.send(Kind.REFUSED, str(error).encode())
                else:
                    channel.send(Kind.PAGES, data)
            elif frame.kind is Kind.DONE:
                self._finish(decode(Finished, frame.payload))
                channel.send(Kind.DONE)
            else:
                raise ChannelClosedError(f"a peer sent {frame.kind.name}, which is not asked for here")

    def answer(self, wanted: Wanted) -> bytes:
        """What a FETCH is answered with. KeyError and ValueError where the pages are not kept, or not any more."""
        with self._changed, torch.inference_mode():
            blocks = take(self.cache.groups[wanted.group], self.kept_ids(wanted), [wanted.layer], wanted.first_head,
                          wanted.heads)
            return b"".join(block.view(-1).view(torch.uint8).numpy().tobytes() for block in blocks)

    def kept_ids(self, wanted: Wanted) -> tuple[int, ...]:
        """The ids of the pages. They may be on their way yet, and are waited for; they stay while the lock is held."""
        self._changed.wait_for(lambda: self._closed or self._is_decided(wanted.key), self.timeout_s)
        kept = self._kept.get(wanted.key)
        if kept is None or not kept.name:
            raise ValueError("these pages are not kept here, or not any more")
        span = kept.spans[wanted.group]
        skip = wanted.first - span.first
        if skip < 0 or skip + wanted.count > len(span.ids):
            raise ValueError(f"pages {wanted.first} to {wanted.first + wanted.count - 1} are not among those kept")
        return span.ids[skip : skip + wanted.count]

    def _is_decided(self, key: str) -> bool:
        return key in self._gone or (key in self._kept and bool(self._kept[key].name))

    def _finish(self, told: Finished) -> None:
        with self._changed:
            if told.key in self._gone:
                return
            kept = self._kept.setdefault(told.key, _Kept())  # its pages may come with the next step
            kept.finished.add(told.reader)
            kept.over |= told.everybody or len(kept.finished) >= told.readers
            over = kept.over and kept.name
            if over:
                self._let_go(told.key)
        if over:
            self.told(kept.name)
