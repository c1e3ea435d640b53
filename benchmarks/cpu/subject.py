"""An engine that runs: started, asked, looked at, stopped. It has the machine for itself, and ends with all it started.
"""

import importlib
import json
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cpu import client
from benchmarks.cpu.engine import Command, Setup
from benchmarks.cpu.loads import LOADS, WARM_UP, Load
from benchmarks.workloads import Item
from hotswap.core.engine.clock import SystemClock
from hotswap.core.errors import HotswapError
from hotswap.core.interfaces.workload import WorkItem
from hotswap.lab.records import BlockRecord, RequestRecord
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.lab.targets.target import Outgoing

WORKER = Path(__file__).with_name("worker.py")
START_LIMIT_S = 600.0
"""The first start of an engine that compiles takes minutes."""
RUN_LIMIT_S = 240.0
STOP_LIMIT_S = 20.0
LOOK_S = 0.05
WORDS = 1500
"""Of an engine's log, the last so many characters are told where it fails."""


class RunError(HotswapError):
    """An engine did not do what was asked. There is no figure, and no next run in this process."""


class Subject(Protocol):
    """``ready_s``: from the start of its process until it could serve. ``client_s``: CPU time of this process while the
    last load was put on it."""

    ready_s: float
    pid: int
    client_s: float

    def measure(self, name: str, seed: int, quick: bool) -> BlockRecord:
        """Put a load of :data:`LOADS` ("warm-up" too) on it. RunError where not every token came."""


@contextmanager
def started(
    face: str, adapter: str, setup: Setup, python: str, env: Mapping[str, str], log: Path,
) -> Iterator[Subject]:
    """``face``: "offline" or "http". ``log``: a file for what it prints. RunError where it does not start."""
    begun = time.perf_counter()
    if face == "http":
        port = free_port()
        command: Command = importlib.import_module(adapter).serve(setup, python, port)
        with process(command.argv, {**env, **command.env}, log) as running:
            yield Server(running, command, port, begun, log)
    else:
        with process([python, str(WORKER), adapter], env, log, piped=True) as running:
            yield _Child(running, setup, begun, log)


@contextmanager
def process(
    argv: Sequence[str], env: Mapping[str, str], log: Path, piped: bool = False,
) -> "Iterator[subprocess.Popen[str]]":
    """In a session of its own, all of which is ended at the end. ``piped``: it is asked to end by its input's end."""
    pipe = subprocess.PIPE if piped else None
    with log.open("a") as out:
        running = subprocess.Popen(
            argv, env=dict(env), stdin=pipe or subprocess.DEVNULL, stdout=pipe or out, stderr=out, text=True,
            start_new_session=True)
    try:
        yield running
    finally:
        if running.stdin is not None:
            with suppress(BrokenPipeError):
                running.stdin.close()
        else:
            os.kill(running.pid, signal.SIGTERM)
        deadline = time.perf_counter() + STOP_LIMIT_S
        while not ended(running.pid) and time.perf_counter() < deadline:
            time.sleep(LOOK_S)
        os.killpg(running.pid, signal.SIGKILL)  # it has not been waited for: the number is still its own
        running.wait()


