"""A server of ours, started for an arm: ``hotswap serve`` in a process of its own, with its own copy of the weights."""

import contextlib
import http.client
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from hotswap.core.config import ResolvedConfig
from hotswap.core.config.sources import ENVIRONMENT_PREFIX
from hotswap.core.errors import ConfigError, HotswapError
from hotswap.lab.processes import cpu_of, peak_memory_of
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.lab.targets.target import Activity

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 20.0
_SERVING = re.compile(r"serving \S+ on (http://\S+)")
_SAMPLE = re.compile(r"^hotswap:(\w+?)(?:_total)?(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_COUNTED = {
    "steps": "steps", "step_duration_seconds_sum": "step_seconds", "spec_decode_num_drafts": "drafted_rows",
    "spec_decode_num_accepted_tokens": "accepted_drafts", "num_preemptions": "preemptions",
    "request_queue_time_seconds_sum": "queue_seconds", "request_queue_time_seconds_count": "queued_requests",
}
"""Counters of the ``metrics`` observer -> what blocks call them."""
_PEAK = "kv_cache_peak_perc"


class Child:
    """The process. Its last words are kept."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hotswap-arm-")  # for its owner's eyes only: it holds a key
        file = Path(self._folder.name) / "config.yaml"
        file.write_text(yaml.safe_dump(dict(config)), "utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hotswap", "serve", str(file)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, env=environment)
        self._words: deque[str] = deque(maxlen=20)
        self._heard = threading.Event()
        self._url: str | None = None
        self._listener = threading.Thread(target=self._listen, daemon=True, name="arm-log")
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._words.append(line.rstrip())
            if match := _SERVING.search(line):
                self._url = match[1]
                self._heard.set()
        self._heard.set()

    def url(self) -> str:
        """Waits until it serves. ConfigError where it refuses its config, HotswapError where it fails otherwise."""
        self._heard.wait(START_TIMEOUT_S)
        if self._url is not None:
            return self._url
        self.stop()
        if self.process.returncode == 2:
            raise ConfigError(self.last_words().removeprefix("hotswap: "))
        raise HotswapError(f"its server did not start: {self.last_words()}")

    def last_words(self) -> str:
        return self._words[-1] if self._words else "it said nothing"

    def problem(self) -> str | None:
        code = self.process.poll()
        return None if code is None else f"its server ended with exit code {code}: {self.last_words()}"

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):  # the second ends the requests that still run
            if self.process.poll() is None:
                self.process.send_signal(number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(STOP_TIMEOUT_S)
        self.process.wait()
        self._listener.join(STOP_TIMEOUT_S)
        if self.process.stderr is not None and not self._listener.is_alive():
            self.process.stderr.close()
        self._folder.cleanup()


class ServerTarget(OpenAITarget):
    """Speaks HTTP to its own child. Counts by the child's metrics, where its config has that observer."""

    def __init__(self, config: ResolvedConfig, fields: Mapping[str, Any], now: Callable[[], float]) -> None:
        key = secrets.token_urlsafe()
        self._child = Child(_served(config, key))
        try:
            super().__init__(Endpoint(self._child.url(), fields=fields, token_ids=True, api_key=key), now)
            self._kv_bytes = sum(rank["kv_bytes"] for rank in self.ask("GET", "/server_info")["ranks"])
        except BaseException:
            self._child.stop()
            raise
        self.can_reset = True
        self._before: dict[str, float] = {}
        self._cpu = 0.0

    def begin(self) -> None:
        self._before, self._cpu = _counters(self._samples()), cpu_of([self._child.process.pid])

    def finish(self) -> Activity:
        pid = self._child.process.pid
        cpu = cpu_of([pid]) - self._cpu
        samples = self._samples()
        after = _counters(samples)
        counted = {name: after[name] - self._before.get(name, 0.0) for name in after}
        if shares := [value for name, value in samples if name == _PEAK]:  # one a replica, and all are equally large
            counted["kv_peak_bytes"] = self._kv_bytes * sum(shares) / len(shares)
        memory = peak_memory_of([pid])
        return Activity(cpu, counted | ({"rss_peak_bytes": float(memory)} if memory else {}))

    def problem(self) -> str | None:
        return self._child.problem() or super().problem()

    def effective(self) -> Mapping[str, Any]:
        return {name: value for name, value in super().effective().items() if name != "api_key"}

    def close(self) -> None:
        super().close()
        self._child.stop()

    def _samples(self) -> list[tuple[str, float]]:
        """Name and value of every metric that it tells."""
        try:
            text = self.ask_text("GET", "/metrics")
        except (OSError, http.client.HTTPException, ValueError):
            return []
        return [(name, float(value)) for name, value in _SAMPLE.findall(text)]


def _counters(samples: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of all replicas together."""
    found: dict[str, float] = {}
    for name, value in samples:
        if name in _COUNTED:
            found[_COUNTED[name]] = found.get(_COUNTED[name], 0.0) + value
    return found


def _served(config: ResolvedConfig, key: str) -> dict[str, Any]:
    """What the child is given: the arm's config, at any free port of this machine, for who has the key."""
    values = config.config.model_dump(mode="json", exclude_unset=True)
    server = {**values.get("server", {}), "host": "127.0.0.1", "port": 0, "api_keys": {key: "lab"}}
    return {**values, "server": server}
