"""``hotswap serve`` as a process with SmolLM2-135M-Instruct, OpenAI's client, and ``hotswap exchange`` beside it."""

import concurrent.futures
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import openai
import pytest

from hotswap.lab.decisions.again import replay
from hotswap.lab.decisions.log import open_logs

pytestmark = [pytest.mark.real_model, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
KEY = "key-of-the-admin"
PARTS = {
    "scheduler": ("static", "continuous", "chunked", "prefill_first"),
    "scheduler.policy": ("fcfs", "priority", "fair_share", "shortest_first"),
    "kvcache": ("paged", "prefix", "radix"),
    "kvcache.eviction": ("lru", "fifo", "lfu", "slru"),
    "speculator": ("none", "ngram"),
    "attention": ("torch", "{use: composite, prefill: torch, decode: torch}"),
}
PROMPTS = [
    "Once upon a time", "The capital of France is", "one two three four five six", "Water boils at",
    "def fibonacci(n):", "The three primary colours are red, yellow and", "A list of animals: cat, dog,", "My name is",
]


def hotswap(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen(
        [sys.executable, "-m", "hotswap", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment, **options)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Its address, and its log so far."""
    log = []
    decisions = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    process = hotswap(
        "serve", str(ROOT / "examples" / "quickstart.yaml"), "--port", "0", "--set", f"server.admin_key={KEY}",
        "--set", "dtype=float32", "--set", "max_model_len=512", "--set", "kvcache.memory=256MiB",
        "--set", "execution.num_threads=1",
        "--set", f"observers=[metrics, {{use: decision_log, path: {decisions}}}]")
    for line in process.stderr:
        log.append(line)
        if found := re.search(r"serving \S+ on (http://127\.0\.0\.1:\d+)", line):
            break
    else:
        raise AssertionError("".join(log))
    threading.Thread(target=lambda: log.extend(process.stderr), daemon=True).start()
    yield found[1], log, decisions
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, "".join(log)
    process.stdout.close()
    process.stderr.close()
    [written] = open_logs([decisions])
    outcome = replay(written)
    assert outcome.equal and outcome.stopped is None and not outcome.notes, outcome
    print(f"{outcome.steps} steps of {outcome.requests} requests are decided the same again")


def stream(client, prompt, tokens):
    chunks = client.completions.create(
        model="smollm2-135m-instruct", prompt=prompt, max_tokens=tokens, temperature=0, stream=True,
        extra_body={"ignore_eos": True})
    texts, ends = [], []
    for chunk in chunks:
        texts.append(chunk.choices[0].text)
        ends.append(chunk.choices[0].finish_reason)
    assert ends[-1] == "length"
    return "".join(texts)


def exchange(url, sets):
    answer = httpx.post(
        f"{url}/admin/components", json={"set": sets}, headers={"Authorization": f"Bearer {KEY}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["engines"][0]


def test_streams_do_not_notice_that_parts_are_exchanged(server, pytestconfig):
    url, _, decisions = server
    count, streams, tokens = (60, 16, 60) if pytestconfig.getoption("--whole") else (20, 4, 20)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)
    prompts = [PROMPTS[i % len(PROMPTS)] + " " * (i // len(PROMPTS)) for i in range(streams)]
    rng, seen, done, pauses = random.Random(4), set(), 0, []
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        expected = list(pool.map(lambda prompt: stream(client, prompt, tokens), prompts))
        running = [pool.submit(stream, client, prompt, tokens) for prompt in prompts]
        while done < count:
            for place, future in enumerate(running):
                if future.done():
                    assert future.result() == expected[place]
                    running[place] = pool.submit(stream, client, prompts[place], tokens)
            path = rng.choice(list(PARTS))
            parts = httpx.get(f"{url}/server_info").json()["config"]
            if path == "kvcache.eviction" and parts["kvcache"]["use"] == "paged":
                continue
            report = exchange(url, [f"{path}={rng.choice(PARTS[path])}"])
            for part in report["exchanged"]:
                seen.add(part["path"])
                done += 1
                pauses.append(report["pause_ms"])
        assert [future.result() for future in running] == expected
    assert seen == set(PARTS)
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(rf"hotswap:component_exchanges_total{{[^}}]*}} {done}\.0", metrics)
    assert re.search(r"hotswap:component_rollbacks_total{[^}]*} 0\.0", metrics)
    assert re.search(r'finished_reason="(error|abort)"[^}]*} [1-9]', metrics) is None
    events = [json.loads(line) for line in decisions.read_text().splitlines()]
    assert sum(event["event"] == "exchange" for event in events) == done
    print(f"{done} exchanges, pauses up to {max(pauses)} ms")


def test_the_command_exchanges_and_the_server_shows_what_it_is_made_of(server, tmp_path):
    url, log, _ = server
    (tmp_path / "key").write_text(KEY)
    base = ("exchange", "--url", url, "--key-file", str(tmp_path / "key"))
    process = hotswap(*base, "scheduler=continuous", "kvcache=radix", "kvcache.eviction=lfu")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "-> scheduler:continuous" in out or "serve already" in out
    info = httpx.get(f"{url}/server_info").json()
    assert {"scheduler:continuous", "kvcache:radix", "eviction_policy:lfu"} <= {
        f"{part['kind']}:{part['name']}" for part in info["components"]}
    assert info["config"]["kvcache"]["use"] == "radix"
    process = hotswap(*base, "scheduler=nope")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "no scheduler is called 'nope'" in err
    assert httpx.get(f"{url}/server_info").json()["components"] == info["components"]
    assert any("is exchanged for" in line for line in log)
