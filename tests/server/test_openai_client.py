"""OpenAI's own client against the server."""

import openai
import pytest


@pytest.fixture
def client(start):
    server = start(api_keys=["secret"])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_completion_tokens=4, n=2, temperature=0,
        logprobs=True, top_logprobs=1, extra_body={"top_k": 5, "min_tokens": 1})
    assert [choice.message.content for choice in answer.choices] == ["abcd", "abcd"]
    assert answer.choices[0].logprobs.content[0].token == "a"
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_in_a_stream(client):
    stream = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}], max_tokens=4,
        stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "abcd"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 4


def test_completions(client):
    answer = client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=3, logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["aabc", "babc"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    texts = [chunk.choices[0].text for chunk in client.completions.create(
        model="tiny", prompt="a", max_tokens=3, stream=True)]
    assert "".join(texts) == "abc"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "hotswap"


def test_errors_are_the_clients_own_exceptions(client, engine):
    def ask(**fields):
        return client.chat.completions.create(**{
            "model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields})

    with pytest.raises(openai.BadRequestError) as caught:
        ask(temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as caught:
        ask(model="gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    engine.max_running, engine.max_queue = 0, 0
    with pytest.raises(openai.RateLimitError):
        ask()


def test_a_failure_inside_a_stream_raises_in_the_client(client, engine):
    engine.fail_after = 2
    with pytest.raises(openai.APIError, match="request id"):
        list(client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, stream=True))
