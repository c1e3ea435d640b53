"""A log written while serving is enough to make the same decisions again, without the model and the prompts."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.engine.context import Limits
from hotswap.core.interfaces.kvcache import CacheConstraints, CacheSpec
from hotswap.core.live import LiveComponents
from hotswap.core.testing.replay import Replay, read_log
from hotswap.core.testing.rig import build, make_rig, random_prompt


def record(
    path: Path, *, tokens: bool = False, depth: int = 2, lookahead: int = 2, seed: int = 3,
) -> list[dict[str, Any]]:
    live = LiveComponents()
    live.add(build("observer", "decision_log", path=str(path), tokens=tokens, page_size=4))
    rig = make_rig("chunked", "prefix", num_pages=1 + 33, page_size=4, depth=depth, lookahead=lookahead, max_running=6,
                   max_batch_tokens=24, seed=seed, observers=live.observers)
    rig.start_observers()
    rng, shared = random.Random(seed), [7] * 13
    for turn in range(80):
        if turn % 2 == 0:
            prompt = random_prompt(rng, 30, shared)
            rig.add(f"r{turn}", prompt, rng.randrange(10, 60),
                    eos_token_ids=frozenset([5] if turn % 8 == 0 else []), priority=rng.randrange(2))
        if turn in (23, 57):
            rig.loop.abort(f"r{turn - 1}")
        rig.loop.turn()
        rig.clock.advance(0.0017)
    rig.run()
    live.observers.notify("hotswap_engine_stopped", time=rig.clock.now())
    assert live.observers.failures == 0
    return read_log(path)


def replay(events: list[dict[str, Any]], scheduler: str = "chunked", depth: int = 2, lookahead: int = 2) -> Any:
    kv = build("kvcache", "prefix")
    kv.configure([CacheSpec("full", (0,), 1, 1, 1)], 0, CacheConstraints(128, 6, page_size=4, num_pages=1 + 33))
    return Replay(events, build("scheduler", scheduler), kv, Limits(24, 6, 128, lookahead), depth, True).run()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("tokens", [False, True])
def test_a_replayed_log_gives_the_same_plans(tmp_path: Path, tokens: bool, seed: int) -> None:
    events = record(tmp_path / "log.jsonl", tokens=tokens, seed=seed)
    steps = [event for event in events if event["event"] == "step"]
    assert any(step["suspensions"] for step in steps), "the log should show a shortage"
    assert any(event.get("cached_tokens") for event in events if event["event"] == "finish"), "and prefix hits"
    assert any(event["reason"] == "stop" for event in events if event["event"] == "finish")
    assert any(event["reason"] == "abort" for event in events if event["event"] == "finish")
    assert replay(events) is None


def test_another_scheduler_shows_where_it_first_differs(tmp_path: Path) -> None:
    events = record(tmp_path / "log.jsonl")
    divergence = replay(events, scheduler="static")
    assert divergence is not None
    assert divergence.logged != divergence.replayed


def test_one_sequence_numbers_all_events_and_holds_say_why(tmp_path: Path) -> None:
    events = record(tmp_path / "log.jsonl")
    assert [event["n"] for event in events] == list(range(len(events)))
    assert events[0]["event"] == "header"
    assert events[-1]["event"] == "end"
    holds = [hold for event in events if event["event"] == "step" for hold in event["holds"]]
    assert all(reason for _, reason in holds)
    assert holds


def test_prompts_cannot_be_read_from_the_log_unless_asked(tmp_path: Path) -> None:
    secret = [11, 12, 10, 9, 8, 11, 12, 10]
    for tokens in (False, True):
        path = tmp_path / f"{tokens}.jsonl"
        live = LiveComponents()
        live.add(build("observer", "decision_log", path=str(path), tokens=tokens, page_size=4))
        rig = make_rig(observers=live.observers)
        rig.start_observers()
        rig.add("r", secret, 3)
        rig.run()
        live.observers.notify("hotswap_engine_stopped", time=1.0)
        text = path.read_text()
        assert (json.dumps(secret, separators=(",", ":"))[1:-1] in text) is tokens
