"""A deployment: several engines behind one face."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from pydantic import Field

from hotswap.core.errors import EngineStoppedError, QueueFullError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.deployment import (
    Deployment,
    EngineClient,
    EngineFactory,
    EngineStatus,
    EventListener,
    Loads,
    Role,
)
from hotswap.core.request import FinishReason, OutputSink, Request, RequestOutput


class MyPart(Deployment):
    """One engine serves, others stand by: they take over when it is lost, and what it has no room for.

    Choose it ... (where a restart takes longer than clients can wait).
    """

    class Options(ComponentOptions):
        spares: Annotated[int, Field(ge=1)] = 1
        """How many engines stand by."""

    def roles(self) -> Sequence[Role]:
        return [Role("", 1 + self.options.spares)]

    def start(self, factories: Sequence[EngineFactory], now: Callable[[], float]) -> EngineClient:
        """Core has made a factory for each engine. Where one cannot be started, none is left running."""
        clients: list[EngineClient] = []
        try:
            for factory in factories:
                clients.append(factory.start())
        except BaseException:
            for client in clients:
                client.stop()
            raise
        return Line(factories, clients)


class Line:
    """The face of all: it has the methods of an engine (``EngineClient``), and so deployments nest."""

    def __init__(self, factories: Sequence[EngineFactory], clients: Sequence[EngineClient]) -> None:
        self.factories, self.clients = factories, clients
        self.lock = threading.Lock()  # clients call from many threads, and sinks from the engines'
        self.live: dict[str, EngineClient | None] = {}

    def add(self, request: Request, sink: OutputSink) -> None:
        """To the first engine that takes it."""
        with self.lock:
            if (known := request.id in self.live) is False:
                self.live[request.id] = None
        if known:
            error = f"a request with the id {request.id!r} lives already"
            return sink(RequestOutput(request.id, [], "", finish_reason=FinishReason.ERROR, error=error))
        refusal: Exception = EngineStoppedError(self.failure or "every engine has ended")
        for client in self.clients:
            try:
                self.live[request.id] = client
                return client.add(request, partial(self._deliver, sink))
            except (EngineStoppedError, QueueFullError) as error:
                refusal = error if isinstance(error, QueueFullError) else refusal
        self.live.pop(request.id, None)
        raise refusal

    def _deliver(self, sink: OutputSink, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            self.live.pop(output.request_id, None)
        sink(output)

    def abort(self, request_id: str) -> None:
        if client := self.live.get(request_id):
            client.abort(request_id)

    def loads(self) -> Loads:
        every = [client.loads() for client in self.clients]
        return Loads(
            sum(one.running for one in every), sum(one.waiting for one in every), every[0].kv_usage, len(self.live))

    def engines(self) -> Sequence[EngineStatus]:
        return [status for factory, client in zip(self.factories, self.clients, strict=True)
                for status in client.engines() or [
                    EngineStatus(factory.name, factory.role, client.health(), client.loads())]]

    def watch(self, listener: EventListener) -> None:
        for client in self.clients:
            client.watch(listener)

    def reset(self) -> int:
        return sum(client.reset() for client in self.clients if client.failure is None)

    def health(self) -> str | None:
        """None while one of them is well."""
        problems = [client.health() for client in self.clients]
        return None if None in problems else "; ".join(map(str, problems))

    @property
    def failure(self) -> str | None:
        """Why none of them will ever serve again."""
        failures = [client.failure for client in self.clients]
        return None if None in failures else "; ".join(map(str, failures))

    def drain(self, timeout_s: float) -> None:
        self._each([partial(client.drain, timeout_s) for client in self.clients])

    def stop(self) -> None:
        self._each([client.stop for client in self.clients])

    def _each(self, calls: Sequence[Callable[[], None]]) -> None:
        """Side by side: each may take its time."""
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
