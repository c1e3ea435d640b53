"""Whatever goes wrong, and whatever is sent: an OpenAI error body, and a server that lives."""

import asyncio
import concurrent.futures
import json
import logging
import socket
import threading

import httpx
import pytest

from hotswap.core.request import FinishReason


def assert_error(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def test_every_refusal_has_the_same_body(start):
    server = start(max_body_bytes=1000)
    post, headers = server.client.post, {"content-type": "application/json"}
    assert_error(post("/v1/completions", content=b"{", headers=headers), 400)
    assert_error(post("/v1/completions", content=b"[1]", headers=headers), 400)
    assert_error(post("/v1/completions", content=b"", headers=headers), 400)
    assert_error(post("/v1/completions", content=b'{"prompt": "\xff"}', headers=headers), 400)
    assert_error(post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"}), 415)
    assert_error(post("/v1/nothing", json={}), 404)
    assert_error(server.client.get("/v1/completions"), 405)
    assert_error(server.client.get("/"), 404)
    assert_error(server.client.get("/v1/models/other"), 404)
    assert_error(server.complete("x" * 2000), 413)
    assert_error(server.complete(temperature="hot"), 400)
    assert_error(server.complete(model="gpt-9"), 404)
    assert server.complete().status_code == 200


def test_a_large_body_sent_in_chunks_is_refused_too(start):
    server = start(max_body_bytes=1000)
    response = server.client.post(
        "/v1/completions", content=(b" " * 400 for _ in range(5)), headers={"content-type": "application/json"})
    assert_error(response, 413)


def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                       b"Content-Length: 99999999999\r\n\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_a_client_that_hangs_up_while_it_sends_its_body_is_no_error_of_ours(server, path, caplog):
    incoming = [{"type": "http.request", "body": b'{"prompt": "h', "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return incoming.pop(0)

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "root_path": "", "scheme": "http",
             "http_version": "1.1", "headers": [(b"content-type", b"application/json")]}
    with caplog.at_level(logging.INFO):
        asyncio.run(server.app(scope, receive, send))
    assert incoming == []
    assert caplog.records == []


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("fields", "param"), [
    ({"temperature": "hot"}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 1.01}, "top_p"),
    ({"top_p": -0.1}, "top_p"), ({"top_p": 0}, "top_p"), ({"n": 0}, "n"), ({"n": 1000}, "n"),
    ({"max_tokens": -1}, "max_tokens"), ({"logit_bias": {"999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"), ({"allowed_token_ids": [260]}, "allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"logprobs": 21}, "logprobs"), ({"seed": 2**70}, "seed"),
    ({"stop": [""]}, "stop"), ({"stop": ["x" * 10000]}, "stop"), ({"stop": ["x"] * 100}, "stop"), ({"stop": 5}, "stop"),
    ({"priority": 1.5}, "priority"), ({"priority": 2**40}, "priority"), ({"min_tokens": 50}, "min_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"), ({"repetition_penalty": 1e-39}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"extra": {"nothing": {}}}, "extra.nothing"), ({"suffix": "x"}, "suffix"), ({"best_of": 3}, "best_of"),
    ({"prompt": {}}, "prompt"), ({"prompt": [1, "a"]}, "prompt"), ({"prompt": [-1]}, "prompt"),
    ({"prompt": None}, "prompt"), ({"prompt": [260]}, "prompt"),
    ({"prompt": "x" * 511, "max_tokens": 5}, "max_tokens"), ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"stream_options": {"include_usage": 3}}, "stream_options"), ({"cache_salt": 5}, "cache_salt"),
    ({"prompt": ["x"] * 2000}, "prompt"), ({"prompt": ["x"] * 200, "n": 100}, "n"), ({"prompt": [True]}, "prompt"),
    ({"prompt": [1.0]}, "prompt"), ({"prompt": [[1], []]}, "prompt"), ({"echo": "yes"}, "echo"),
    ({"stream": 1}, "stream"), ({"user": 5}, "user"), ({"metadata": "x"}, "metadata"),
    ({"temperature": True}, "temperature"), ({"n": 1.0}, "n"),
    ({"max_tokens": "5"}, "max_tokens"), ({"ignore_eos": 1}, "ignore_eos"), ({"stop": ["a", 5]}, "stop"),
    ({"bad_words": [""]}, "bad_words"), ({"bad_words": ["x"] * 2000}, "bad_words"),
])
def test_what_cannot_be_served_is_refused_by_name_before_the_first_byte(server, fields, param, streamed):
    error = assert_error(server.complete(**{"stream": streamed, **fields}), 400)
    assert error["param"].startswith(param)
    assert server.engine.requests == []


@pytest.mark.parametrize("body", [
    b'{"prompt": "x", "metadata": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", b"[" * 10_000, b'{"a":' * 10_000,
    b'{"prompt": "x", "tools": ' + b'{"a":[' * 60 + b"]}" * 60 + b"}",
    b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "seed": 1e999}', b'{"prompt": "\\ud800"}', b'{"prompt": "x", "stop": "\\udfff"}',
    b'{"prompt": "x", "n": ' + b"9" * 5000 + b"}", b'{"prompt": "x", "temperature": 1e400}', b"\x80\x04K\x01.",
])
def test_hostile_json_is_refused_and_the_server_lives(server, body):
    headers = {"content-type": "application/json"}
    assert_error(server.client.post("/v1/completions", content=body, headers=headers), 400)
    assert server.complete().status_code == 200


def test_ids_are_checked_against_the_width_of_the_logits_not_the_tokenizers_size(start):
    server = start(served={"vocab_size": 200})
    for fields in (
        {"allowed_token_ids": [205]}, {"logit_bias": {"205": 1}}, {"stop_token_ids": [205]}, {"prompt": [205]},
    ):
        assert_error(server.complete(**fields), 400)
    assert server.complete(allowed_token_ids=[199], logit_bias={"199": 1}, stop_token_ids=[199]).status_code == 200


def test_a_call_that_fails_in_one_choice_fails_as_a_whole_and_at_once(server, engine):
    engine.step_s = 0.01

    def fail_second(state, tokens, step=engine._step):
        if state.id.endswith("-1"):
            return engine._end(state, FinishReason.ERROR, "lost")
        return step(state, tokens)

    engine._step = fail_second
    try:
        assert_error(server.complete(n=2, max_tokens=400), 500)
        assert len(engine.aborted) == 1
    finally:
        del engine._step


# Failures


def test_an_engines_failure_is_told_in_general_words(server, engine):
    engine.fail_after = 2
    response = server.complete()
    error = assert_error(response, 500)
    assert response.headers["x-request-id"] in error["message"]
    for secret in ("/", "RuntimeError", "device", "Traceback"):
        assert secret not in error["message"]
    engine.fail_after = None
    assert server.complete().status_code == 200


def test_a_failure_inside_a_stream_is_an_error_event_and_no_done(server, engine):
    engine.fail_after = 2
    response = server.complete(stream=True, n=2)
    assert response.status_code == 200
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert "[DONE]" not in data
    assert json.loads(data[-1])["error"]["type"] == "server_error"
    assert "error" not in json.loads(data[0])
    assert not engine.running


def test_a_bug_in_a_handler_is_a_500_without_details(server, engine, monkeypatch, caplog):
    def fail(request, sink):
        raise KeyError("/home/secret/path")

    monkeypatch.setattr(engine, "add", fail)
    with caplog.at_level(logging.ERROR):
        for streamed in (False, True):
            error = assert_error(server.complete(stream=streamed), 500)
            assert "secret" not in error["message"]
            assert "/" not in error["message"]
    assert "secret" in caplog.text
    monkeypatch.undo()
    assert server.complete().status_code == 200


def test_a_full_queue_answers_429_at_once_and_the_others_finish(server, engine):
    engine.max_running, engine.max_queue, engine.step_s = 1, 4, 0.05
    with concurrent.futures.ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: server.complete(), range(20)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert [a.status_code for a in answers].count(200) == 5
    assert len(refused) == 15
    for answer in refused:
        assert_error(answer, 429)
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.elapsed.total_seconds() < 1


def test_of_a_call_that_does_not_fit_as_a_whole_nothing_stays(server, engine):
    engine.admit, engine.max_running, engine.max_queue = False, 0, 4
    assert server.complete(n=6).status_code == 429
    assert not engine.waiting
    engine.admit, engine.max_running = True, 8
    assert server.complete(n=6).status_code == 200


def test_a_call_that_can_never_fit_is_not_told_to_come_again(start, engine):
    server = start(served={"capacity": 5})
    for answer, param in (
        (server.complete(n=6), "n"), (server.chat("x", n=6), "n"), (server.complete(["x"] * 6), "prompt"),
        (server.complete(["x"] * 2, n=3), "n"),
    ):
        error = assert_error(answer, 400)
        assert error["param"] == param
        assert "make 6 sequences, but at most 5 can run and wait here at a time" in error["message"]
    assert engine.requests == []
    assert server.complete(n=5).status_code == 200


# Unknown fields


def test_unknown_fields_are_named_in_a_header_and_logged_once(start, caplog):
    server = start()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            answer = server.complete(temprature=0, **{"nonsense\r\nX-Evil: 1": 2})
            assert answer.status_code == 200
            assert "temprature" in answer.headers["x-hotswap-warning"]
            assert "x-evil" not in answer.headers
    assert sum("temprature" in record.getMessage() for record in caplog.records) == 1
    assert "x-hotswap-warning" in server.complete(stream=True, temprature=0).headers
    nested = server.complete(stream=True, stream_options={"include_usages": True})
    assert "stream_options.include_usages" in nested.headers["x-hotswap-warning"]
    unread = server.post("/tokenize", {"prompt": "x", "temperature": 0})
    assert "temperature" in unread.headers["x-hotswap-warning"]


def test_strict_mode_refuses_unknown_fields_with_a_hint(start):
    server = start(strict_fields=True)
    error = assert_error(server.complete(temprature=0), 400)
    assert error["param"] == "temprature"
    assert "'temperature'" in error["message"]
    assert server.complete(user="me", top_k=3).status_code == 200


def test_the_request_id_comes_back_or_is_made(server, engine):
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, X_Request_Id="mine-7").headers[
        "x-request-id"] == "mine-7"
    assert engine.requests[0].attrs["request_id"] == "mine-7"
    for bad in ("has space", "x" * 200):
        made = server.client.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert made != bad
        assert len(made) == 32
    assert server.client.get("/nothing").headers["x-request-id"]


