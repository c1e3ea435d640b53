"""A byte tokenizer, an engine that answers from a script, and a real HTTP server in a thread."""

import asyncio
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx
import pytest
import uvicorn
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hotswap.core.config.schema import ServerSection
from hotswap.core.engine.outputs import absorb, last_words
from hotswap.core.engine.pool import RequestState
from hotswap.core.errors import EngineStoppedError, QueueFullError
from hotswap.core.interfaces.deployment import EngineStatus, EventListener, Loads
from hotswap.core.interfaces.messages import RowVerdict
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.request import FinishReason, OutputSink, Request, TokenLogprob
from hotswap.server.app import create_app
from hotswap.server.served import Served

SPECIAL = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
BOS, EOS, IM_START, IM_END = range(4)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def byte_tokenizer() -> Tokenizer:
    """Ids 0 … 3 are control tokens, the others one byte each."""
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, "<bos>", "<eos>")


class FakeEngine:
    """Implements ``EngineClient`` on a thread. ``reply`` makes a request's tokens, by default the alphabet for ever;
    each step gives every running request one token and takes ``step_s``. Finishing is core's own code."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int = 512) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._stopped = False
        self.failure: str | None = None
        self._lock = threading.Condition()
        self.running: dict[str, tuple[RequestState, Iterator[int]]] = {}
        self.waiting: deque[RequestState] = deque()
        self.restore()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def restore(self) -> None:
        """As new, for the next test."""
        self.reply: Callable[[Request], Iterator[int]] = lambda request: self.spell(itertools.cycle(ALPHABET))
        self.step_s, self.max_running, self.max_queue = 0.0, 64, 256
        self.problem: str | None = None
        self.fail_after: int | None = None
        self.admit = True
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.seen: set[tuple[str, tuple[int, ...]]] = set()
        self.resets = 0
        self._draining = False

    def spell(self, characters: Any) -> Iterator[int]:
        for character in characters:
            yield from self.tokenizer.encode_without_special_parsing(character)

    def says(self, text: str, *tokens: int) -> None:
        """Every request gets this text, then these tokens."""
        self.reply = lambda request: itertools.chain(self.spell(text), tokens, self.spell(itertools.cycle("~")))

    def add(self, request: Request, sink: OutputSink) -> None:
        with self._lock:
            if self._draining or self._stopped:
                raise EngineStoppedError("the engine is draining")
            if len(self.waiting) >= self.max_queue + max(0, self.max_running - len(self.running)):
                raise QueueFullError("the queue is full")
            self.requests.append(request)
            room = request.sampling.max_tokens or self.max_model_len - len(request.prompt_token_ids)
            self.waiting.append(RequestState(request, sink, 0.0, len(self.requests), room))
            self._lock.notify()

    def abort(self, request_id: str) -> None:
        with self._lock:
            self.aborted.append(request_id)
            found = [state for state in self._states() if state.id == request_id]
            for state in found:
                self._end(state, FinishReason.ABORT)

    def loads(self) -> Loads:
        return Loads(len(self.running), len(self.waiting), 0.0)

    def engines(self) -> Sequence[EngineStatus]:
        return ()

    def watch(self, listener: EventListener) -> None:
        """It caches no pages."""

    def reset(self) -> int:
        self.resets += 1
        self.seen.clear()
        return 7

    def health(self) -> str | None:
        return self.failure or self.problem

    def drain(self, timeout_s: float) -> None:
        self._draining = True
        deadline = time.monotonic() + timeout_s
        while self._states() and time.monotonic() < deadline:
            time.sleep(0.005)
        with self._lock:
            for state in self._states():
                self._end(state, FinishReason.ABORT)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for state in self._states():
                self._end(state, FinishReason.ABORT)
            self._lock.notify()
        self._thread.join(5)

    def _states(self) -> list[RequestState]:
        return [*self.waiting, *(state for state, _ in self.running.values())]

    def _end(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
        if state in self.waiting:
            self.waiting.remove(state)
        self.running.pop(state.id, None)
        state.sink(last_words(state, reason, error))

    def _run(self) -> None:
        """Whatever is raised here ends it for ever, as it does the real one."""
        try:
            self._loop()
        except Exception as error:
            with self._lock:
                self._stopped, self.failure = True, f"the engine's loop has ended: {error}"
                for state in self._states():
                    self._end(state, FinishReason.ERROR, self.failure)

    def _loop(self) -> None:
        while not self._stopped:
            with self._lock:
                while not self._stopped and not (self.running or (self.waiting and self.admit)):
                    self._lock.wait(0.05)
                while self.waiting and self.admit and len(self.running) < self.max_running:
                    self._start(self.waiting.popleft())
                for state, tokens in list(self.running.values()):
                    self._step(state, tokens)
            if self.step_s:
                time.sleep(self.step_s)

    def _start(self, state: RequestState) -> None:
        key = (state.request.cache_key.salt, tuple(state.request.prompt_token_ids))
        state.cached_tokens = len(key[1]) - 1 if key in self.seen else 0
        self.seen.add(key)
        if state.prompt_logprobs is not None:
            state.prompt_logprobs[1:] = [self._logprob(state, token) for token in key[1][1:]]
        self.running[state.id] = (state, iter(()))  # with the others, if the reply cannot be made
        self.running[state.id] = (state, self.reply(state.request))

    def _step(self, state: RequestState, tokens: Iterator[int]) -> None:
        if self.fail_after is not None and state.output_length >= self.fail_after:
            return self._end(state, FinishReason.ERROR, "RuntimeError in /opt/engine/kernels.py: device lost")
        token = next(tokens)
        logprobs = None if state.request.sampling.logprobs is None else [self._logprob(state, token)]
        output, ending = absorb(state, RowVerdict(state.id, [token], 0, logprobs=logprobs), 0.0)
        if ending is not None:
            del self.running[state.id]
        state.sink(output)
        return None

    def _logprob(self, state: RequestState, token: int) -> TokenLogprob:
        sampling = state.request.sampling
        count = max(sampling.logprobs or 0, sampling.prompt_logprobs or 0)
        return TokenLogprob(token, -0.5, 1, tuple((token + i, -0.5 - i) for i in range(count)))


class Server:
    """A served engine, and clients for it."""

    def __init__(self, engine: FakeEngine, settings: ServerSection, /, **served: Any) -> None:
        tokenizer = engine.tokenizer
        self.engine = engine
        fields: dict[str, Any] = {
            "name": "tiny", "engine": engine, "tokenizer": tokenizer, "vocab_size": tokenizer.vocab_size,
            "max_model_len": engine.max_model_len, "eos_token_ids": frozenset({EOS}), "chat_template": TEMPLATE}
        self.app = create_app(Served(**{**fields, **served}), settings)
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(self.app, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.002)
        self.client = httpx.Client(base_url=self.url, timeout=20)

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._uvicorn._serve([self.socket]))  # without its signal handlers: not the main thread

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return self.client.post(path, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def complete(self, prompt: Any = "hello", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, "max_tokens": 5, "temperature": 0, **fields})

    def chat(self, *contents: Any, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": content} for content in contents]
        return self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, **fields})

    def close(self) -> None:
        self.client.close()
        self._uvicorn.should_exit = True
        self._thread.join(10)


@pytest.fixture(scope="module")
def module_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(byte_tokenizer())
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def module_server(module_engine: FakeEngine) -> Iterator[Server]:
    server = Server(module_engine, ServerSection())
    yield server
    server.close()


@pytest.fixture
def engine(module_engine: FakeEngine) -> FakeEngine:
    module_engine.restore()
    return module_engine


@pytest.fixture
def server(engine: FakeEngine, module_server: Server) -> Server:
    """With default settings."""
    return module_server


@pytest.fixture
def start(engine: FakeEngine) -> Iterator[Callable[..., Server]]:
    """``start(strict_fields=True, …)``: a server with these settings; ``served={…}`` changes what is served."""
    servers: list[Server] = []

    def start(served: dict[str, Any] | None = None, **settings: Any) -> Server:
        servers.append(Server(engine, ServerSection(**settings), **(served or {})))
        return servers[-1]

    yield start
    for server in servers:
        server.close()
