"""Every sampling field, sent over HTTP to a real engine, changes the answer as it says, or is refused by name."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.config import load_config
from hotswap.core.engine.build import Built, build_engine
from hotswap.core.request import SamplingParams
from hotswap.server.protocol.chat import ChatBody
from hotswap.server.protocol.completions import CompletionBody

EOS, IM_END = 1, 3
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HOT = {"temperature": 3.0, "seed": 1}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """Random weights whose logits lie close together, as wide as the byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(11)
    path: Path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.1,
    )).save_pretrained(path)
    built = build_engine(load_config({
        "model": {"path": str(path)}, "dtype": "float32", "device": "cpu", "kvcache": {"memory": "4MiB"},
        "max_model_len": 256, "execution": {"num_threads": 1}}, environ={}), progress=False)
    yield built
    built.engine.stop()


class Choice:
    """One choice of an answer, or of a stream, put together."""

    def __init__(self) -> None:
        self.text, self.token_ids, self.finish_reason, self.logprobs = "", [], None, []

    def add(self, raw: dict[str, Any]) -> None:
        message = raw.get("message") or raw.get("delta") or raw
        self.text += message.get("content") or message.get("text") or ""
        self.token_ids += raw.get("token_ids") or []
        self.finish_reason = raw["finish_reason"] or self.finish_reason
        if logprobs := raw["logprobs"]:
            self.logprobs += logprobs.get("content") or logprobs["token_logprobs"]


class Client:
    """Asks for twelve greedy lowercase letters, unless fields say otherwise."""

    def __init__(self, server: Any, path: str, stream: bool, letters: list[int]) -> None:
        self.server, self.path, self.stream, self.letters = server, path, stream, letters

    def post(self, **fields: Any) -> Any:
        prompt = {"messages": [{"role": "user", "content": "hello"}]} if self.path == CHAT else {"prompt": "hello"}
        return self.server.post(self.path, {
            **prompt, "max_tokens": 12, "temperature": 0, "allowed_token_ids": self.letters, "return_token_ids": True,
            "stream": self.stream, **fields})

    def choices(self, **fields: Any) -> list[Choice]:
        answer = self.post(**fields)
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and line != "data: [DONE]"]
        found: dict[int, Choice] = {}
        for line in lines if self.stream else [answer.text]:
            for raw in json.loads(line)["choices"]:
                found.setdefault(raw["index"], Choice()).add(raw)
        return [found[index] for index in sorted(found)]

    def choice(self, **fields: Any) -> Choice:
        return self.choices(**fields)[0]

    def text(self, **fields: Any) -> str:
        return self.choice(**fields).text

    def repeats(self, **fields: Any) -> int:
        """How many of the twelve letters have come before."""
        return 12 - len(set(self.text(**fields)))

    def logprobs(self) -> list[Any]:
        return self.choice(logprobs=True if self.path == CHAT else 1).logprobs

    def has_prompt_logprobs(self) -> bool:
        answer = self.post(prompt_logprobs=1)
        if self.stream:
            return answer.status_code == 400 and answer.json()["error"]["param"] == "prompt_logprobs"
        whole = answer.json()
        first, *others = (whole if self.path == CHAT else whole["choices"][0])["prompt_logprobs"]
        return first is None and len(others) >= 4 and all(others)


@pytest.fixture(params=[(COMPLETIONS, False), (COMPLETIONS, True), (CHAT, False), (CHAT, True)],
                ids=["completions", "streamed completions", "chat", "streamed chat"])
def client(request: pytest.FixtureRequest, built: Built, start: Any, engine: Any) -> Client:
    server = start(served={
        "engine": built.engine, "vocab_size": 260, "max_model_len": 256, "eos_token_ids": frozenset({EOS})})
    return Client(server, *request.param, engine.tokenizer.encode("abcdefghijklmnopqrstuvwxyz"))


