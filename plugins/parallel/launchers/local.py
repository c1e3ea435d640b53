"""Workers as child processes on this machine."""

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import Any

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.parallel import Launcher


class LocalLauncher(Launcher):
    """Child processes of this one. Choose it for the devices of one machine.

    A child finds the modules that this process finds. What it is to do comes through its standard input, since a secret
    is part of it. It is in a session of its own, so that a Ctrl-C at the terminal reaches the server alone, which ends
    it in order; when the server dies, it sees its channel end, and ends itself.
    """

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._processes: list[Popen[bytes]] = []

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
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps({"call": entry, "arguments": {
                    **given, "local_rank": place, "local_size": len(arguments)}}).encode())

    def ended(self) -> dict[int, str]:
        return {
            place: _reason(code) for place, process in enumerate(self._processes)
            if (code := process.poll()) is not None
        }

    def stop(self, timeout_s: float) -> None:
        for process in self._processes:
            try:
                process.wait(timeout_s)
            except TimeoutExpired:
                timeout_s = 0.0  # they had their time together
                process.kill()
                process.wait()
        self._processes.clear()


def _reason(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def loopback() -> str | None:
    """The name of the network interface that no other machine sees."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
