"""Clients that hang up, servers that shut down."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from hotswap.core.errors import ConfigError
from hotswap.server.run import bind


def until(condition, seconds=1.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def send_and_hang_up(server, body, read=0):
    """A raw client, since libraries read on; returns when the socket is closed."""
    raw = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: server.engine.requests)
        if read:
            client.recv(read)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("waiting", [False, True])
def test_a_client_that_hangs_up_is_noticed_within_a_second(server, engine, streamed, waiting):
    engine.step_s, engine.admit = 0.01, not waiting
    body = {"prompt": "x", "max_tokens": 400, "stream": streamed, "n": 2}
    send_and_hang_up(server, body, read=64 if streamed and not waiting else 0)
    until(lambda: len(engine.aborted) == 2)
    until(lambda: not engine.running and not engine.waiting)
    engine.admit = True
    assert server.complete().status_code == 200


def test_a_request_that_ends_by_itself_is_not_aborted(server, engine):
    server.complete()
    server.complete(stream=True)
    assert engine.aborted == []


def test_one_call_that_fails_leaves_the_others_alone(server, engine):
    engine.step_s = 0.01
    answers = []
    other = threading.Thread(target=lambda: answers.append(server.complete(max_tokens=40)))
    other.start()
    until(lambda: engine.requests)
    send_and_hang_up(server, {"prompt": "y", "max_tokens": 400})
    other.join()
    assert answers[0].json()["choices"][0]["text"] == ("abcdefghijklmnopqrstuvwxyz" * 2)[:40]


def test_a_slow_reader_holds_up_nobody(server, engine):
    with httpx.stream("POST", f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 400, "stream": True}):
        begin = time.monotonic()
        assert server.complete().status_code == 200
        assert time.monotonic() - begin < 1


def test_while_draining_new_requests_get_503_and_probes_tell(server, engine):
    api = server.app.state.api
    api.draining = True
    try:
        answer = server.complete()
        assert answer.status_code == 503
        assert answer.json()["error"]["type"] == "server_error"
        assert "retry-after" in answer.headers
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/health").status_code == 200
    finally:
        api.draining = False


def test_an_engine_that_was_stopped_answers_503(server, engine):
    engine._draining = True
    assert server.complete().status_code == 503
    assert server.complete(stream=True).status_code == 503


def test_an_aborted_stream_ends_with_an_error_event(server, engine):
    engine.step_s = 0.01
    body = {"prompt": "x", "max_tokens": 400, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as s:
        lines = s.iter_lines()
        next(lines)
        engine.abort(engine.requests[0].id)
        data = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(data[-1])["error"]["code"] == "aborted"
    assert "[DONE]" not in data


# A process of its own

SCRIPT = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("fixtures", sys.argv[1])
fixtures = importlib.util.module_from_spec(spec)
spec.loader.exec_module(fixtures)
from hotswap.core.config.schema import ServerSection
from hotswap.server import run
from hotswap.server.served import Served

engine = fixtures.FakeEngine(fixtures.byte_tokenizer())
engine.step_s = 0.02
alphabet = engine.reply

def reply(request):
    if request.prompt_token_ids == engine.tokenizer.encode("die"):
        raise RuntimeError("device lost")
    return alphabet(request)

engine.reply = reply
served = Served("tiny", engine, engine.tokenizer, engine.tokenizer.vocab_size, 512)
with run.bind("127.0.0.1", 0) as listener:
    print(listener.getsockname()[1], flush=True)
    run.serve_on(listener, served, ServerSection(drain_timeout_s=float(sys.argv[2])))
"""


@pytest.fixture
def launch():
    """``launch(drain_timeout_s)`` -> (process, url) of a fake engine's server."""
    processes = []

    def launch(drain_timeout_s):
        source = Path(__file__).parents[2] / "src"
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(Path(__file__).with_name("conftest.py")), str(drain_timeout_s)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(source)})
        processes.append(process)
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        for _ in range(500):
            try:
                httpx.get(f"{url}/ready")
                return process, url
            except httpx.TransportError:
                time.sleep(0.02)
        raise AssertionError(process.stderr.read())

    yield launch
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def stream_in_threads(url, count, max_tokens):
    collected = [[] for _ in range(count)]

    def one(lines):
        body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
        with contextlib.suppress(httpx.TransportError), httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=30,
        ) as response:
            for line in response.iter_lines():
                lines += [line.removeprefix("data: ")] if line else []

    threads = [threading.Thread(target=one, args=(lines,)) for lines in collected]
    for thread in threads:
        thread.start()
    return threads, collected


