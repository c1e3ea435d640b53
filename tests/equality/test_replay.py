"""Logs of whole engines with real models: every decision comes out the same again, and time adds up."""

import threading
from pathlib import Path
from typing import Any

import pytest

from hotswap.lab.decisions.again import replay
from hotswap.lab.decisions.lives import Phase, lives
from hotswap.lab.decisions.log import open_logs

NGRAM = {"use": "ngram", "max_draft": 3}


@pytest.fixture
def logged(run: Any, tmp_path: Path) -> Any:
    """``logged(config)`` starts an engine with a log; ``logged.check(engine)`` stops it and replays the log."""
    path = tmp_path / "decisions.jsonl"

    def start(config: dict[str, Any]) -> Any:
        return run({**config, "observers": [{"use": "decision_log", "path": str(path)}]})

    def check(engine: Any) -> list[dict[str, Any]]:
        engine.built.engine.stop()
        [log] = open_logs([path])
        outcome = replay(log)
        assert outcome.equal and outcome.stopped is None and not outcome.notes, outcome
        assert outcome.steps == engine.built.engine.loop.steps > 10
        for life in lives(log):
            assert sum(life.seconds().values()) == pytest.approx(life.latency, rel=0.01)
        return list(log.events())

    start.check = check
    return start


@pytest.mark.parametrize(("scheduler", "kv", "speculator", "depth"), [
    ({"use": "chunked", "max_chunk": 7}, "prefix", NGRAM, 2), ("continuous", "radix", {"use": "none"}, 1),
    ({"use": "prefill_first", "policy": "priority"}, "paged", NGRAM, 1), ("static", "contiguous", {"use": "none"}, 2),
])
def test_an_engine_under_pressure_decides_the_same_again(logged, tiny, scheduler, kv, speculator, depth):
    engine = logged(tiny.config(scheduler, kv, speculator, depth))
    prompts = tiny.prompts() * 2
    for round in range(2):
        engine.generate(prompts, 20, abort={2: 3, 9: 5}, priorities=[n % 3 for n in range(len(prompts))])
        if round == 0:
            engine.built.engine.reset()
    events = logged.check(engine)
    kinds = {event["event"] for event in events}
    assert {"arrival", "step", "verdict", "finish", "reset", "end"} <= kinds
    assert {event["reason"] for event in events if event["event"] == "finish"} == {"length", "abort"}
    if kv not in ("contiguous",):
        assert any(event["suspensions"] for event in events if event["event"] == "step")


def test_a_draft_model_whose_cache_lags_is_replayed(logged, tiny):
    engine = logged(tiny.config("chunked", "prefix", {"use": "draft", "model": str(tiny.path), "max_draft": 3}, 2))
    engine.generate(tiny.prompts(), 24)
    events = logged.check(engine)
    assert any(row[6] for event in events if event["event"] == "verdict" for row in event["rows"]), "no row lagged"
    assert engine.seen["accepted"]


def test_two_cache_groups_are_replayed(logged, windowed):
    engine = logged(windowed.config("chunked", "radix", NGRAM, 2))
    engine.generate(windowed.prompts(), 24)
    events = logged.check(engine)
    assert len(events[0]["engine"]["groups"]) == 2


def test_swaps_to_host_memory_are_replayed(logged, tiny):
    engine = logged(tiny.config(
        "chunked", "prefix", {"use": "none"}, 2, kv_transfer={"use": "host", "memory": "4MiB", "swap_overhead": 1}))
    engine.generate(tiny.prompts() * 2, 24)
    events = logged.check(engine)
    assert any(mode == "swap" for event in events if event["event"] == "step" for _, mode, _ in event["suspensions"])


def test_stop_strings_and_stop_tokens_end_requests_in_the_same_steps_again(logged, tiny):
    engine = logged(tiny.config("chunked", "prefix", NGRAM, 2))
    prompts = tiny.prompts()
    plain = engine.generate(prompts, 16)
    stops = [output[7] for output in plain]
    engine.answer(*({"prompt": prompt, "max_tokens": 16, "stop_token_ids": [stop]}
                    for prompt, stop in zip(prompts, stops, strict=True)))
    events = logged.check(engine)
    assert "stop" in {event["reason"] for event in events if event["event"] == "finish"}


def test_exchanges_while_requests_run_are_replayed(logged, tiny):
    """Scheduler, order, KV manager with hand-over and without, attention, speculator: the log has it all."""
    engine, prompts = logged(tiny.config("chunked", "prefix", {"use": "none"}, 2)), tiny.prompts() * 2
    done: list[Any] = []

    def exchange() -> None:
        for sets in (["scheduler=continuous"], ["scheduler.policy=shortest_first"], ["kvcache=radix"],
                     ["attention={use: composite, prefill: torch, decode: torch}"], ["speculator={use: ngram}"],
                     ["kvcache.num_blocks=60"], ["kvcache=paged", "scheduler=chunked"]):
            done.extend(engine.built.exchange(sets))

    thread = threading.Thread(target=exchange)
    thread.start()
    while thread.is_alive():
        engine.generate(prompts, 24)
    thread.join()
    assert len(done) == 7
    events = logged.check(engine)
    switches = [event for event in events if event["event"] == "switch"]
    assert len(switches) == 7
    assert any(report.effect.handed_over for report in done) and any(report.effect.recomputed for report in done)
    recomputed = [life for log in open_logs([Path(engine.built.resolved.config.observers[0].options["path"])])
                  for life in lives(log) if life.seconds()[Phase.PREEMPTED]]
    assert recomputed
