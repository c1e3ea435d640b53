"""Runs many requests to their ends on the caller's thread: for the Python class and for batch files."""

import queue
from collections import deque
from collections.abc import Iterable, Iterator

from hotswap.core.errors import QueueFullError
from hotswap.core.interfaces.deployment import EngineClient
from hotswap.core.request import Request, RequestOutput


def run_all(engine: EngineClient, requests: Iterable[Request]) -> Iterator[RequestOutput]:
    """Outputs of all ``requests`` as they come. The engine's queue is kept full, however many there are.

    Closing the iterator aborts what still runs.
    """
    waiting, live = deque(requests), set[str]()
    outbox: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
    try:
        while waiting or live:
            _feed(engine, waiting, live, outbox)
            output = outbox.get()
            if output.finish_reason is not None:
                live.discard(output.request_id)
            yield output
    finally:
        for request_id in live:
            engine.abort(request_id)


def _feed(
    engine: EngineClient, waiting: deque[Request], live: set[str], outbox: "queue.SimpleQueue[RequestOutput]",
) -> None:
    while waiting:
        try:
            engine.add(waiting[0], outbox.put)
        except QueueFullError:
            if not live:
                raise
            return
        live.add(waiting.popleft().id)
