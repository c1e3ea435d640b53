"""Batch files."""

import io
import json

import click
import pytest
from click.testing import CliRunner

from hotswap.core.errors import ConfigError, EngineStoppedError, LoopTimeoutError
from hotswap.server import generate
from hotswap.server.cli import main
from hotswap.server.commands import generate as command_module
from hotswap.server.frontend import Frontend
from hotswap.server.served import Served


@pytest.fixture
def served(engine):
    return Served("tiny", engine, engine.tokenizer, engine.tokenizer.vocab_size, 512, frozenset({1}),
                  chat_template="{{ messages[0].content }}")


def answers(served, tmp_path, *lines):
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    jobs = generate.prepare(Frontend(served), generate.read_lines(source), source)
    out = io.StringIO()
    failed = generate.run(served, jobs, out, progress=False)
    return failed, [json.loads(line) for line in out.getvalue().splitlines()]


def test_answers_come_in_the_order_of_the_lines(served, tmp_path, engine):
    engine.max_running, engine.max_queue = 2, 1
    lines = [{"prompt": f"p{i}", "max_tokens": 1 + (i * 7) % 5, "id": f"id-{i}"} for i in range(20)]
    failed, found = answers(served, tmp_path, *lines)
    assert failed == 0
    assert [answer["id"] for answer in found] == [line["id"] for line in lines]
    assert [len(answer["outputs"][0]["text"]) for answer in found] == [line["max_tokens"] for line in lines]


def test_every_kind_of_line(served, tmp_path):
    _, found = answers(
        served, tmp_path, {"prompt": "hé", "max_tokens": 2}, "", {"prompt": [5, 6], "max_tokens": 2, "n": 2},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0})
    assert [answer["id"] for answer in found] == [1, 3, 4]
    assert [len(answer["outputs"]) for answer in found] == [1, 2, 1]
    assert found[0]["prompt"] == "hé"
    assert found[0]["outputs"][0] | {"token_ids": 0} == {
        "text": "ab", "token_ids": 0, "finish_reason": "length", "stop_reason": None}
    assert found[1]["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "cached_tokens": 0}


def test_logprobs_are_written_where_a_line_asks_for_them(served, tmp_path):
    _, (plain, asking) = answers(
        served, tmp_path, {"prompt": "hi", "max_tokens": 2},
        {"prompt": "hi", "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 0})
    assert "prompt_logprobs" not in plain
    assert "logprobs" not in plain["outputs"][0]
    (first, second), (output,) = asking["prompt_logprobs"], asking["outputs"]
    assert first is None
    assert list(second.values()) == [{"logprob": -0.5, "rank": 1, "decoded_token": "i"}]
    assert [next(iter(entry.values()))["decoded_token"] for entry in output["logprobs"]] == ["a", "b"]


def test_bad_lines_are_named_before_any_work_starts(served, tmp_path, engine):
    with pytest.raises(ConfigError) as caught:
        answers(served, tmp_path, {"prompt": "ok"}, "{", "[1]", {"text": "x"}, {"prompt": "x", "messages": []})
    for words in (
        "line 2: ", "line 3: expected a JSON object", "line 4: unknown field 'text'", "line 5: expected either",
    ):
        assert words in str(caught.value)
    assert "line 1:" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        answers(served, tmp_path, {"prompt": "ok"}, {"prompt": [999]}, {"prompt": ""}, {"prompt": "x" * 10000})
    for number in range(2, 5):
        assert f"line {number}: " in str(caught.value)
    assert engine.requests == []


def test_every_field_of_every_line_is_checked_before_the_model_is_loaded(tmp_path):
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "ok"}, {"prompt": "x", "temperature": -1}, {"prompt": [True]},
             {"messages": [{"role": "wizard"}]}, {"messages": 5}, {"prompt": "x", "stop": 5},
             {"prompt": "x", "temprature": 1}]
    source.write_text("\n".join(map(json.dumps, lines)) + '\n{"prompt": "x", "seed": ' + "9" * 5000 + "}")
    with pytest.raises(ConfigError) as caught:
        generate.read_lines(source)
    for words in ("line 2: temperature: ", "line 3: prompt: ", "line 4: messages.0.role: ", "line 5: messages: ",
                  "line 6: stop: ", "line 7: unknown field", "line 8: holds a number with too many digits"):
        assert words in str(caught.value)
    assert "set_int_max" not in str(caught.value)


def test_files_that_cannot_be_used_are_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        generate.read_lines(tmp_path / "nothing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(ConfigError, match="has no lines"):
        generate.read_lines(tmp_path / "empty.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        generate.read_lines(tmp_path / "binary.jsonl")


def test_a_line_that_fails_says_so_and_the_others_are_answered(served, tmp_path, engine):
    engine.fail_after = 3
    failed, found = answers(served, tmp_path, {"prompt": "a", "max_tokens": 2}, {"prompt": "b", "max_tokens": 9})
    assert failed == 1
    assert found[0]["outputs"][0]["text"] == "ab"
    assert "device lost" in found[1]["error"]


@pytest.mark.parametrize("error", [EngineStoppedError("it is gone"), LoopTimeoutError("it is late", begun=True)])
def test_a_command_whose_engine_ends_or_does_not_answer_in_time_is_one_message_and_exit_code_1(error, monkeypatch):
    def fail():
        raise error

    monkeypatch.setattr(command_module, "command", click.Command("generate", callback=fail))
    done = CliRunner().invoke(main, ["generate"])
    assert (done.exit_code, done.output) == (1, f"hotswap: {error}\n")
