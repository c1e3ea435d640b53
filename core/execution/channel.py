"""Messages between an engine and its workers: frames of bounded length on a socket that both ends have proven to own.

Nothing here can make the receiver run code: payloads are JSON, checked against the types they are meant to be.
"""

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from threading import BoundedSemaphore, Lock
from typing import Any, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from hotswap.core.engine.clock import Clock, SystemClock
from hotswap.core.interfaces.messages import StepMessage

MAX_FRAME_BYTES = 256 * 2**20
"""Longer than any step's message; a peer that announces more is cut off."""

HANDSHAKE_TIMEOUT_S = 10.0
"""From the first byte to the last."""
STRANGERS = 16
"""Connections at a time that have not proven anything yet. Those of ours take milliseconds for it."""
SECRET_BYTES = 32
_NONCE_BYTES = 32
_DIGEST_BYTES = hashlib.sha256().digest_size
_HEADER = struct.Struct("<IB")
_PEER = struct.Struct("<I")

Value = TypeVar("Value")


class ChannelClosedError(ConnectionError):
    """The peer has hung up, or sent what is no frame of ours."""


class Kind(IntEnum):
    """What a frame holds. From the engine: ALLOCATE to SETTLE. From a worker: READY to EXCHANGED.
    Between workers of two engines: FETCH, PAGES, DONE, REFUSED."""

    ALLOCATE = 1
    EXECUTE = 2
    REPORT = 3
    STOP = 4
    JOIN = 5
    PREPARE = 6
    EXCHANGE = 7
    SETTLE = 8
    READY = 10
    DONE = 11
    VERDICT = 12
    REPORTED = 13
    REFUSED = 14
    FAILED = 15
    TRANSFERS = 16
    PREPARED = 17
    EXCHANGED = 18
    FETCH = 20
    PAGES = 21


_KINDS = frozenset(map(int, Kind))


class Frame(NamedTuple):
    kind: Kind
    payload: bytes


@cache
def _adapter(cls: Any) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def encode(value: Any) -> bytes:
    """``value`` as JSON: a dataclass, a named tuple, or what is built of them. Infinities stay what they are."""
    return to_json(value, inf_nan_mode="constants")


def decode(cls: Callable[..., Value], payload: bytes) -> Value:
    """ChannelClosedError where ``payload`` is no ``cls``: a peer that sends such a thing is not one of ours."""
    try:
        value: Value = _adapter(cls).validate_json(payload)
    except ValidationError as error:
        what = getattr(cls, "__name__", cls)
        raise ChannelClosedError(f"a peer sent what is no {what}: {error.error_count()} errors") from error
    return value


def encode_message(message: StepMessage) -> bytes:
    """Without the entries by which the host undoes its grants: they are nobody else's."""
    grants = [(request, grant._replace(entry=None)) for request, grant in message.grants]
    return encode(replace(message, grants=grants))


