"""A server with OpenAI's routes: ours in another process, or anybody's.

A request is a thread with a connection of its own while it runs, on the standard library's HTTP client: what is sent is
what was asked for, and nothing between here and the socket counts, merges or retries.
"""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from hotswap.core.errors import ConfigError, HotswapError
from hotswap.lab.targets.target import Activity, Ending, Hearer, Outgoing

TIMEOUT_S = 600.0
"""Of a silent connection."""
SHORT_TIMEOUT_S = 10.0
"""For questions about the server."""
RESET = "/reset_prefix_cache"
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError)
_REASONING = ("reasoning_content", "reasoning")


@dataclass(frozen=True)
class Endpoint:
    """``url`` of the server, with or without ``/v1``. ``chat`` sends text to /v1/chat/completions, made by ``decode``
    from token ids; else token ids go to /v1/completions. ``fields``: what every body says beside model, prompt, length
    and stream. ``token_ids``: ask for them, as hotswap and vLLM understand it. ``reset``: its prefix cache may be
    emptied, for which everybody pays who uses the server, and which therefore is never done unasked."""

    url: str
    model: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    chat: bool = False
    decode: Callable[[tuple[int, ...]], str] | None = None
    token_ids: bool = False
    api_key: str | None = None
    reset: bool = False

    @property
    def base(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1")

    def body(self, request: Outgoing) -> dict[str, Any]:
        body: dict[str, Any] = {} if self.model is None else {"model": self.model}
        if self.chat:
            text = self.decode(request.prompt) if self.decode else ""
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = list(request.prompt)
        body |= {"max_tokens": request.max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        return body | ({"return_token_ids": True} if self.token_ids else {}) | dict(self.fields)


class OpenAITarget:
    """A ``Target``; ``now`` is the load generator's clock."""

    def __init__(self, endpoint: Endpoint, now: Callable[[], float]) -> None:
        self.endpoint, self._now = endpoint, now
        try:
            parts = urlsplit(endpoint.base)
            scheme, self._host, self._port, self._path = parts.scheme, parts.hostname or "", parts.port, parts.path
        except ValueError:  # brackets or a port that are none
            scheme = self._host = ""
        if scheme not in ("http", "https") or not self._host:
            raise ConfigError(f"{endpoint.url!r} should be a server's address, such as http://127.0.0.1:8000", "url")
        self._connect: Callable[..., http.client.HTTPConnection] = (
            http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._live: dict[str, _Call] = {}
        self._unreachable: str | None = None
        self.can_reset = endpoint.reset

    # questions about the server

    def ask(self, method: str, route: str, timeout: float = SHORT_TIMEOUT_S) -> Any:
        """The JSON that ``route`` answers. OSError, http.client.HTTPException or ValueError where it does not."""
        return json.loads(self.ask_text(method, route, timeout))

    def ask_text(self, method: str, route: str, timeout: float = SHORT_TIMEOUT_S) -> str:
        connection = self._connect(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, self._path + route, headers=self.headers())
            response = connection.getresponse()
            body = response.read()
            if response.status != 200:
                raise ValueError(f"{method} {route} was answered with HTTP {response.status}")
            return body.decode("utf-8", "replace")
        finally:
            connection.close()

    def probe(self) -> dict[str, Any]:
        """What the server says of the model that it serves (``id``, and ``max_model_len`` where it tells). ConfigError
        where nobody answers, or the model is not among those served."""
        try:
            listed = self.ask("GET", "/v1/models")["data"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.endpoint.url} does not answer GET /v1/models ({_words(error)}); start the server first, or "
                "correct the address", "url") from error
        wanted = self.endpoint.model
        found = [entry for entry in listed if wanted in (None, entry.get("id"))]
        if not found:
            names = ", ".join(str(entry.get("id")) for entry in listed)
            raise ConfigError(f"{wanted!r} is not served at {self.endpoint.url}; there is {names}", "model")
        entry: dict[str, Any] = found[0]
        return entry

    def require_reset(self) -> None:
        """ConfigError where a cache that may be emptied cannot be."""
        try:
            self.reset()
        except HotswapError as error:
            raise ConfigError(f"{error}; leave reset out, and prompts get beginnings of their own", "reset") from error

    def headers(self) -> dict[str, str]:
        key = self.endpoint.api_key
        return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    # Target

    def send(self, request: Outgoing, hearer: Hearer) -> None:
        call = _Call(self, json.dumps(self.endpoint.body(request)).encode(), hearer)
        with self._lock:
            self._live[request.id] = call
        threading.Thread(
            target=self._serve, args=(request.id, call), name=f"load-{request.id}", daemon=True).start()

    def abort(self, id: str) -> None:
        with self._lock:
            call = self._live.get(id)
        if call is not None:
            call.abort()

    def reset(self) -> None:
        if not self.can_reset:
            return
        try:
            self.ask("POST", RESET, timeout=TIMEOUT_S)
        except _NO_ANSWER as error:
            raise HotswapError(f"{self.endpoint.url} does not answer POST {RESET} ({_words(error)})") from error

    def begin(self) -> None:
        """A foreign server counts nothing for us."""

    def finish(self) -> Activity:
        return Activity()

    def problem(self) -> str | None:
        return self._unreachable

    def effective(self) -> Mapping[str, Any]:
        body = self.endpoint.body(Outgoing("", (), 0))
        prompt = "messages" if self.endpoint.chat else "prompt"
        return {**body, prompt: "…", "max_tokens": "…"}

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    # connections

    @property
    def route(self) -> str:
        return self._path + ("/v1/chat/completions" if self.endpoint.chat else "/v1/completions")

    def now(self) -> float:
        return self._now()

    def connection(self, fresh: bool = False) -> http.client.HTTPConnection:
        with self._lock:
            if self._idle and not fresh:
                return self._idle.pop()
        return self._connect(self._host, self._port, timeout=TIMEOUT_S)

    def keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _serve(self, id: str, call: "_Call") -> None:
        ending = call.run()
        if ending.error is not None and call.refused:
            self._unreachable = f"{self.endpoint.url}: {ending.error}"
        with self._lock:
            self._live.pop(id, None)
        call.hearer.ended(ending)


class _Call:
    """One request and its answer."""

    def __init__(self, target: OpenAITarget, body: bytes, hearer: Hearer) -> None:
        self._target, self._body, self.hearer = target, body, hearer
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False
        self.refused = False
        """Nobody listens there any more."""
        self._arrivals, self._finish, self._done = 0, None, False
        self._usage: Mapping[str, Any] = {}

    def run(self) -> Ending:
        try:
            response = self._ask()
            if response.status != 200:
                return self._failed(f"HTTP {response.status}: {_reason(response.read())}")
            problem = self._read(response)
            if problem is None and self._connection is not None:
                response.read()
                self._target.keep(self._connection)
                return self._succeeded()
            return self._failed(problem or "")
        except Exception as error:
            self.refused = isinstance(error, ConnectionRefusedError)
            return self._failed("aborted" if self._aborted else _words(error))

    def abort(self) -> None:
        self._aborted = True
        if self._connection is not None and self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self) -> http.client.HTTPResponse:
        """A kept connection may have been closed by the server meanwhile: then a new one, once."""
        for fresh in (False, True):
            self._connection = connection = self._target.connection(fresh)
            kept = connection.sock is not None
            try:
                connection.request("POST", self._target.route, self._body, self._target.headers())
                return connection.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                connection.close()
                if not kept:
                    raise
        raise AssertionError("a new connection is never a kept one")

    def _read(self, response: http.client.HTTPResponse) -> str | None:
        """Tell of every delivery; what went wrong, if something did."""
        for event in _events(response):
            if event == "[DONE]":
                self._done = True
                break
            message = json.loads(event)
            if "error" in message:
                return f"error event: {_reason(event.encode())}"
            self._usage = message.get("usage") or self._usage
            for choice in message.get("choices") or ():
                self._hear(choice)
        if self._finish is None or not (self._done or self._usage):
            return "the stream was cut: it ended without its last words"
        return None

    def _hear(self, choice: Mapping[str, Any]) -> None:
        delta = choice.get("delta") or {}
        ids = choice.get("token_ids")
        reasoning = any(delta.get(name) for name in _REASONING)
        answer = bool(choice.get("text") or delta.get("content") or delta.get("tool_calls"))
        self._finish = choice.get("finish_reason") or self._finish
        if answer or reasoning or ids:
            self._arrivals += 1
            self.hearer.arrived(
                self._target.now(), None if ids is None else len(ids), ids, answer or not reasoning)

    def _succeeded(self) -> Ending:
        now, usage = self._target.now(), self._usage
        tokens = usage.get("completion_tokens")
        if not self._arrivals:
            if not tokens:
                return self._failed("no token came, and yet the answer ended well")
            self.hearer.arrived(now, tokens)  # nothing that can be seen, such as an end of text alone
        details = usage.get("prompt_tokens_details") or {}
        return Ending(now, self._finish, None, usage.get("prompt_tokens"), tokens, details.get("cached_tokens"))

    def _failed(self, error: str) -> Ending:
        if self._connection is not None:
            self._connection.close()
        return Ending(self._target.now(), self._finish, error, output_tokens=self._usage.get("completion_tokens"))


def _events(response: http.client.HTTPResponse) -> Iterator[str]:
    """The data of server-sent events; those of one line, as all of these servers send them."""
    while line := response.readline():
        if line.startswith(b"data:"):
            yield line[5:].strip().decode("utf-8", "replace")


def _reason(body: bytes) -> str:
    """The server's own words, or the beginning of its body."""
    try:
        error = json.loads(body)["error"]
        words = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        words = body.decode("utf-8", "replace").strip()
    return words.splitlines()[0][:200] if words else "without a word"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
