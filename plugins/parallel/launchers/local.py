"""Workers as child processes on this machine."""

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from hotswap.core.engine.clock import Clock, SystemClock
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.parallel import Launcher

_BY_FORCE_S = 5.0
"""How long to wait for the system to end what was killed."""

_LAST_WORDS_S = 1.0
"""How long to wait for the end of a child that reads no more, to say how it ended."""


class LocalLauncher(Launcher):
    """Child processes of this one. Choose it for the devices of one machine.

    A child finds the modules that this process finds. What it is to do comes through its standard input, since a secret
    is part of it. It is in a session of its own, so that a Ctrl-C at the terminal reaches the server alone, which ends
    it in order; when the server dies, it sees its channel end, and ends itself.
    """

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._processes: list[Popen[bytes]] = []
        self._clock: Clock = SystemClock()

    def host(self) -> str | None:
        return None

    def start(self, entry: str, arguments: Sequence[dict[str, Any]]) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        if interface := loopback():
            environment["GLOO_SOCKET_IFNAME"] = interface  # what stays on this machine is not offered to others
        for place, given in enumerate(arguments):
            try:
                process = Popen(
                    [sys.executable, "-P", "-m", "hotswap.core.execution.child"], stdin=PIPE, stdout=DEVNULL,
                    env=environment, start_new_session=True)
            except OSError as error:
                raise ConfigError(f"{sys.executable} could not be started again as a worker: {error}") from error
            self._processes.append(process)
            self._tell(place, process, {
                "call": entry, "arguments": {**given, "local_rank": place, "local_size": len(arguments)}})

    def ended(self) -> dict[int, str]:
        return {
            place: _reason(code) for place, process in enumerate(self._processes)
            if (code := process.poll()) is not None
        }

    def stop(self, timeout_s: float) -> None:
        self._wait(timeout_s)
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        self._wait(_BY_FORCE_S)
        self._processes.clear()

    def _wait(self, timeout_s: float) -> None:
        """For all of them together, be they slow one behind the other."""
        end = self._clock.now() + timeout_s
        for process in self._processes:
            with contextlib.suppress(TimeoutExpired):
                process.wait(max(0.0, end - self._clock.now()))

    def _tell(self, place: int, process: Popen[bytes], what: dict[str, Any]) -> None:
        assert process.stdin is not None
        try:
            with process.stdin as stdin:
                stdin.write(json.dumps(what).encode())
        except BrokenPipeError as error:
            with contextlib.suppress(TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            code = process.poll()
            raise ConfigError(
                f"worker {place} (process {process.pid}, {sys.executable}) "
                f"{'closed its standard input' if code is None else _reason(code)} before it was told what to do; what "
                "it wrote to standard error, above, says why", "execution.launcher") from error


def _reason(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def loopback() -> str | None:
    """The name of the network interface that no other machine sees."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
