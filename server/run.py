"""``hotswap serve``: bind, load, serve, drain."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn

from hotswap.core.config import ResolvedConfig
from hotswap.core.config.schema import ServerSection
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import ConfigError
from hotswap.server.app import create_app
from hotswap.server.http.api import Api
from hotswap.server.served import Served, served_by

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5
"""For connections to end after the last request has been answered."""
KEEP_ALIVE_S = 60
"""Longer than clients keep idle connections in their pools, so that they do not send into a closed one."""


def serve(resolved: ResolvedConfig, *, progress: bool = True) -> None:
    """Serve until SIGTERM or SIGINT. ConfigError before that for whatever cannot work, the port first of all."""
    settings = resolved.config.server
    with bind(settings.host, settings.port) as listener:
        built = build_engine(resolved, progress=progress)
        try:
            for warning in built.warnings:
                logger.warning("%s", warning)
            for note in built.notes:
                logger.info("%s", note)
            gc.collect()
            gc.freeze()  # what is loaded now lives as long as the process: the collector need not look at it again
            serve_on(listener, served_by(built), settings)
        finally:
            built.engine.stop()


def bind(host: str, port: int) -> socket.socket:
    """A socket of our own before the model is loaded: a port in use should not cost a minute. Nobody can connect yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        key = "server.host" if isinstance(error, socket.gaierror) else "server.port"
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another one, or end what uses it", key,
        ) from error
    return listener


def serve_on(listener: socket.socket, served: Served, settings: ServerSection) -> None:
    """Serve ``served`` until a signal comes, then drain it."""
    app = create_app(served, settings)
    defaults = app.state.api.frontend.sampling({}).model_dump(exclude_defaults=True)
    logger.info("where a request says nothing: %s", defaults or "OpenAI's defaults")
    if served.chat_template is None:
        logger.warning("the model has no chat template: /v1/chat/completions answers 400; set server.chat_template")
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S, server_header=False)
    host, port = listener.getsockname()[:2]
    logger.info("serving %s on http://%s:%d", served.name, f"[{host}]" if ":" in host else host, port)
    _Server(config, app.state.api).run(sockets=[listener])


class _Server(uvicorn.Server):
    """On the first signal, refuse new requests (503) and let the others end; on the second, leave at once."""

    def __init__(self, config: uvicorn.Config, api: Api) -> None:
        super().__init__(config)
        self._api = api
        self._drain: asyncio.Task[None] | None = None

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
        if self._drain is not None:
            self.should_exit = self.force_exit = True
            return
        self._drain = asyncio.get_running_loop().create_task(self._drained())

    async def _drained(self) -> None:
        timeout = self._api.settings.drain_timeout_s
        loads = self._api.served.engine.loads()
        logger.info("shutting down: %d requests may go on for %g s", loads.running + loads.waiting, timeout)
        self._api.draining = True
        try:
            await asyncio.to_thread(self._api.served.engine.drain, timeout)
        finally:
            self.should_exit = True
