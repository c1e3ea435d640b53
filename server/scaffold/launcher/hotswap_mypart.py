"""A launcher: starts the processes of an executor's workers."""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from subprocess import PIPE, Popen, TimeoutExpired
from typing import Any

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.parallel import Launcher


class MyPart(Launcher):
    """Child processes of this one, behind a command of your choice.

    Choose it ... (to start ranks under ``numactl``, ``nice`` or a profiler: ``command: [nice, -n, "5"]``).
    """

    class Options(ComponentOptions):
        command: list[str] = []
        """What stands before the interpreter in every rank's command line."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.processes: list[Popen[bytes]] = []

    def host(self) -> str | None:
        """None: all run on this machine. Else the address at which they can reach it."""
        return None

    def start(self, entry: str, arguments: Sequence[dict[str, Any]]) -> None:
        """``hotswap.core.execution.child`` calls ``entry`` with what it reads from its standard input: a secret is part
        of it, which command lines and environments would show."""
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        for place, given in enumerate(arguments):
            command = [*self.options.command, sys.executable, "-m", "hotswap.core.execution.child"]
            try:
                process = Popen(command, stdin=PIPE, env=environment, start_new_session=True)
            except OSError as error:
                raise ConfigError(f"{command} could not be started: {error}", "command") from error
            self.processes.append(process)
            call = {"call": entry, "arguments": {**given, "local_rank": place, "local_size": len(arguments)}}
            assert process.stdin is not None
            with process.stdin as stdin:
                stdin.write(json.dumps(call).encode())

    def ended(self) -> dict[int, str]:
        """Which have ended, by their place, and why. Does not wait."""
        codes = {place: process.poll() for place, process in enumerate(self.processes)}
        return {place: f"ended with exit code {code}" for place, code in codes.items() if code is not None}

    def stop(self, timeout_s: float) -> None:
        """They have so long, together, to end by themselves."""
        end = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except TimeoutExpired:
                process.kill()
                process.wait()
        self.processes.clear()