class Channel:
    """One end of a connection. ``send`` may be called from several threads, ``receive`` from one."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock, self._patience = connection, Lock(), -1.0

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """ChannelClosedError where the peer is gone."""
        if len(payload) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(payload)} bytes is longer than the limit of {MAX_FRAME_BYTES}")
        if not self._lock.acquire(timeout=self._patience):
            raise ChannelClosedError("the peer reads nothing: another message to it does not end")
        try:
            self._socket.sendall(_HEADER.pack(len(payload), kind) + payload)
        except OSError as error:
            raise ChannelClosedError(f"the peer is gone: {error}") from error
        finally:
            self._lock.release()

    def receive(self) -> Frame:
        """Wait for a frame. ChannelClosedError."""
        length, kind = _HEADER.unpack(_read(self._socket, _HEADER.size))
        if length > MAX_FRAME_BYTES or kind not in _KINDS:
            raise ChannelClosedError(f"a peer announced {length} bytes of kind {kind}, which is no frame of ours")
        return Frame(Kind(kind), _read(self._socket, length))

    def readable(self, seconds: float) -> bool:
        """Whether ``receive`` has something to begin with, be it a peer that has hung up; waits so long for it."""
        waiter = select.poll()  # which takes descriptors of any number
        try:
            waiter.register(self._socket, select.POLLIN)
        except ValueError:
            return True  # it was closed here
        return bool(waiter.poll(1e3 * seconds))

    def set_timeout(self, seconds: float) -> None:
        """How long the peer may stand still in the middle of a ``send`` or a ``receive``, and a ``send`` wait for
        that of another thread; it is gone then."""
        self._patience = seconds
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Wakes a ``receive`` in another thread."""
        with contextlib.suppress(OSError):  # it has been hung up on already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Listener:
    """Where the workers of one engine report. ``address`` is what :func:`connect` takes.

    A Unix socket (``unix:PATH``, mode 0600) for workers on this machine, else ``tcp:HOST:PORT`` at a port that the
    system chooses.
    """

    def __init__(
        self, secret: bytes, *, path: Path | None = None, host: str | None = None, clock: Clock | None = None,
    ) -> None:
        self._secret, self._clock, self._places = secret, clock or SystemClock(), BoundedSemaphore(STRANGERS)
        if path is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(str(path))
            path.chmod(0o600)  # before anybody can connect
            self.address = f"unix:{path}"
        else:
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._socket.bind((host or "127.0.0.1", 0))
            self.address = "tcp:{}:{}".format(*self._socket.getsockname())
        self._socket.listen()

    def accept(self, timeout_s: float) -> socket.socket:
        """The next connection, of whom nothing is known yet; it is for :meth:`admit`. TimeoutError, also where it has
        been hung up on because too many others have not proven who they are; OSError once closed."""
        self._socket.settimeout(timeout_s)
        connection, _ = self._socket.accept()
        if not self._places.acquire(timeout=timeout_s):
            connection.close()
            raise TimeoutError(f"{STRANGERS} connections have not proven yet who they are")
        return connection

    def admit(self, connection: socket.socket) -> tuple[Channel, int]:
        """The channel to a peer that knows the secret, and the number that it calls itself by.

        ChannelClosedError for anybody else, who is hung up on. Mutual challenge and response by HMAC-SHA256 (RFC 2104)
        over fresh nonces, so that nothing that was overheard can be used again.
        """
        deadline = _Deadline(self._clock)
        try:
            connection.settimeout(HANDSHAKE_TIMEOUT_S)
            ours = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(ours)
            hello = _read(connection, _PEER.size + _NONCE_BYTES + _DIGEST_BYTES, deadline)
            number, theirs, proof = hello[: _PEER.size], hello[_PEER.size : -_DIGEST_BYTES], hello[-_DIGEST_BYTES:]
            if not hmac.compare_digest(proof, _proof(self._secret, b"worker", ours, theirs, number)):
                raise ChannelClosedError("a peer does not know the secret")
            connection.sendall(_proof(self._secret, b"engine", ours, theirs, number))
            connection.settimeout(None)
        except OSError as error:
            connection.close()
            raise error if isinstance(error, ChannelClosedError) else ChannelClosedError(str(error)) from error
        finally:
            self._places.release()
        return Channel(_prompt(connection)), _PEER.unpack(number)[0]

    def close(self) -> None:
        self._socket.close()
        kind, _, place = self.address.partition(":")
        if kind == "unix":
            Path(place).unlink(missing_ok=True)


def connect(address: str, secret: bytes, number: int) -> Channel:
    """The worker's end of :meth:`Listener.admit`. ChannelClosedError where either end does not know the secret."""
    kind, _, place = address.partition(":")
    connection = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(HANDSHAKE_TIMEOUT_S)
        host, _, port = place.rpartition(":")
        deadline = _Deadline(SystemClock())
        connection.connect(place if kind == "unix" else (host, int(port)))
        theirs = _read(connection, _NONCE_BYTES, deadline)
        ours, who = secrets.token_bytes(_NONCE_BYTES), _PEER.pack(number)
        connection.sendall(who + ours + _proof(secret, b"worker", theirs, ours, who))
        answer = _read(connection, _DIGEST_BYTES, deadline)
        if not hmac.compare_digest(answer, _proof(secret, b"engine", theirs, ours, who)):
            raise ChannelClosedError(f"{address} does not know the secret")
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        raise ChannelClosedError(f"{address}: {error}") from error
    return Channel(_prompt(connection))


def _proof(secret: bytes, role: bytes, engine_nonce: bytes, worker_nonce: bytes, number: bytes) -> bytes:
    return hmac.digest(secret, b"hotswap/1 " + role + engine_nonce + worker_nonce + number, "sha256")


def _prompt(connection: socket.socket) -> socket.socket:
    """A message goes out at once: it never waits for another to fill the packet."""
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class _Deadline:
    """For all that is read of a peer that may send a byte at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._end = clock, clock.now() + HANDSHAKE_TIMEOUT_S

    def impose(self, connection: socket.socket) -> None:
        """TimeoutError where it is over."""
        left = self._end - self._clock.now()
        if left <= 0:
            raise TimeoutError("it took too long to prove who it is")
        connection.settimeout(left)


def _read(connection: socket.socket, count: int, deadline: _Deadline | None = None) -> bytes:
    data = bytearray(count)
    view, filled = memoryview(data), 0
    while filled < count:
        try:
            if deadline is not None:
                deadline.impose(connection)
            received = connection.recv_into(view[filled:])
        except OSError as error:
            raise ChannelClosedError(f"the peer is gone: {error}") from error
        if not received:
            raise ChannelClosedError("the peer has hung up")
        filled += received
    return bytes(data)
