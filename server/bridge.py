"""Carries outputs from the engine's thread into an event loop, and gathers those of one call."""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

from hotswap.core.interfaces.deployment import EngineClient
from hotswap.core.request import FinishReason, OutputSink, Request, RequestOutput

Receiver = Callable[[RequestOutput], None]


class Bridge:
    """A step with 256 outputs wakes the event loop once. Receivers are called in the event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._arrived: deque[tuple[Receiver, RequestOutput]] = deque()
        self._scheduled = False

    def sink(self, receiver: Receiver) -> OutputSink:
        def post(output: RequestOutput) -> None:
            with self._lock:
                self._arrived.append((receiver, output))
                if self._scheduled:
                    return
                self._scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the event loop has been closed: nobody listens any more
                self._take()

        return post

    def _deliver(self) -> None:
        for receiver, output in self._take():
            receiver(output)

    def _take(self) -> deque[tuple[Receiver, RequestOutput]]:
        with self._lock:
            arrived, self._arrived, self._scheduled = self._arrived, deque(), False
        return arrived


class Call:
    """One API call: its requests, one a choice, in the engine. Whatever happens, ``close`` leaves none running."""

    def __init__(self, engine: EngineClient, bridge: Bridge, requests: Sequence[Request]) -> None:
        self._engine, self._bridge, self.requests = engine, bridge, requests
        self._index = {request.id: index for index, request in enumerate(requests)}
        self._live = set[str]()
        self._arrived: list[tuple[int, RequestOutput]] = []
        self._news = asyncio.Event()
        self._failed = False

    def start(self) -> None:
        """Add all requests, or none: raises what the engine raises."""
        sink = self._bridge.sink(self._receive)
        try:
            for request in self.requests:
                self._live.add(request.id)
                self._engine.add(request, sink)
        except BaseException:
            self._live.discard(request.id)
            self.close()
            raise

    def close(self) -> None:
        """Abort what still runs. Its last outputs are dropped."""
        for request_id in self._live:
            self._engine.abort(request_id)
        self._live.clear()

    async def batches(self) -> AsyncIterator[list[tuple[int, RequestOutput]]]:
        """(choice, output) as they come, those that came together in one list; ends when all choices have ended."""
        while self._live or self._arrived:
            await self._news.wait()
            self._news.clear()
            arrived, self._arrived = self._arrived, []
            if arrived:
                yield arrived

    async def all(self) -> list[tuple[int, RequestOutput]]:
        """Every output at once: wakes the caller when all choices have ended, or one has ended badly."""
        while self._live and not self._failed:
            await self._news.wait()
            self._news.clear()
        return self._arrived

    def _receive(self, output: RequestOutput) -> None:
        if output.request_id not in self._live:
            return
        self._arrived.append((self._index[output.request_id], output))
        if output.finish_reason is not None:
            self._live.discard(output.request_id)
            self._failed |= output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT)
        self._news.set()
