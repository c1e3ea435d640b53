"""Server-sent events, and clients that hang up."""

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotswap.server.http.errors import ClientGone

DONE = b"data: [DONE]\n\n"
HOLE = uuid.uuid4().hex
"""Where the text belongs in what a :class:`TextEvent` is made of: a word that nobody else uses."""
T = TypeVar("T")

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: json.dumps makes one a call


def event(data: Mapping[str, Any]) -> bytes:
    return f"data: {_encode(data)}\n\n".encode()


class TextEvent:
    """Events that differ in one text: what stands around it is encoded once. ``data`` has :data:`HOLE` in its place."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._before, self._after = event(data).split(_encode(HOLE).encode())

    def __call__(self, text: str) -> bytes:
        """The same bytes as those of :func:`event`."""
        return self._before + _encode(text).encode() + self._after


class EventStream(Response):
    """Sends ``events`` as they come. When the client hangs up, also between events, the generator is closed at once.
    ``close`` is called in any case, even if the generator never began."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], close: Callable[[], None],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._close = events, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        hang_up = asyncio.ensure_future(_until_disconnect(receive))
        try:
            await asyncio.wait({sending, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._close()
            hang_up.cancel()
            sending.cancel()
            await asyncio.wait({sending, hang_up})
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        finally:
            await self._events.aclose()
        await send({"type": "http.response.body", "body": b""})


async def unless_gone(request: Request, answer: Awaitable[T]) -> T:
    """``answer``, which is cancelled, and ClientGone raised, when the client hangs up before it is there."""
    answering = asyncio.ensure_future(answer)
    hang_up = asyncio.ensure_future(_until_disconnect(request.receive))
    try:
        await asyncio.wait({answering, hang_up}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        raise ClientGone
    finally:
        hang_up.cancel()
        answering.cancel()
        await asyncio.wait({answering, hang_up})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