def ended(pid: int) -> bool:
    """Of a child that has not been waited for, and is not by this."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class _Child:
    """Asked by lines of JSON; see ``worker.py``."""

    client_s = 0.0

    def __init__(self, running: "subprocess.Popen[str]", setup: Setup, begun: float, log: Path) -> None:
        self._running, self._log, self.pid = running, log, running.pid
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True, name="bench-child").start()
        self._ask(asdict(setup), START_LIMIT_S)
        self.ready_s = time.perf_counter() - begun

    def _listen(self) -> None:
        assert self._running.stdout is not None
        with self._running.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")

    def _ask(self, message: Mapping[str, Any], limit: float) -> dict[str, Any]:
        assert self._running.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, and its last words tell why
            self._running.stdin.write(json.dumps(message) + "\n")
            self._running.stdin.flush()
        try:
            line = self._lines.get(timeout=limit)
        except queue.Empty:
            raise RunError(f"it gave no answer within {limit:g} s: {last_words(self._log)}") from None
        if not line:
            raise RunError(f"it has ended: {last_words(self._log)}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RunError(answer["error"])
        return answer

    def measure(self, name: str, seed: int, quick: bool) -> BlockRecord:
        answer = self._ask({"load": name, "seed": seed, "quick": quick}, RUN_LIMIT_S)
        items = load_named(name).items(seed, quick)
        records = [
            _record(index, item, sent, chunks)
            for index, (item, (sent, chunks)) in enumerate(zip(items, answer["answers"], strict=True))]
        return whole(items, BlockRecord(name, 0, 0, answer["wall"], tuple(records)))


def _record(index: int, item: Item, sent: float, chunks: Sequence[tuple[float, int]]) -> RequestRecord:
    ended = chunks[-1][0] if chunks else sent
    return RequestRecord(
        index, sent, sent, tuple((time, count) for time, count in chunks), ended, len(item.prompt),
        sum(count for _, count in chunks))


class Server:
    """Asked over HTTP by this process."""

    client_s = 0.0

    def __init__(
        self, running: "subprocess.Popen[str]", command: Command, port: int, begun: float, log: Path,
    ) -> None:
        self.pid = running.pid
        url = f"http://127.0.0.1:{port}"
        while not answers(url + command.ready):
            if ended(running.pid):
                raise RunError(f"its server has ended: {last_words(log)}")
            if time.perf_counter() - begun > START_LIMIT_S:
                raise RunError(f"its server is not ready after {START_LIMIT_S:g} s: {last_words(log)}")
            time.sleep(LOOK_S)
        self.ready_s = time.perf_counter() - begun
        self._now = SystemClock().now
        fields = {"temperature": 0, "ignore_eos": True, **command.fields}
        model = OpenAITarget(Endpoint(url), self._now).probe()["id"]
        self._port, self._endpoint = port, Endpoint(url, model, fields)

    def measure(self, name: str, seed: int, quick: bool) -> BlockRecord:
        load = load_named(name)
        items = load.items(seed, quick)
        return self.drive(f"{name}-{seed}", items, load.streams or len(items))

    def drive(self, name: str, items: Sequence[Item], streams: int) -> BlockRecord:
        """``items``, at most ``streams`` of them under way. RunError where not every token came."""
        asked = [WorkItem(tuple(item.prompt), item.max_tokens) for item in items]
        requests = [
            client.request("/v1/completions", self._endpoint.body(Outgoing(name, item.prompt, item.max_tokens)))
            for item in asked]
        used = time.process_time()
        try:
            heard = client.exchange(self._port, requests, streams, self._now, RUN_LIMIT_S)
        except OSError as error:
            raise RunError(f"its server failed: {error}") from error
        self.client_s = time.process_time() - used
        records = client.records(asked, heard)
        return whole(items, BlockRecord(name, 0, 0, max(one.ended for one in heard), records))


def load_named(name: str) -> Load:
    return WARM_UP if name == "warm-up" else LOADS[name]


def whole(items: Sequence[Item], block: BlockRecord) -> BlockRecord:
    """``block``, if every token of every request came: RunError else. An engine that does less is not faster."""
    asked = {index: item.max_tokens for index, item in enumerate(items)}
    got = {
        record.index: record.error or ("it was cut off" if record.incomplete else record.output_tokens)
        for record in block.requests}
    bad = [index for index in asked if got.get(index) != asked[index]]
    if bad:
        raise RunError(
            f"{len(bad)} of {len(items)} requests went wrong; request {bad[0]}: {got.get(bad[0], 'never sent')} "
            f"instead of {asked[bad[0]]} tokens")
    return block


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def last_words(log: Path) -> str:
    return log.read_text(errors="replace")[-WORDS:].strip() or "it said nothing"
