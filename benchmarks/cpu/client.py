"""A client that takes next to nothing of the cores on which the servers are measured: one thread, which notes what came
when, and reads what it says after the load is over."""

import json
import re
import selectors
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.flight import Flight, records_of
from hotswap.lab.records import RequestRecord
from hotswap.lab.targets.target import Ending

PIECE_BYTES = 1 << 16
HEAD_END = b"\r\n\r\n"
CHUNKED = re.compile(rb"^transfer-encoding:[ \t]*chunked", re.IGNORECASE | re.MULTILINE)
CHUNK_SIZE = re.compile(rb"(?:\r\n)?([0-9a-fA-F]+)[^\r\n]*\r\n")
"""Behind the end of the chunk before; what follows the number is nobody's business."""


@dataclass
class Heard:
    """The answer to one request, as it came: (time, bytes), until the server hung up."""

    sent: float
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    ended: float = 0.0


def request(route: str, body: Mapping[str, Any]) -> bytes:
    """HTTP/1.1, one request a connection."""
    data = json.dumps(body).encode()
    return (f"POST {route} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(data)}\r\n\r\n").encode() + data


def exchange(
    port: int, requests: Sequence[bytes], streams: int, now: Callable[[], float], limit_s: float,
) -> list[Heard]:
    """Send all of them to a server of this machine, at most ``streams`` under way. TimeoutError behind ``limit_s``
    seconds, OSError where nobody listens."""
    begun, heard = now(), [Heard(0.0) for _ in requests]
    waiting, live = deque(range(len(requests))), 0
    with selectors.DefaultSelector() as selector:
        try:
            while waiting or live:
                while waiting and live < streams:
                    index = waiting.popleft()
                    heard[index].sent = now() - begun
                    connection = socket.create_connection(("127.0.0.1", port))
                    selector.register(connection, selectors.EVENT_READ, heard[index])
                    connection.sendall(requests[index])
                    live += 1
                left = begun + limit_s - now()
                if left <= 0 or not (ready := selector.select(left)):
                    raise TimeoutError(f"{live} requests have not ended within {limit_s:g} s")
                for key, _ in ready:
                    live -= _ended(selector, key, now() - begun)
        finally:
            for key in list(selector.get_map().values()):
                key.fileobj.close()  # type: ignore[union-attr]
    return heard


def _ended(selector: selectors.BaseSelector, key: selectors.SelectorKey, time: float) -> bool:
    """Note what has come; whether that was all."""
    connection: Any = key.fileobj
    try:
        piece = connection.recv(PIECE_BYTES)
    except ConnectionResetError:
        piece = b""
    if piece:
        key.data.pieces.append((time, piece))
        return False
    key.data.ended = time
    selector.unregister(connection)
    connection.close()
    return True


def records(items: Sequence[WorkItem], heard: Sequence[Heard]) -> tuple[RequestRecord, ...]:
    """What was heard, read."""
    flights = []
    for index, (item, one) in enumerate(zip(items, heard, strict=True)):
        flight = Flight(index, item, one.sent, one.sent, 0.0, lambda flight: None)
        flight.ended(_read(one, flight))
        flights.append(flight)
    return records_of(flights, max(one.ended for one in heard))


def _read(heard: Heard, flight: Flight) -> Ending:
    """Tells the ``flight`` of each delivery."""
    usage: Mapping[str, Any] = {}
    finish, done = None, False
    for time, line in _lines(_body(heard.pieces)):
        if not line.startswith(b"data:"):
            continue
        if (data := line[5:].strip()) == b"[DONE]":
            done = True
            break
        message = json.loads(data)
        if "error" in message:
            return Ending(heard.ended, error=f"error event: {data.decode()}"[:300])
        usage = message.get("usage") or usage
        for choice in message.get("choices") or ():
            finish = choice.get("finish_reason") or finish
            if choice.get("text") or (choice.get("delta") or {}).get("content"):
                flight.arrived(time, None)
    if finish is None or not (done or usage):
        everything = b"".join(piece for _, piece in heard.pieces)
        return Ending(heard.ended, error=f"no whole stream came, but: {everything[:300].decode('utf-8', 'replace')}")
    return Ending(heard.ended, finish, None, usage.get("prompt_tokens"), usage.get("completion_tokens"))


def _body(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """What came behind the head, and when; without the sizes of chunks (RFC 9112, section 7.1), if it is in chunks."""
    raw, left = b"", -1  # bytes of the chunk that have not come; -1 in the head
    for time, piece in pieces:
        raw += piece
        if left < 0 and HEAD_END in raw:
            head, _, raw = raw.partition(HEAD_END)
            left = 0 if CHUNKED.search(head) else sys.maxsize
        while raw and left >= 0:
            if left:
                yield time, raw[:left]
                raw, left = raw[left:], max(0, left - len(raw))
            elif (size := CHUNK_SIZE.match(raw)) is None:
                break
            elif (left := int(size[1], 16)) == 0:
                return
            else:
                raw = raw[size.end() :]


def _lines(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Each line, and when its end came."""
    begun = b""
    for time, piece in pieces:
        *whole, begun = (begun + piece).split(b"\n")
        for line in whole:
            yield time, line
