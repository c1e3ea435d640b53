"""Several engines behind one HTTP server: what a client, a probe and an operator see when one of them is lost."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from hotswap.core.interfaces.deployment import EngineFactory
from hotswap.core.testing.rig import build
from hotswap.plugins.parallel.fleet import Fleet


class Group(Fleet):
    """With what the test server asks of an engine."""

    max_model_len = 512

    def __init__(self, engines):
        super().__init__(
            [(EngineFactory(str(number), "", lambda: None), engine) for number, engine in enumerate(engines)],
            build("router", "round_robin"))
        self.tokenizer = engines[0].tokenizer


@pytest.fixture
def engines(engine):
    """Two fake engines, each of which dies of the prompt "die"."""
    made = [type(engine)(engine.tokenizer) for _ in range(2)]
    for one in made:
        one.step_s = 0.01
        one.reply = mortal(one)
    yield made
    for one in made:
        one.stop()


def mortal(engine):
    alphabet = engine.reply

    def reply(request):
        if request.prompt_token_ids == engine.tokenizer.encode("die"):
            raise RuntimeError("device lost")
        return alphabet(request)

    return reply


def until(condition, seconds=5.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def test_one_lost_engine_ends_its_own_streams_and_the_server_stays_green(start, engines):
    server = start(served={"engine": Group(engines)})
    body = {"prompt": "x", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as doomed, httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body) as spared:
        first, second = doomed.iter_lines(), spared.iter_lines()
        next(first)
        next(second)
        assert server.complete("die").status_code == 500  # it is the first one's turn
        lost = [line.removeprefix("data: ") for line in first if line]
        assert json.loads(lost[-1])["error"]["code"] == "internal_error"
        assert "[DONE]" not in lost
        assert [line for line in second if line][-1] == "data: [DONE]"
    assert server.client.get("/health").status_code == server.client.get("/ready").status_code == 200
    told = server.client.get("/server_info").json()
    assert [one["name"] for one in told["engines"]] == ["0", "1"]
    assert "device lost" in told["engines"][0]["problem"]
    assert told["engines"][1]["problem"] is None
    for _ in range(4):
        assert server.complete().status_code == 200
    assert len(engines[1].requests) == 1 + 4
    assert server.complete("die").status_code == 500
    until(lambda: server.client.get("/health").status_code == 503)
    message = server.client.get("/health").json()["error"]["message"]
    assert "engine 0" in message
    assert "engine 1" in message
    assert server.complete().status_code == 503


def test_the_loads_of_the_engines_add_up(start, engines):
    server = start(served={"engine": Group(engines)})
    body = {"prompt": "x", "max_tokens": 450, "stream": True, "n": 3}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        assert stream.status_code == 200
        lines = stream.iter_lines()  # closing it would hang up
        next(lines)
        told = server.client.get("/server_info").json()
        assert told["loads"]["running"] + told["loads"]["waiting"] == 3
        assert sum(one["running"] + one["waiting"] for one in told["engines"]) == 3


SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fixtures", sys.argv[1])
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)
spec = importlib.util.spec_from_file_location("these", sys.argv[2])
these = importlib.util.module_from_spec(spec)
spec.loader.exec_module(these)
from hotswap.core.config.schema import ServerSection
from hotswap.server import run
from hotswap.server.served import Served

engines = [fixtures.FakeEngine(fixtures.byte_tokenizer()) for _ in range(2)]
for engine in engines:
    engine.reply = these.mortal(engine)
group = these.Group(engines)
served = Served("tiny", group, group.tokenizer, group.tokenizer.vocab_size, 512)
with run.bind("127.0.0.1", 0) as listener:
    print(listener.getsockname()[1], flush=True)
    run.serve_on(listener, served, ServerSection())
"""


def test_the_process_ends_with_1_when_the_last_engine_is_lost_and_not_before():
    here = Path(__file__)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(here.with_name("conftest.py")), str(here)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parents[2] / "src"), os.environ.get(
            "PYTHONPATH", "")])})
    try:
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        until(lambda: reachable(url), 20)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "die"}).status_code == 500
        time.sleep(0.5)
        assert process.poll() is None
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 3}).status_code == 200
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "die"}).status_code == 500
        assert process.wait(5) == 1
    finally:
        process.kill()
        _, log = process.communicate()
    assert "engine 0 is lost, 1 of 2 serve on" in log
    assert "engine 1" in log.splitlines()[-1]


def reachable(url):
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False
