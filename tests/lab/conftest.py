"""A stub of an OpenAI server whose answers and times a test writes down, and a clock to measure it with."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import LlamaConfig, LlamaForCausalLM

from hotswap.core.engine.clock import SystemClock
from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.load import run_load
from hotswap.lab.records import BlockRecord
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.lab.targets.target import Activity, Ending, Outgoing


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
        self.keys: set[str | None] = set()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
                stub.bodies.append(body)
                stub.keys.add(self.headers["Authorization"])
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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer, with a tokenizer of bytes."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256)).save_pretrained(path)
    special = ["<bos>", "<eos>", "<a>", "<b>"]
    vocabulary = {token: id for id, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Path:
    """A config file of the tiny model."""
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"path": str(tiny)}, "device": "cpu", "dtype": "float32", "kvcache": {"memory": "2MiB"},
        "scheduler": {"max_running": 8}, "execution": {"num_threads": 1}}))
    return path


class Script:
    """A ``Target`` that answers after ``delay`` seconds with tokens made by ``reply``, and caches as a server does:
    a prompt that begins like one before finds its first ``page`` tokens."""

    def __init__(self, delay: float = 0.002, reply: Any = None, can_reset: bool = True, page: int = 8) -> None:
        self.delay, self.can_reset, self.page = delay, can_reset, page
        self.reply = reply or (lambda request: list(request.prompt[:2]))
        self.requests: list[Outgoing] = []
        self.cached: set[tuple[int, ...]] = set()
        self.resets, self.dead = 0, None
        self.serving = 0

    def send(self, request: Outgoing, hearer: Any) -> None:
        self.requests.append(request)
        self.serving += 1
        threading.Timer(self.delay, self._answer, (request, hearer)).start()

    def _answer(self, request: Outgoing, hearer: Any) -> None:
        head = request.prompt[:self.page]
        cached = len(head) if head in self.cached else 0
        self.cached.add(head)
        self.serving -= 1
        if self.dead:
            return hearer.ended(Ending(NOW(), error=self.dead))
        tokens = self.reply(request)
        hearer.arrived(NOW(), len(tokens), tokens)
        return hearer.ended(Ending(NOW(), "length", None, len(request.prompt), len(tokens), cached))

    def abort(self, id: str) -> None:
        """They end soon anyway."""

    def reset(self) -> None:
        assert not self.serving, "the cache is emptied while nothing runs"
        self.resets += 1
        self.cached.clear()

    def begin(self) -> None:
        """Counts nothing."""

    def finish(self) -> Activity:
        return Activity()

    def problem(self) -> str | None:
        return self.dead

    def effective(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing was started."""


@pytest.fixture(name="script")
def _script() -> type[Script]:
    return Script
