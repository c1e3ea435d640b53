"""The timeline holds to the Trace Event Format, and says what the log says."""

import json
from collections import defaultdict

import pytest

from hotswap.core.errors import ConfigError
from hotswap.lab.decisions.lives import lives
from hotswap.lab.decisions.perfetto import REQUESTS, write


def check_format(document):
    """What the Trace Event Format asks of the phases that are used: X, i, C and M."""
    assert document.keys() <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices = defaultdict(list)
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str) and event["name"]
        assert type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        assert isinstance(event["args"], dict)
        match event["ph"]:
            case "X":
                assert isinstance(event["dur"], (int, float)) and event["dur"] >= 0
                slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] in ("g", "p", "t")
            case "C":
                assert event["args"] and all(isinstance(value, (int, float)) for value in event["args"].values())
            case "M":
                wanted = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
                assert event["args"].keys() == {wanted[event["name"]]}
            case phase:
                raise AssertionError(f"phase {phase!r} is not one of those that are used")
    for found in slices.values():  # slices of one track lie side by side or within one another
        found.sort()
        for (_, end), (begin, _) in zip(found, found[1:], strict=False):
            assert begin >= end - 0.01, "two slices of a track overlap"


@pytest.fixture
def timeline(tmp_path):
    def make(*logs):
        count = write(logs, tmp_path / "out.json")
        document = json.loads((tmp_path / "out.json").read_text())
        assert len(document["traceEvents"]) == count
        check_format(document)
        return document["traceEvents"]

    return make


@pytest.mark.parametrize("depth", [1, 2])
def test_every_request_has_a_track_with_its_phases(record, timeline, depth):
    log = record(depth=depth, lookahead=2).traffic(forks=True, resets=True).stop()
    events, found = timeline(log), list(lives(log))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(name for track, name in names.items() if track >= REQUESTS) == sorted(life.id for life in found)
    begin = log.header["t"]
    for life in found:
        own = [event for event in events if event["ph"] == "X" and names[event["tid"]] == life.id]
        assert [event["name"] for event in own] == [span.phase.value for span in life.spans]
        assert sum(event["dur"] for event in own) == pytest.approx(1e6 * life.latency, abs=0.01)
        if own:
            assert own[0]["ts"] == pytest.approx(1e6 * (life.arrived - begin), abs=0.01)


def test_every_step_is_a_slice_with_its_rows_and_what_it_kept(record, timeline):
    recording = record(depth=2)
    events = timeline(recording.traffic().stop())
    steps = [event for event in events if event["name"].startswith("step ")]
    assert len(steps) == recording.rig.loop.steps
    assert {event["tid"] for event in steps} == {2, 3}, "two in flight, two tracks"
    kept = sum(row["kept"] for event in steps for row in event["args"]["rows"].values())
    assert kept >= sum(state.output_length for state in recording.witness.ended.values())


def test_counters_follow_requests_and_pages_and_end_at_nothing(record, timeline):
    events = timeline(record().traffic().stop())
    requests = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "requests"]
    pages = [event["args"] for event in events if event["ph"] == "C" and event["name"] == "pages"]
    assert max(args["running"] for args in requests) > 2 and max(args["waiting"] for args in requests) > 2
    assert requests[-1] == {"running": 0, "waiting": 0}
    assert {sum(args.values()) for args in pages} == {33}


def test_two_replicas_are_two_processes(record, timeline, tmp_path):
    logs = []
    for number in ("0", "1"):
        recording = record("log.jsonl", replica=number)
        recording.path = tmp_path / f"log.{number}.jsonl"
        logs.append(recording.traffic(10).stop())
    names = [event["args"]["name"] for event in timeline(*logs) if event["name"] == "process_name"]
    assert names == ["engine 0", "engine 1"]


def test_a_cut_log_gives_a_timeline_up_to_there(record, timeline):
    recording = record()
    recording.traffic().stop()
    text = recording.path.read_text()
    recording.path.write_text(text[: len(text) // 2])
    from hotswap.lab.decisions.log import open_logs

    events = timeline(*open_logs([recording.path]))
    slices = [event for event in events if event["tid"] >= REQUESTS and event["ph"] == "X"]
    assert any(event["args"]["ended"] is None for event in slices)


def test_a_file_that_cannot_be_written_is_an_error_with_its_path(record, tmp_path):
    log = record().traffic(4).stop()
    with pytest.raises(ConfigError, match=r"nowhere/out\.json cannot be written"):
        write([log], tmp_path / "nowhere" / "out.json")
