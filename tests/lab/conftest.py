"""A stub of an OpenAI server whose answers and times a test writes down, and a clock to measure it with."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hotswap.core.engine.clock import SystemClock
from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.load import run_load
from hotswap.lab.records import BlockRecord
from hotswap.lab.targets.openai import Endpoint, OpenAITarget


class Reply:
    """One answer in the making: the test's script calls these."""

    def __init__(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        self.body, self._handler = body, handler
        self.tokens = 0

    def refuse(self, status: int, message: str = "overloaded") -> None:
        data = json.dumps({"error": {"message": message}}).encode()
        self._handler.send_response(status)
        self._handler.send_header("Content-Length", str(len(data)))
        self._handler.end_headers()
        self._handler.wfile.write(data)

    def begin(self) -> None:
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "text/event-stream")
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def event(self, data: Any) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        line = f"data: {text}\n\n".encode()
        self._handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")

    def say(self, tokens: int = 1, **choice: Any) -> None:
        """One chunk of ``tokens`` tokens."""
        self.tokens += tokens
        self.event({"choices": [choice or {"text": "x" * tokens}]})

    def end(self, finish_reason: str = "length", **details: Any) -> None:
        self.event({"choices": [{"text": "", "finish_reason": finish_reason}]})
        usage = {"prompt_tokens": len(self.body.get("prompt", ())), "completion_tokens": self.tokens, **details}
        self.event({"choices": [], "usage": usage})
        self.event("[DONE]")
        self._handler.wfile.write(b"0\r\n\r\n")

    def cut(self) -> None:
        """As a server that dies: the answer ends in the middle."""
        self._handler.wfile.write(b"0\r\n\r\n")


class Stub:
    """``script`` answers each request, on a thread of its own; ``bodies`` are those that were sent."""

    def __init__(self) -> None:
        self.script: Callable[[Reply], None] = lambda reply: None
        self.bodies: list[dict[str, Any]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
                stub.bodies.append(body)
                with contextlib.suppress(ConnectionError):
                    stub.script(Reply(self, body))

            def do_GET(self) -> None:
                data = json.dumps({"data": [{"id": "stub", "max_model_len": 1000}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    yield server
    server.stop()


NOW = SystemClock().now
sleep = time.sleep


def measure(stub: Stub, count: int, load: Any, window: float | None = None, **endpoint: Any) -> BlockRecord:
    """A block of ``count`` requests at the stub."""
    target = OpenAITarget(Endpoint(stub.url, **endpoint), NOW)
    items = [(index, WorkItem((1, 2, 3, 4), 8)) for index in range(count)]
    try:
        stretch = run_load(target, items, load, NOW, name="t", window=window)
    finally:
        target.close()
    return BlockRecord("base", 0, 0, stretch.wall, stretch.records)


@pytest.fixture(name="measure")
def _measure(stub: Stub) -> Callable[..., BlockRecord]:
    return lambda *args, **kwargs: measure(stub, *args, **kwargs)