def test_sigterm_lets_streams_finish_and_exits_with_0(launch):
    process, url = launch(drain_timeout_s=20)
    threads, streams = stream_in_threads(url, 4, 60)
    until(lambda: httpx.get(f"{url}/server_info").json()["loads"]["running"] == 4, 10)
    process.send_signal(signal.SIGTERM)
    until(lambda: httpx.get(f"{url}/ready").status_code == 503, 5)
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "late"}).status_code == 503
    for thread in threads:
        thread.join(20)
    assert all(lines[-1] == "[DONE]" for lines in streams)
    assert process.wait(15) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health")


def test_what_does_not_finish_in_time_ends_with_an_error_event(launch):
    process, url = launch(drain_timeout_s=0.5)
    threads, streams = stream_in_threads(url, 3, 500)
    until(lambda: httpx.get(f"{url}/server_info").json()["loads"]["running"] == 3, 10)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 0
    assert time.monotonic() - begin < 8
    for thread, lines in zip(threads, streams, strict=True):
        thread.join(5)
        assert json.loads(lines[-1])["error"]["code"] == "aborted"
        assert "[DONE]" not in lines


def test_a_second_signal_ends_it_at_once_and_quietly(launch):
    process, url = launch(drain_timeout_s=60)
    threads, streams = stream_in_threads(url, 3, 500)
    until(lambda: httpx.get(f"{url}/server_info").json()["loads"]["running"] == 3, 10)
    process.send_signal(signal.SIGINT)
    until(lambda: httpx.get(f"{url}/ready").status_code == 503, 5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    assert time.monotonic() - begin < 1.5
    for thread, lines in zip(threads, streams, strict=True):
        thread.join(5)
        assert json.loads(lines[-1])["error"]["code"] == "aborted"
    assert "Traceback" not in process.stderr.read()


def test_a_second_signal_hangs_up_on_a_client_that_does_not_read(launch):
    process, url = launch(drain_timeout_s=60)
    raw = json.dumps({"prompt": "x", "max_tokens": 500, "stream": True, "n": 100}).encode()
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(raw) + raw)
        until(lambda: httpx.get(f"{url}/server_info").json()["loads"]["running"] > 0, 10)
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/ready").status_code == 503, 5)
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - begin < 3
    assert "Traceback" not in process.stderr.read()


def test_an_engine_that_ends_by_itself_ends_the_process_after_the_last_answers(launch):
    process, url = launch(drain_timeout_s=60)
    threads, streams = stream_in_threads(url, 3, 500)
    until(lambda: httpx.get(f"{url}/server_info").json()["loads"]["running"] == 3, 10)
    with httpx.Client(base_url=url) as client:
        assert client.post("/v1/completions", json={"prompt": "die"}).status_code == 500
        with contextlib.suppress(httpx.TransportError):  # it may have ended already
            assert client.get("/health").status_code == 503
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 503
    assert process.wait(5) == 1
    for thread, lines in zip(threads, streams, strict=True):
        thread.join(5)
        assert json.loads(lines[-1])["error"]["code"] == "internal_error"
    assert "device lost" in process.stderr.read()


def test_a_port_in_use_is_one_clear_config_error():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}") as caught:
            bind("127.0.0.1", port)
    assert caught.value.path == "server.port"


@pytest.mark.parametrize("host", ["203.0.113.1", "no.such.host.invalid", "::ffff:1:2:3"])
def test_an_address_of_another_machine_or_of_none_blames_the_host(host):
    with pytest.raises(ConfigError, match=f"{re.escape(host)} port 0.*give an address of this machine") as caught:
        bind(host, 0)
    assert caught.value.path == "server.host"