@pytest.mark.parametrize(("fields", "message"), [
    ({"prompt": None}, "prompt: should be a text, token ids, or a list of either, and not empty, got null"),
    ({"ignore_eos": 1}, "ignore_eos: Input should be a valid boolean, got 1"),
    ({"temperature": True}, "temperature: Input should be a valid number, got true"),
    ({"stop": 5}, "stop: should be a text or a list of texts, got 5"), ({"user": 5}, "user: should be a text, got 5"),
    ({"n": [1] * 99}, "n: Input should be a valid integer, got a list of 99"),
    ({"n": {"a": {}}}, "n: Input should be a valid integer, got an object"),
    ({"logit_bias": {"x": 1}}, 'logit_bias: the key "x" is wrong: Input should be a valid integer, unable to parse '
                               "string as an integer"),
])
def test_a_refusal_speaks_json_and_shows_no_more_than_the_field(server, fields, message):
    error = assert_error(server.complete(**fields), 400)
    assert error["message"] == message
    assert error["param"] == message.partition(":")[0]


def test_a_missing_field_is_named_without_the_rest_of_the_body(server):
    error = assert_error(server.post("/v1/completions", {"user": "a secret"}), 400)
    assert (error["message"], error["param"]) == ("prompt: is missing", "prompt")


def test_a_number_of_thousands_of_digits_is_refused_in_json_s_words(server):
    raw = b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}"
    answer = server.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert assert_error(answer, 400)["message"] == "The body holds a number with too many digits."


