"""An engine that needs no model, for tests of what stands in front of engines."""

import threading
from collections.abc import Sequence

from hotswap.core.errors import EngineStoppedError, QueueFullError
from hotswap.core.interfaces.deployment import EngineFactory, EngineStatus, EventListener, Loads
from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.request import FinishReason, OutputSink, Request, RequestOutput
from hotswap.core.testing.fakes import next_token


class ToyEngine:
    """Implements ``EngineClient``. With each :meth:`step` it goes on by one token a live request, in the toy language
    of :mod:`hotswap.core.testing.fakes`; sinks are called from whoever steps.

    ``refuses``: it is full. ``requests``: all that it has taken, in order. ``calls``: what else it was asked for.
    """

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.refuses = False
        self.problem: str | None = None
        self.requests: list[Request] = []
        self.calls: list[str] = []
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Request, OutputSink, list[int]]] = {}
        self._listeners: list[EventListener] = []

    def add(self, request: Request, sink: OutputSink) -> None:
        with self._lock:
            if self._failure or "stop" in self.calls or "drain" in self.calls:
                raise EngineStoppedError(self._failure or "stopped")
            if self.refuses:
                raise QueueFullError("full")
            assert request.id not in self._live, f"{request.id} lives already in engine {self.name}"
            self.requests.append(request)
            known = list(request.continued.tokens) if request.continued else []
            self._live[request.id] = request, sink, known

    def step(self) -> bool:
        """False: there was nothing to do."""
        with self._lock:
            live = list(self._live.values())
        for request, sink, known in live:
            token = next_token([*request.prompt_token_ids, *known], request.seed)
            known.append(token)
            reason = FinishReason.LENGTH if len(known) >= (request.sampling.max_tokens or 1) else None
            if request.hands_over and reason is None:
                reason = FinishReason.HANDOFF
            self._tell(request.id, sink, RequestOutput(request.id, [token], "", finish_reason=reason))
        return bool(live)

    def fail(self, reason: str) -> None:
        """End by itself, as an engine whose device is lost."""
        self._failure = reason
        with self._lock:
            live = list(self._live.values())
        for request, sink, _ in live:
            self._tell(request.id, sink, RequestOutput(
                request.id, [], "", finish_reason=FinishReason.ERROR, error=reason))

    def abort(self, request_id: str) -> None:
        with self._lock:
            live = self._live.get(request_id)
        if live is not None:
            self._tell(request_id, live[1], RequestOutput(request_id, [], "", finish_reason=FinishReason.ABORT))

    def _tell(self, request_id: str, sink: OutputSink, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            with self._lock:
                if self._live.pop(request_id, None) is None:
                    return
        sink(output)

    def loads(self) -> Loads:
        return Loads(len(self._live), 0, 0.0)

    def engines(self) -> Sequence[EngineStatus]:
        return ()

    def watch(self, listener: EventListener) -> None:
        self._listeners.append(listener)

    def publish(self, event: CacheEvent) -> None:
        for listener in self._listeners:
            listener([event])

    def reset(self) -> int:
        self.calls.append("reset")
        return 3

    def health(self) -> str | None:
        return self._failure or self.problem or ("stopped" if "stop" in self.calls else None)

    @property
    def failure(self) -> str | None:
        return self._failure

    def drain(self, timeout_s: float) -> None:
        self.calls.append("drain")

    def stop(self) -> None:
        self.calls.append("stop")

    @property
    def live(self) -> list[str]:
        return list(self._live)

    def factory(self, role: str = "") -> EngineFactory:
        return EngineFactory(self.name, role, lambda: self)
