"""Sharded engines behind ``hotswap serve``: refused before anything starts, and ended together."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def hotswap(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "hotswap", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])})


def healthy(url):
    """What a watchdog sees: a server that is gone is not."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def descendants(children):
    """A function that gives the process ids below one."""
    def below(pid):
        return [found for child in children(pid) for found in (child, *below(child))]

    return below


@pytest.fixture
def served(scratch, monkeypatch, descendants):
    """``served(config)`` -> (process, its ranks, base URL, the lines that it writes)."""
    monkeypatch.setenv("TMPDIR", str(scratch))
    started, readers = [], []

    def start(config):
        process = hotswap("serve", str(ROOT / "examples" / config), "--port", "0")
        started.append(process)
        log = []
        for line in process.stderr:
            log.append(line)
            if found := re.search(r"serving \S+ on (http://127\.0\.0\.1:\d+)", line):
                break
        else:
            raise AssertionError("".join(log))
        reader = threading.Thread(target=lambda: log.extend(process.stderr), daemon=True)
        reader.start()
        readers.append(reader)
        return process, descendants(process.pid), found[1], log

    yield start
    for process in started:
        process.kill()
        process.wait()
    for reader in readers:
        reader.join(10)
    for process in started:
        process.stderr.close()


def test_a_size_that_does_not_work_is_refused_before_a_process_starts(scratch, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(scratch))
    process = hotswap(
        "serve", str(ROOT / "examples" / "quickstart.yaml"), "--port", "0", "--set",
        "parallel=[{use: tensor, size: 2}]")
    _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert ("parallel[0].size: 2 ranks cannot share the 9 query heads and 3 key-value heads of LlamaForCausalLM; sizes "
            "that work are 1, 3, 9") in log
    assert "rank 0" not in log


def test_ranks_that_do_not_start_are_one_message_and_a_code_that_blames_no_config(scratch, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(scratch))
    process = hotswap(
        "serve", str(ROOT / "examples" / "tensor.yaml"), "--port", "0", "--set", "execution.start_timeout_s=0.01")
    _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "hotswap: not every rank was ready within 0.01 s" in log.splitlines()
    assert "Traceback" not in log


def test_a_killed_rank_turns_health_red_ends_four_streams_with_an_error_and_the_server_with_a_code(served, kill):
    process, ranks, url, log = served("tensor.yaml")
    assert len(ranks) == 3
    info = httpx.get(f"{url}/server_info", timeout=30).json()
    assert [rank["rank"] for rank in info["ranks"]] == [0, 1, 2]
    assert all(rank["weight_bytes"] > 0 and rank["kv_bytes"] > 0 for rank in info["ranks"])
    assert any("auto chose 'processes'" in note for note in info["notes"])
    ends, begun = {}, threading.Barrier(5, timeout=60)

    def stream(index):
        body = {"model": "smollm2-135m-instruct", "prompt": f"{index}, a long story:", "max_tokens": 1500,
                "stream": True, "ignore_eos": True}
        events, waiting = [], True
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    events.append(line)
                if events and waiting:
                    waiting = False
                    begun.wait()
        ends[index] = time.monotonic(), events[-2:]

    threads = [threading.Thread(target=stream, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    assert httpx.get(f"{url}/health", timeout=30).status_code == 200
    begin = time.monotonic()
    kill(ranks[1])
    while healthy(url):
        assert time.monotonic() - begin < 5
        time.sleep(0.02)
    for thread in threads:
        thread.join(10)
    assert process.wait(10) == 1
    assert time.monotonic() - begin < 10
    assert len(ends) == 4
    for ended, events in ends.values():
        assert ended - begin < 5
        told = [json.loads(event.removeprefix("data:")) for event in events if "[DONE]" not in event]
        assert any(event["error"]["code"] == "internal_error" for event in told if "error" in event)
        assert not any("peer" in event for event in events), "what a neighbour's socket says is not the client's"
    written = "".join(log)
    assert "rank 1 was killed by SIGKILL" in written
    assert not re.search("rank [02] (has failed|is gone|was killed|ended)|closed by peer|gloo", written)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)
