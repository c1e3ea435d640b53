"""Reading logs: cut lines, missing lines, rotated files, replicas, and what is no log."""

import json

import pytest

from hotswap.core.errors import ConfigError
from hotswap.lab.decisions.lives import lives
from hotswap.lab.decisions.log import FIELDS, open_logs


@pytest.fixture
def lines(record):
    """The lines of a log, and where it lies."""
    recording = record()
    recording.traffic(30).stop()
    return recording.path, recording.path.read_text().splitlines(keepends=True)


def refusal(paths):
    with pytest.raises(ConfigError) as caught:
        for log in open_logs(paths):
            list(log.events())
    return str(caught.value)


def test_a_log_cut_in_the_middle_of_a_line_is_read_up_to_there_and_says_so(lines):
    path, whole = lines
    for count in (2, len(whole) // 2, len(whole) - 1):
        path.write_text("".join(whole[:count]) + whole[count][: len(whole[count]) // 2])
        [log] = open_logs([path])
        assert len(list(log.events())) == count
        assert log.notes() == [f"{path}:{count + 1}: the line is cut; what is before it is told"]


def test_a_log_without_an_end_says_that_the_engine_runs_or_was_killed(lines):
    path, whole = lines
    path.write_text("".join(whole[:-1]))
    [log] = open_logs([path])
    assert len(list(log.events())) == len(whole) - 1
    assert log.notes() == [f"{path} has no end: the engine runs still, or was killed"]


def test_requests_without_an_end_are_told_as_far_as_the_log_goes(lines):
    path, whole = lines
    path.write_text("".join(whole[: len(whole) // 2]))
    [log] = open_logs([path])
    found = list(lives(log))
    open_ones = [life for life in found if life.ended is None]
    last = json.loads(whole[len(whole) // 2 - 1])["t"]
    assert open_ones
    assert all(life.arrived + life.latency == pytest.approx(last) for life in open_ones)


def test_a_damaged_line_and_a_missing_one_are_told_with_their_number(lines):
    path, whole = lines
    path.write_text("".join([*whole[:5], "{\n", *whole[5:]]))
    assert refusal([path]) == f"{path}:6: is no event of a decision log: '{{'."
    path.write_text("".join([*whole[:5], *whole[6:]]))
    assert f"{path}:6: event 6 follows event 4: lines are missing" in refusal([path])


@pytest.mark.parametrize("name", ["header", "arrival", "step", "verdict", "finish"])
def test_an_event_that_lacks_what_is_read_of_it_is_told_with_its_line(lines, name):
    path, whole = lines
    number, event = next((n, event) for n, event in enumerate(map(json.loads, whole)) if event["event"] == name)
    for field in FIELDS[name]:
        rest = {key: value for key, value in event.items() if key != field}
        path.write_text("".join([*whole[:number], json.dumps(rest) + "\n", *whole[number + 1:]]))
        assert f"lacks its '{field}'" in (found := refusal([path])) and (str(path) in found)


def test_a_rotated_log_is_read_in_order(lines, tmp_path):
    path, whole = lines
    first, second = tmp_path / "old.jsonl", tmp_path / "new.jsonl"
    first.write_text("".join(whole[:40]))
    second.write_text("".join(whole[40:]))
    [log] = open_logs([first, second])
    assert [event["n"] for event in log.events()] == list(range(len(whole)))
    assert log.notes() == []
    assert refusal([second]) == f"{second} begins with event 40: give the file with the beginning before it."
    second.write_text("".join(whole[50:]))
    assert f"{second}:1: event 50 follows event 39" in refusal([first, second])


def test_a_path_that_does_not_exist_stands_for_the_logs_of_its_replicas(record, tmp_path):
    for number in ("0", "1"):
        record("log.jsonl", replica=number).traffic(10).live.observers.notify("hotswap_engine_stopped", time=9.0)
    logs = open_logs([tmp_path / "log.jsonl"])
    assert [(log.replica, log.paths) for log in logs] == [
        ("0", (tmp_path / "log.0.jsonl",)), ("1", (tmp_path / "log.1.jsonl",))]


@pytest.mark.parametrize(("text", "message"), [
    ("", "is no decision log: its first line is no event. The observer decision_log writes one."),
    ("hello\n", "is no decision log"),
    ('{"a": 1}\n', "is no decision log"),
    ('{"n": 0, "t": 0, "event": "header", "format": 1}\n', "has format 1, and this hotswap reads format 2."),
])
def test_what_is_no_log_is_refused(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    assert message in refusal([path])


def test_a_file_that_does_not_exist_is_named(tmp_path):
    assert refusal([tmp_path / "none.jsonl"]) == f"there is no file {tmp_path / 'none.jsonl'}."