def test_an_unknown_role_is_refused_with_the_list_of_roles(server):
    error = assert_error(server.post("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}), 400)
    assert error["param"] == "messages.0.role"
    assert "'system', 'developer', 'user', 'assistant' or 'tool'" in error["message"]
    assert assert_error(server.chat(5), 400)["param"] == "messages.0.content"


def test_more_messages_than_any_conversation_has_are_refused_at_once(server):
    answer = server.chat(*["x"] * 200_000)
    assert assert_error(answer, 400)["param"] == "messages"
    assert answer.elapsed.total_seconds() < 1


def test_paths_are_exact_and_head_is_get_without_a_body(server):
    assert_error(server.client.post("/v1/completions/", json={"prompt": "x"}), 404)
    for path in ("/health", "/ready", "/v1/models"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert server.client.head("/v1/completions").status_code == 405
    assert server.client.head("/nothing").status_code == 404


# Prompts that are far too long


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": "hello " * 2**20}), ("/v1/completions", {"prompt": "a" * 20 * 2**20}),
    ("/v1/completions", {"prompt": ["x", "a" * 2**22]}), ("/tokenize", {"prompt": "a" * 20 * 2**20}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello " * 2**18}] * 4}),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * 6 * 2**20}]}),
])
def test_a_prompt_far_too_long_is_refused_at_once_and_holds_up_nobody(server, engine, path, body):
    raw, answers, waits = json.dumps(body).encode(), [], []
    headers = {"content-type": "application/json"}
    sending = threading.Thread(target=lambda: answers.append(server.client.post(path, content=raw, headers=headers)))
    with httpx.Client(base_url=server.url) as other:
        other.get("/health")  # connected, so that the next one is on its way while the body is
        sending.start()
        while not waits or sending.is_alive():
            waits.append(other.get("/health").elapsed.total_seconds())
    error = assert_error(answers[0], 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]
    assert answers[0].elapsed.total_seconds() < 1
    assert max(waits) < 0.5
    assert engine.requests == []
