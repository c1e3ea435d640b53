"""The Python class, on the fake engine."""

import pytest

import hotswap
from hotswap import LLM, SamplingParams
from hotswap.core.errors import RequestError
from hotswap.server.llm import GenerationError
from hotswap.server.served import Served

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def llm(engine):
    llm = LLM.of(Served(
        "tiny", engine, engine.tokenizer, engine.tokenizer.vocab_size, 512, frozenset({1}), chat_template=TEMPLATE))
    yield llm
    llm._finalizer.detach()  # the engine is the module's


def test_one_prompt_or_many_as_text_or_token_ids(llm, engine):
    ids = engine.tokenizer.encode("two")
    for prompts, texts in (
        ("one", ["one"]), (["one", "two"], ["one", "two"]), (ids, [None]), ([ids, "x"], [None, "x"]),
    ):
        results = llm.generate(prompts, max_tokens=3)
        assert [result.prompt for result in results] == texts
        assert all(result.finished for result in results)
        assert {result.outputs[0].text for result in results} == {"abc"}
    assert results[0].prompt_token_ids == ids
    assert engine.tokenizer.decode(results[0].outputs[0].token_ids) == "abc"
    assert results[0].outputs[0].finish_reason == "length"
    assert llm.generate([]) == []


def test_n_choices_and_logprobs(llm):
    (result,) = llm.generate("one", SamplingParams(n=2, max_tokens=2, logprobs=1, prompt_logprobs=0))
    assert [output.index for output in result.outputs] == [0, 1]
    first = result.outputs[0]
    assert first.logprobs[0][first.token_ids[0]].decoded_token == "a"
    assert first.logprobs[0][first.token_ids[0]].rank == 1
    assert first.cumulative_logprob == pytest.approx(-1.0)
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == 3


def test_chat_takes_a_conversation_or_several(llm, engine):
    conversation = [{"role": "user", "content": "hi"}]
    (result,) = llm.chat(conversation, max_tokens=2)
    assert result.outputs[0].text == "ab"
    assert engine.tokenizer.decode(result.prompt_token_ids, False) == "<|im_start|>hi<|im_end|>"
    assert len(llm.chat([conversation, conversation], max_tokens=1)) == 2
    (result,) = llm.chat(conversation, continue_final_message=True, max_tokens=1)
    assert engine.tokenizer.decode(result.prompt_token_ids, False) == "<|im_start|>hi"


def test_a_stream_grows_and_ends(llm):
    seen = [result.outputs[0].text for result in llm.generate_stream("x", max_tokens=4)]
    assert seen == ["a", "ab", "abc", "abcd"]
    last = list(llm.chat_stream([{"role": "user", "content": "x"}], max_tokens=2))[-1]
    assert (last.finished, last.outputs[0].text) == (True, "ab")


def test_a_stream_that_is_left_is_aborted(llm, engine):
    engine.step_s = 0.01
    stream = llm.generate_stream("x", max_tokens=400)
    next(stream)
    stream.close()
    assert len(engine.aborted) == 1
    assert llm.generate("y", max_tokens=1)[0].finished


def test_more_prompts_than_the_queue_takes_are_served(llm, engine):
    engine.max_running, engine.max_queue = 2, 1
    results = llm.generate([f"prompt {i}" for i in range(40)], max_tokens=2)
    assert [result.prompt for result in results] == [f"prompt {i}" for i in range(40)]


def test_what_cannot_be_served_is_refused_before_any_work(llm, engine):
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        llm.generate("x", temprature=1)
    with pytest.raises(RequestError, match="0 to 259"):
        llm.generate([[5], [999]])
    with pytest.raises(TypeError, match="not both"):
        llm.generate("x", SamplingParams(), max_tokens=1)
    assert engine.requests == []


@pytest.mark.parametrize(("call", "message"), [
    (lambda llm: llm.generate(5), "prompts: expected a text, token ids, or a list of either; got int 5"),
    (lambda llm: llm.generate(["a", 5]), r"prompts\[1\]: expected a text or a list of token ids; got int 5"),
    (lambda llm: llm.generate([[1, "a"]]), r"prompts\[0\]: "), (lambda llm: llm.generate(b"x"), "got bytes"),
    (lambda llm: llm.generate("x", {"temperature": 0}), "sampling_params: expected one SamplingParams.*got dict"),
    (lambda llm: llm.generate(["x"], [SamplingParams()]), "for all prompts; got list"),
    (lambda llm: llm.chat("Hi"), "messages: expected a conversation.*got str 'Hi'; a plain text is for generate"),
    (lambda llm: llm.chat(["Hi"]), "messages: expected"), (lambda llm: llm.chat(5), "messages: expected"),
    (lambda llm: LLM(5), "LLM takes a config file.*got int 5"), (lambda llm: LLM(), "got nothing"),
])
def test_what_is_no_prompt_is_a_type_error_that_says_what_is(llm, engine, call, message):
    with pytest.raises(TypeError, match=message):
        call(llm)
    assert engine.requests == []


def test_messages_are_checked_as_over_http(llm):
    with pytest.raises(RequestError, match=r"messages\.0\.role: .*'system'"):
        llm.chat([{"role": "wizard", "content": "x"}])
    with pytest.raises(RequestError, match="content is missing"):
        llm.chat([{"role": "user"}])
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert llm.chat(parts, max_tokens=1)[0].finished
    with pytest.raises(RequestError, match="empty"):
        llm.generate([[]])


@pytest.mark.parametrize(("args", "fields", "source", "flags"), [
    ((), {"model": "tiny"}, {"model": "tiny"}, []),
    (("tiny",), {"dtype": "float32"}, {"model": "tiny"}, ['dtype="float32"']),
    (({"model": "a"},), {"model": "b"}, {"model": "a"}, ['model="b"']), (("c.yaml",), {}, "c.yaml", []),
])
def test_a_model_may_be_given_by_the_keyword(monkeypatch, args, fields, source, flags):
    class Loading(Exception):
        """Far enough."""

    def load_config(*given):
        assert given == (source, flags)
        raise Loading

    monkeypatch.setattr("hotswap.server.llm.load_config", load_config)
    with pytest.raises(Loading):
        LLM(*args, **fields)


def test_the_package_lists_what_it_offers():
    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(hotswap))


def test_a_failure_raises_and_aborts_the_rest(llm, engine):
    engine.fail_after, engine.step_s = 2, 0.01
    with pytest.raises(GenerationError, match="device lost"):
        llm.generate(["x", "y"], max_tokens=9)
    assert not engine.running


def test_seeds_make_choices_repeatable(llm, engine):
    for _ in range(2):
        llm.generate(["a", "b"], seed=5, max_tokens=1)
    assert len({request.seed for request in engine.requests}) == 1