EFFECTS: dict[str, Callable[[Client], bool]] = {
    "n": lambda c: len({choice.text for choice in c.choices(**HOT, n=3)}) == 3,
    "max_tokens": lambda c: len(c.choice(max_tokens=5).token_ids) == 5,
    "min_tokens": lambda c: [
        len(c.choice(stop=c.text()[0], min_tokens=least).token_ids) >= 7 for least in (0, 7)] == [False, True],
    "temperature": lambda c: c.text(temperature=3.0) != c.text(),
    "top_p": lambda c: c.text(**HOT, top_p=1e-6) == c.text() != c.text(**HOT),
    "top_k": lambda c: c.text(**HOT, top_k=1) == c.text() != c.text(**HOT),
    "min_p": lambda c: c.text(**HOT, min_p=1.0) == c.text() != c.text(**HOT),
    "typical_p": lambda c: (
        c.text(**HOT, typical_p=1e-6) == c.text(**{**HOT, "seed": 2}, typical_p=1e-6) != c.text(**HOT)),
    "presence_penalty": lambda c: c.repeats(presence_penalty=2.0) < c.repeats(),
    "frequency_penalty": lambda c: c.repeats(frequency_penalty=2.0) < c.repeats(),
    "repetition_penalty": lambda c: c.repeats(repetition_penalty=10.0) < c.repeats(),
    "logit_bias": lambda c: c.choice(logit_bias={"70": 100}).token_ids == [70] * 12,
    "allowed_token_ids": lambda c: set(c.choice(**HOT, allowed_token_ids=[70, 71]).token_ids) == {70, 71},
    "bad_words": lambda c: c.text()[0] not in c.text(bad_words=[c.text()[0]]),
    "seed": lambda c: c.text(**HOT) == c.text(**HOT) != c.text(**{**HOT, "seed": 2}),
    "stop": lambda c: c.text(**HOT, stop=c.text(**HOT)[3:6]) == c.text(**HOT)[:3],
    "stop_token_ids": lambda c: len(c.choice(stop_token_ids=c.choice().token_ids[:1]).token_ids) == 1,
    "include_stop_str_in_output": lambda c: c.text(
        **HOT, stop=c.text(**HOT)[3:6], include_stop_str_in_output=True) == c.text(**HOT)[:6],
    "ignore_eos": lambda c: [
        len(c.choice(allowed_token_ids=[EOS], ignore_eos=ignore).token_ids) for ignore in (False, True)] == [1, 12],
    "skip_special_tokens": lambda c: [
        c.text(allowed_token_ids=[IM_END], max_tokens=2, skip_special_tokens=skip) for skip in (True, False)
    ] == ["", "<|im_end|>" * 2],
    "logprobs": lambda c: len(c.logprobs()) == 12 and not c.choice().logprobs,
    "prompt_logprobs": lambda c: c.has_prompt_logprobs(),
}


@pytest.mark.parametrize("fields", [
    {"temperature": 5e-324}, {"temperature": 1e-5}, {"temperature": 100}, {"top_p": 5e-324}, {"typical_p": 5e-324},
    {"min_p": 5e-324}, {"min_p": 1}, {"top_k": 10**400}, {"presence_penalty": -2}, {"presence_penalty": 2},
    {"frequency_penalty": -2}, {"frequency_penalty": 2}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e-39},
    {"repetition_penalty": 0.01}, {"repetition_penalty": 10}, {"logit_bias": {"70": -100, "71": 100}},
], ids=lambda fields: str(fields)[:40])
def test_no_extreme_of_a_field_is_an_error_of_the_server(built, start, engine, fields):
    server = start(served={"engine": built.engine, "vocab_size": 260, "max_model_len": 256})
    coldest = {"temperature": 1e-5, "repetition_penalty": 0.01, "logit_bias": {"72": 100}}
    for beside in ({}, HOT, coldest):
        answer = server.complete("hello", **{**beside, "max_tokens": 12, **fields})
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 400:
            assert answer.json()["error"]["param"] == next(iter(fields))


NULLABLE = {
    COMPLETIONS: {name for name in CompletionBody.model_fields if name != "prompt"},
    CHAT: {name for name in ChatBody.model_fields if name != "messages"}}


def test_null_in_a_field_that_need_not_be_given_is_as_if_it_were_not_given(client):
    told_by_the_client = {"max_tokens", "temperature", "allowed_token_ids", "stream", "return_token_ids"}
    fields = NULLABLE[client.path] | SamplingParams.model_fields.keys()
    assert client.text(**dict.fromkeys(fields - told_by_the_client)) == client.text()
    answer = client.server.post(client.path, {
        "prompt": "hello", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": None,
        "return_token_ids": None})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["finish_reason"] == "length"


def test_null_in_a_stream_s_options_is_no_option(client):
    if client.stream:
        assert client.text(stream_options={"include_usage": None}) == client.text()


@pytest.mark.parametrize("field", EFFECTS)
def test_a_sampling_field_changes_the_answer_as_it_says(client: Client, field: str) -> None:
    assert EFFECTS[field](client)


def test_every_sampling_field_is_among_them_but_the_one_that_no_component_reads(client: Client) -> None:
    assert SamplingParams.model_fields.keys() - EFFECTS.keys() == {"extra"}
    answer = client.post(extra={"nobody": {}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "extra.nobody")
