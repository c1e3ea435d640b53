"""``hotswap explain`` and ``hotswap replay`` as an operator calls them."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from hotswap.server.cli import main


@pytest.fixture
def hotswap():
    """``hotswap(*arguments)`` gives exit code, output and error output."""
    def call(*arguments):
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        return done.exit_code, done.stdout, done.stderr

    return call


@pytest.fixture
def recording(record):
    recording = record(depth=2, lookahead=2).traffic()
    recording.stop()
    return recording


def test_explain_of_a_request_splits_its_latency_and_tells_it_step_by_step(hotswap, recording):
    code, output, errors = hotswap("explain", recording.path, "--request", "r20")
    assert (code, errors) == (0, "")
    assert output.startswith("request r20: ")
    assert "QUEUE" in output and "TRANSFER" in output
    assert "arrives with " in output and "has its first token" in output and "ends (" in output


def test_explain_as_json_has_parts_that_add_up(hotswap, recording):
    code, output, _ = hotswap("explain", recording.path, "--request", "r20", "--json")
    [told] = json.loads(output)
    state = recording.witness.ended["r20"]
    assert code == 0
    assert sum(told["seconds"].values()) == pytest.approx(state.finished_at - state.arrival, rel=0.01)
    assert told["chapters"][0]["at_s"] == 0.0


def test_without_a_request_the_slowest_are_listed_and_where_time_went(hotswap, recording):
    code, output, errors = hotswap("explain", recording.path, "--slowest", "3")
    assert (code, errors) == (0, "")
    head, _, table = output.partition("the slowest:\n")
    assert "30 requests; where their time went:" in head and "held, summed over requests" in head
    listed = [line.split()[0] for line in table.splitlines()[1:]]
    latencies = {id: state.finished_at - state.arrival for id, state in recording.witness.ended.items()}
    assert listed == sorted(latencies, key=latencies.get, reverse=True)[:3]
    code, output, _ = hotswap("explain", recording.path, "--json")
    assert code == 0 and len(json.loads(output)["requests"]) == 30


def test_an_unknown_request_names_those_near_to_it(hotswap, recording):
    code, _, errors = hotswap("explain", recording.path, "--request", "r200")
    assert code == 2
    assert "no request 'r200' among the 30 of the log. Near to it: r20" in errors


def test_the_id_that_a_client_sees_stands_for_all_its_choices(hotswap, record):
    recording = record()
    for number in range(2):
        recording.rig.add(f"cmpl-7-{number}", [1, 2, 3], 4)
    recording.rig.run()
    recording.stop()
    code, output, _ = hotswap("explain", recording.path, "--request", "cmpl-7")
    assert code == 0
    assert "request cmpl-7-0: " in output and "request cmpl-7-1: " in output


def test_a_timeline_is_written_and_named(hotswap, recording, tmp_path):
    code, output, errors = hotswap("explain", recording.path, "--perfetto", tmp_path / "out.json")
    assert (code, output) == (0, "")
    assert "open it in ui.perfetto.dev" in errors
    assert json.loads((tmp_path / "out.json").read_text())["traceEvents"]


def test_two_replicas_are_told_apart(hotswap, record, tmp_path):
    for number in ("0", "1"):
        recording = record("log.jsonl", replica=number)
        recording.rig.add(f"only{number}", [1, 2, 3], 4)
        recording.rig.run()
        recording.live.observers.notify("hotswap_engine_stopped", time=recording.rig.clock.now())
    code, output, _ = hotswap("explain", tmp_path / "log.jsonl", "--request", "only1")
    assert code == 0 and "request only1 in engine 1: " in output
    code, output, _ = hotswap("replay", tmp_path / "log.jsonl")
    assert code == 0
    assert output == ("engine 0: 5 steps of 1 request: every decision is the same\n"
                      "engine 1: 5 steps of 1 request: every decision is the same\n")


def test_replay_says_that_all_is_the_same_or_shows_both_plans_of_the_first_step_that_differs(hotswap, recording):
    code, output, _ = hotswap("replay", recording.path)
    assert (code, output) == (0, f"{recording.rig.loop.steps} steps of 30 requests: every decision is the same\n")
    text = recording.path.read_text()
    recording.path.write_text(text.replace('"use":"hotswap:chunked"', '"use":"hotswap:static"'))
    code, output, _ = hotswap("replay", recording.path)
    assert code == 1
    assert "another plan is made for step" in output and "    logged    " in output and "    replayed  " in output
    code, output, _ = hotswap("replay", recording.path, "--json")
    [told] = json.loads(output)
    assert code == 1 and told["equal"] is False and told["divergence"]["logged"] != told["divergence"]["replayed"]


def test_bad_input_ends_with_a_sentence_and_exit_code_2(hotswap, recording, tmp_path):
    (tmp_path / "other.jsonl").write_text("hello\n")
    for arguments, message in (
        (["explain", tmp_path / "other.jsonl"], "is no decision log"),
        (["replay", tmp_path / "other.jsonl"], "is no decision log"),
        (["replay", tmp_path / "none.jsonl"], "there is no file"),
        (["explain", recording.path, "--perfetto", tmp_path / "no" / "out.json"], "cannot be written"),
        (["explain", recording.path, "--perfetto", recording.path], "is the log that is read"),
    ):
        code, _, errors = hotswap(*arguments)
        assert code == 2 and message in errors
    assert hotswap("replay", recording.path)[0] == 0, "the log is whole still"


def test_a_cut_log_is_told_and_said_to_be_cut(hotswap, recording):
    text = recording.path.read_text()
    recording.path.write_text(text[: len(text) * 2 // 3])
    code, output, errors = hotswap("explain", recording.path)
    assert code == 2 and "without an end" in output and "the line is cut; what is before it is told" in errors
    code, output, _ = hotswap("replay", recording.path)
    assert code == 2 and "every decision is the same" in output and "the line is cut" in output


def test_explaining_needs_neither_torch_nor_a_part_of_the_engine(recording):
    code = ("import sys\nfrom hotswap.server.cli import main\n"
            f"main(['explain', {str(recording.path)!r}, '--request', 'r20'], standalone_mode=False)\n"
            "heavy = [name for name in ('torch', 'transformers', 'numpy', 'hotswap.core.engine.loop',"
            " 'hotswap.plugins') if name in sys.modules]\nassert not heavy, heavy\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "request r20" in done.stdout

