"""``hotswap serve``: bind, load, serve, drain."""

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from hotswap.core.config import ResolvedConfig
from hotswap.core.config.schema import ServerSection
from hotswap.core.errors import ConfigError
from hotswap.server.app import create_app
from hotswap.server.http.api import Api
from hotswap.server.served import Served, loaded, served_by

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5
"""For connections to end after the last request has been answered."""
LEAVE_TIMEOUT_S = 1.0
"""After a second signal: for the step that runs, before clients are hung up on."""
LAST_WORDS_S = 0.3
"""After a second signal: for the last events to reach the clients."""
KEEP_ALIVE_S = 60
"""Longer than clients keep idle connections in their pools, so that they do not send into a closed one."""


def serve(resolved: ResolvedConfig, *, progress: bool = True) -> None:
    """Serve until SIGTERM or SIGINT. ConfigError before that for whatever cannot work, the port first of all."""
    settings = resolved.config.server
    keep_tokenizers_single()
    with bind(settings.host, settings.port) as listener, loaded(resolved, progress=progress) as built:
        gc.collect()
        gc.freeze()  # what is loaded now lives as long as the process: the collector need not look at it again
        serve_on(listener, served_by(built), settings)


def keep_tokenizers_single() -> None:
    """Prompts come one by one, and the cores are the model's: the tokenizers library starts no threads of its own, one
    a core, unless the environment says so."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def bind(host: str, port: int) -> socket.socket:
    """A socket of our own before the model loads: a port in use should not cost a minute. Nobody can connect yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            key, remedy = "server.host", "give an address of this machine, such as 127.0.0.1 or 0.0.0.0"
        else:
            key, remedy = "server.port", "choose another one, or end what uses it"
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; {remedy}", key) from error
    return listener


def serve_on(listener: socket.socket, served: Served, settings: ServerSection) -> None:
    """Serve ``served`` until a signal comes, then drain it. SystemExit 1 where the engine ends by itself."""
    app = create_app(served, settings)
    defaults = app.state.api.frontend.sampling({}).model_dump(exclude_defaults=True)
    logger.info("where a request says nothing: %s", defaults or "OpenAI's defaults")
    if served.chat_template is None:
        logger.warning("the model has no chat template: /v1/chat/completions answers 400; set server.chat_template")
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S, server_header=False)
    host, port = listener.getsockname()[:2]
    listener.listen(config.backlog)  # who reads the next line can connect
    logger.info("serving %s on http://%s:%d", served.name, f"[{host}]" if ":" in host else host, port)
    _Server(config, app.state.api).run(sockets=[listener])
    if served.engine.failure is not None:
        logger.critical("%s; the process ends, so that it can be started again", served.engine.failure)
        raise SystemExit(1)


class _Server(uvicorn.Server):
    """On the first signal, refuse new requests (503) and let the others end; on the second, cut them short. An engine
    that has ended by itself ends the server, after every client has had its answer."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api, self._engine = api, api.served.engine
        self._drain: asyncio.Task[None] | None = None
        self._leave: asyncio.Task[None] | None = None

    async def on_tick(self, counter: int) -> bool:
        return self._engine.failure is not None or await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._drain is None:
            self._drain = asyncio.get_running_loop().create_task(self._drained())
        elif self._leave is None:
            self._leave = asyncio.get_running_loop().create_task(self._left())

    async def _drained(self) -> None:
        timeout = self._api.settings.drain_timeout_s
        loads = self._engine.loads()
        logger.info("shutting down: %d requests may go on for %g s; a second signal ends them now",
                    loads.running + loads.waiting, timeout)
        self._api.draining = True
        try:
            await _beside(lambda: self._engine.drain(timeout))
        finally:
            self.should_exit = True

    async def _left(self) -> None:
        """End the requests, tell those who listen, hang up on those who do not."""
        logger.info("leaving at once")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_beside(self._engine.stop), LEAVE_TIMEOUT_S)
        self.should_exit = True
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            if connection.transport is not None:
                connection.transport.abort()


async def _beside(work: Callable[[], None]) -> None:
    """``work`` in a thread that the process does not wait for when it ends."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            with contextlib.suppress(RuntimeError):  # the event loop has ended already
                loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, daemon=True).start()
    await done.wait()
