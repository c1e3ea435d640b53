"""Pages over TCP connections: between engines wherever they run, with nothing but sockets."""

import contextlib
import logging
import math
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.execution.channel import Channel, ChannelClosedError, Frame, Kind, Listener, connect, decode, encode
from hotswap.core.interfaces.kv_transfer import TransferWorker
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.plugins.kv_transfer.peer import PeerOptions, PeerTransfer, Ticket
from hotswap.plugins.kv_transfer.peer_worker import PeerWorker, Span
from hotswap.plugins.kv_transfer.rank_card import RankCard, Read, block_shape_of, put, take
from hotswap.plugins.kv_transfer.remembered import Remembered

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 * 2**20
"""About so many bytes are asked for at a time."""
ACCEPT_S = 0.2
EVERYWHERE = "0.0.0.0"


class TcpOptions(PeerOptions):
    host: str = Field(default="127.0.0.1")
    """The address at which ranks listen and are found: one of the machine on which they run. Ports are chosen by the
    system."""


class TcpTransfer(PeerTransfer):
    """Every rank listens, and the next engine's ranks ask for the layers and heads that they need.

    Choose it where engines share no memory and NIXL is not installed. Both ends prove with HMAC-SHA256 that they belong
    to the same server; what travels is numbers of bounded length, never code. Bytes are not encrypted.
    """

    Options = TcpOptions
    options: TcpOptions
    wire = "tcp"

    def worker(self) -> TransferWorker:
        check_host(self.options.host)
        return TcpWorker()

    def address(self) -> dict[str, Any]:
        return {"host": self.options.host}


def check_host(host: str) -> None:
    """ConfigError where a rank on this machine could not listen at ``host``, or not be found there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            problem = "peers cannot be told to connect to it" if probe.getsockname()[0] == EVERYWHERE else None
    except (OSError, UnicodeError) as error:  # that is what a name that is none ends in
        problem = str(error)
    if problem is not None:
        raise ConfigError(
            f"a rank cannot listen at {host!r} ({problem}); give an IPv4 address of this machine, or a name of it",
            "kv_transfer.host")


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
    """``copies``: how many are being made of the pages right now, before which the transfer does not end; ``ended``:
    how it will."""

    name: str
    spans: dict[str, Span]
    finished: set[str] = field(default_factory=set)
    copies: int = 0
    ended: EndedTransfer | None = None


@dataclass
class _Early:
    """Readers that were done before the pages came, as those are whose requests have ended meanwhile."""

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
    """One thread listens, one more serves each peer. Whoever copies pages holds up the end of their transfer meanwhile,
    and nothing else."""

    def open(self, terms: Mapping[str, Any]) -> dict[str, Any]:
        self._kept: dict[str, _Kept] = {}
        self._early: Remembered[str, _Early] = Remembered()
        self._gone: Remembered[str, None] = Remembered()  # keys whose pages have gone
        self._changed = threading.Condition()
        self._closed = False
        self._channels: set[Channel] = set()
        self._listener = Listener(self.secret, host=terms["host"])
        threading.Thread(target=self._listen, name="hotswap-kv-listen", daemon=True).start()
        return {"tcp": self._listener.address}

    def keep(self, name: str, key: str, spans: Mapping[str, Span]) -> None:
        with self._changed:
            early = self._early.pop(key, None) or _Early()
            self._kept[key] = _Kept(name, dict(spans), early.finished)
            if early.over:
                self._let_go(key)
            self._changed.notify_all()

    def expire(self, key: str) -> None:
        with self._changed:
            self._let_go(key, 0)

    def _let_go(self, key: str, tokens: int | None = None) -> None:
        """Whoever asks for it from now on is refused at once; who copies it may end that first."""
        self._gone[key] = None
        self._changed.notify_all()
        if (kept := self._kept.pop(key, None)) is not None:
            kept.ended = EndedTransfer(kept.name, tokens)
            if not kept.copies:
                self.told(*kept.ended)

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
            frame = self.heard(channel)
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

    def heard(self, channel: Channel) -> Frame:
        """What a connected peer says next."""
        return channel.receive()

    def answer(self, wanted: Wanted) -> bytes:
        """What a FETCH is answered with. KeyError and ValueError where the pages are not kept, or not any more."""
        with self._pinned(wanted) as ids, torch.inference_mode():
            blocks = take(self.cache.groups[wanted.group], ids, [wanted.layer], wanted.first_head, wanted.heads)
            return b"".join(block.view(-1).view(torch.uint8).numpy().tobytes() for block in blocks)

    @contextlib.contextmanager
    def _pinned(self, wanted: Wanted) -> Iterator[tuple[int, ...]]:
        """The ids of pages that stay as they are meanwhile, however long that is."""
        with self._changed:
            kept, ids = self.find(wanted)
            kept.copies += 1
        try:
            yield ids
        finally:
            with self._changed:
                kept.copies -= 1
                if kept.ended is not None and not kept.copies:
                    self.told(*kept.ended)

    def find(self, wanted: Wanted) -> tuple[_Kept, tuple[int, ...]]:
        """What is kept, and the ids of the pages. They may be on their way yet, and are waited for. Under the lock."""
        self._changed.wait_for(
            lambda: self._closed or wanted.key in self._gone or wanted.key in self._kept, self.timeout_s)
        if (kept := self._kept.get(wanted.key)) is None:
            raise ValueError("these pages are not kept here, or not any more")
        span = kept.spans[wanted.group]
        skip = wanted.first - span.first
        if skip < 0 or skip + wanted.count > len(span.ids):
            raise ValueError(f"pages {wanted.first} to {wanted.first + wanted.count - 1} are not among those kept")
        return kept, span.ids[skip : skip + wanted.count]

    def _finish(self, told: Finished) -> None:
        with self._changed:
            if told.key in self._gone:
                return
            kept = self._kept.get(told.key)
            early = self._early.get(told.key) or _Early()
            finished = early.finished if kept is None else kept.finished
            finished.add(told.reader)
            over = told.everybody or len(finished) >= told.readers
            if kept is None:  # its pages may come with the next step
                early.over |= over
                self._early[told.key] = early
            elif over:
                self._let_go(told.key)
