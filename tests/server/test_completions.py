"""POST /v1/completions."""

import json
from typing import Any

import httpx


def events(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(data) for data in events(response) if data != "[DONE]"]


def test_a_text_is_completed(server):
    answer = server.complete("hello").json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    assert [choice["text"] for choice in answer["choices"]] == ["abcde"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10, "prompt_tokens_details": {"cached_tokens": 0}}


def test_cached_tokens_are_told(server):
    server.complete("hello")
    assert server.complete("hello").json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 4


def test_prompts_may_be_texts_token_ids_or_lists_of_either(server, engine):
    ids = engine.tokenizer.encode("hi")
    for prompt, count in (("hi", 1), (["hi", "you"], 2), (ids, 1), ([ids, ids, ids], 3)):
        choices = server.complete(prompt).json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(count))
        assert [choice["text"] for choice in choices] == ["abcde"] * count
    assert [request.prompt_token_ids for request in engine.requests[-3:]] == [ids] * 3


def test_n_choices_come_back_each_with_its_own_end(server, engine):
    answer = server.complete(["one", "two"], n=3, seed=1).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["completion_tokens"] == 30
    assert answer["usage"]["prompt_tokens"] == 6
    seeds = [request.seed for request in engine.requests]
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds[:3])) == 3
    assert [request.id.rpartition("-")[2] for request in engine.requests] == list("012345")


def test_a_stream_gives_the_same_text_and_ends_each_choice_once(server):
    whole = server.complete("hello", n=3).json()
    streamed = server.complete("hello", n=3, stream=True)
    assert events(streamed)[-1] == "[DONE]"
    texts, ends = [""] * 3, []
    for chunk in chunks(streamed):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            assert choice["text"] == ""
            ends.append(choice["index"])
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert sorted(ends) == [0, 1, 2]


def test_usage_is_streamed_only_when_asked_for(server):
    for options in ({}, {"stream_options": {}}, {"stream_options": None}):
        streamed = server.complete(stream=True, **options)
        assert not any("usage" in chunk for chunk in chunks(streamed))
    streamed = server.complete(stream=True, stream_options={"include_usage": True}, n=2)
    last = chunks(streamed)[-1]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 10)
    assert sum("usage" in chunk for chunk in chunks(streamed)) == 1
    assert server.complete(stream_options={"include_usage": True}).status_code == 400


def test_echo_puts_the_prompt_before_the_completion(server, engine):
    assert server.complete("hi", echo=True).json()["choices"][0]["text"] == "hiabcde"
    ids = engine.tokenizer.encode("hi")
    assert server.complete(ids, echo=True).json()["choices"][0]["text"] == "hiabcde"
    streamed = server.complete("hi", echo=True, stream=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks(streamed)) == "hiabcde"


def test_echoed_logprobs_begin_with_null(server):
    for streamed in (False, True):
        response = server.complete("hi", echo=True, logprobs=2, stream=streamed)
        found = chunks(response) if streamed else [response.json()]
        lists = [chunk["choices"][0]["logprobs"] for chunk in found if chunk["choices"][0]["logprobs"]]
        tokens = [token for item in lists for token in item["tokens"]]
        values = [value for item in lists for value in item["token_logprobs"]]
        offsets = [offset for item in lists for offset in item["text_offset"]]
        tops = [top for item in lists for top in item["top_logprobs"]]
        assert tokens == list("hiabcde")
        assert values[0] is None
        assert tops[0] is None
        assert values[1:] == [-0.5] * 6
        assert offsets == list(range(7))
        assert set(tops[1]) == {"i", "j"}


def test_echo_without_completion_gives_the_prompts_logprobs(server):
    answer = server.complete("hi!", echo=True, logprobs=0, max_tokens=0).json()
    assert answer["choices"][0]["text"] == "hi!"
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0
    assert server.complete("hi!", max_tokens=0).status_code == 400


def test_prompt_logprobs_keep_their_null(server):
    listed = server.complete("hi", prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert listed[0] is None
    ((token, entry),) = listed[1].items()
    assert token.isdigit()
    assert entry == {"logprob": -0.5, "rank": 1, "decoded_token": "i"}


def test_prompt_logprobs_are_refused_in_a_stream_which_has_no_place_for_them(server):
    for ask in (server.complete, server.chat):
        answer = ask("hi", prompt_logprobs=1, stream=True)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_logprobs"
    assert server.complete("hi", echo=True, logprobs=1, stream=True).status_code == 200


def test_without_a_limit_the_context_is_filled(server, engine):
    engine.max_model_len = 512
    answer = server.complete("hello", max_tokens=None, logit_bias={"1": -100}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 512


def test_a_stop_string_is_cut_off_and_never_streamed_in_part(server):
    for streamed in (False, True):
        response = server.complete(max_tokens=20, stop=["fgh"], stream=streamed)
        found = chunks(response) if streamed else [response.json()]
        assert "".join(chunk["choices"][0]["text"] for chunk in found) == "abcde"
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
        assert found[-1]["choices"][0]["stop_reason"] == "fgh"


def test_what_was_held_back_comes_at_the_end_of_the_text(server, engine):
    engine.says("ok#", 1)
    for streamed in (False, True):
        response = server.complete(max_tokens=20, stop=["##"], stream=streamed)
        found = chunks(response) if streamed else [response.json()]
        assert "".join(chunk["choices"][0]["text"] for chunk in found) == "ok#"
        assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_characters_are_never_streamed_in_halves(server, engine):
    text = "한국어 🙂 é"
    engine.says(text, 1)
    streamed = server.complete(max_tokens=100, stream=True)
    parts = [chunk["choices"][0]["text"] for chunk in chunks(streamed)]
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_min_tokens_keeps_stop_strings_off(server):
    answer = server.complete(max_tokens=40, stop=["a"], min_tokens=20).json()
    assert answer["usage"]["completion_tokens"] == 27
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_empty_prompt_is_refused_and_the_next_one_served(server):
    refused = server.complete("")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"
    assert server.complete([]).status_code == 400
    assert server.complete([[]]).status_code == 400
    assert server.complete("x").status_code == 200


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(server):
    error = server.complete("x" * 600).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "600" in error["message"]
    assert "512" in error["message"]


def test_token_ids_come_back_where_asked_for(server, engine):
    choice = server.complete("hi", return_token_ids=True).json()["choices"][0]
    assert engine.tokenizer.decode(choice["token_ids"]) == "abcde"
    assert choice["prompt_token_ids"] == engine.tokenizer.encode("hi")


def test_bytes_that_are_no_character_have_a_name_in_logprobs(server, engine):
    engine.says("é")
    names = server.complete(max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]["tokens"]
    assert names == ["bytes:\\xc3", "bytes:\\xa9"]


def test_defaults_of_the_model_hold_where_a_request_says_nothing(start, engine):
    server = start(served={"sampling_defaults": {"temperature": 0.2, "top_k": 5}})
    server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
    server.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, "temperature": 0.7, "top_k": None})
    assert [(r.sampling.temperature, r.sampling.top_k) for r in engine.requests] == [(0.2, 5), (0.7, 5)]


def test_seeds_do_not_depend_on_what_else_runs(server, engine):
    for prompt in ("one", ["two", "three"]):
        server.complete(prompt, seed=7, n=2)
    seeds = [request.seed for request in engine.requests]
    assert seeds == [seeds[0], seeds[1]] * 3
    server.complete("one")
    server.complete("one")
    assert len({request.seed for request in engine.requests}) == 4
