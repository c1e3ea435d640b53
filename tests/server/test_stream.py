"""The bytes of a stream: what is encoded once and filled in is what encoding each chunk would give."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotswap.core.request import FinishReason, Request, RequestOutput, SamplingParams
from hotswap.server.bridge import Bridge, Call
from hotswap.server.http import answer
from hotswap.server.http.sse import HOLE, TextEvent, event

ROOT = Path(__file__).parents[2]
ROUTES = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]}}


@given(st.text(), st.text())
def test_a_filled_event_is_the_encoded_event(model, text):
    def chunk(text):
        return {"id": "cmpl-1", "model": model, "choices": [{"index": 0, "text": text, "finish_reason": None}]}

    assert TextEvent(chunk(HOLE))(text) == event(chunk(text))


def text_of(chunk):
    [choice] = chunk["choices"]
    return choice["text"] if "text" in choice else choice["delta"].get("content", "")


def without_text(chunk):
    """The chunk as JSON that keeps the order of its keys."""
    [choice] = chunk["choices"]
    empty = {"text": ""} if "text" in choice else {"delta": {**choice["delta"], "content": ""}}
    return json.dumps({**chunk, "choices": [{**choice, **empty}]})


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("n", [1, 2])
def test_of_a_long_text_next_to_nothing_is_encoded_again_and_again(server, engine, monkeypatch, route, n):
    said = "wörd \"quoted\"\n \u2028 🙂 \\ </s> " * 5
    count, encoded = len(said.encode()), []
    engine.says(said)
    monkeypatch.setattr(answer, "event", lambda data: (encoded.append(data), event(data))[1])
    body = {**ROUTES[route], "max_tokens": count, "stream": True, "n": n, "seed": 1}
    lines = [line for line in server.post(route, body).content.split(b"\n\n") if line]
    assert lines.pop() == b"data: [DONE]"
    assert sum(bool(text_of(chunk)) for chunk in encoded) <= 2 * n, "the first text of each and the last"
    chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
    assert [event(chunk).strip() for chunk in chunks] == lines, "written as every other JSON of ours"
    for index in range(n):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert "".join(map(text_of, own)) == said
        begin = 0 if route == "/v1/completions" else 1  # behind the role
        assert len({without_text(chunk) for chunk in own[begin:-1]}) == 1
        assert own[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"return_token_ids": True}])
def test_chunks_that_say_more_than_their_text_are_encoded_whole(server, fields):
    body = {**ROUTES["/v1/completions"], "max_tokens": 6, "stream": True, **fields}
    lines = server.post("/v1/completions", body).text.split("\n\n")[:-3]
    found = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert [one["logprobs"]["tokens"] if "logprobs" in fields else len(one["token_ids"]) for one in found] == [
        [letter] if "logprobs" in fields else 1 for letter in "abcdef"]


class Posts:
    """An engine whose outputs the test posts."""

    def add(self, request, sink):
        self.sink = sink

    def abort(self, request_id):
        raise AssertionError("it has ended")


def test_outputs_of_one_step_wake_the_event_loop_once_and_come_in_one_batch():
    async def main():
        loop, engine, woken = asyncio.get_running_loop(), Posts(), []
        call = Call(engine, Bridge(loop), [Request(name, [1], SamplingParams()) for name in "ab"])
        call.start()
        wake = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (woken.append(args), wake(*args))

        def step(reason=None):
            for name in "ab":
                engine.sink(RequestOutput(name, [1], name, finish_reason=reason))

        await asyncio.to_thread(step)
        woken.clear()  # of the thread's end, too
        step()
        assert len(woken) == 1
        step(FinishReason.LENGTH)
        return [[(index, output.text) for index, output in batch] async for batch in call.batches()]

    batches = asyncio.run(main())
    assert sum(batches, []) == [(0, "a"), (1, "b")] * 3 and len(batches) <= 2


def test_a_server_with_nothing_to_do_uses_next_to_no_processor(server, processor_share):
    server.complete(stream=True)
    assert processor_share(0.02) < 0.02


THREADS = """
import os, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from hotswap.core.modeling import tokenizer
from hotswap.server.run import keep_tokenizers_single
keep_tokenizers_single()
backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[]))
made = tokenizer.Tokenizer(backend)
before = len(os.listdir("/proc/self/task"))
for text in ("a" * 100, "a" * 5000):
    assert len(made.encode(text)) == len(text)
print(len(os.listdir("/proc/self/task")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
@pytest.mark.parametrize("told", [None, "true"])
def test_tokenizing_a_prompt_starts_no_threads_unless_the_environment_says_so(told):
    kept = {name: value for name, value in os.environ.items() if name != "TOKENIZERS_PARALLELISM"}
    env = {**kept, "PYTHONPATH": str(ROOT / "src"), **({} if told is None else {"TOKENIZERS_PARALLELISM": told})}
    ran = subprocess.run([sys.executable, "-c", THREADS], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert (int(ran.stdout) > 0) == (told == "true")
