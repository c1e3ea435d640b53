"""Logs of engines on the fake device, with a shortage of pages, prefix hits, drafts, stops and aborts."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.live import LiveComponents
from hotswap.core.testing.rig import Rig, build, make_rig, random_prompt
from hotswap.lab.decisions.again import replay
from hotswap.lab.decisions.log import Log, open_logs


class Witness(Observer):
    """Keeps each request's state when it ends: what the engine itself says of its times."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: dict[str, Any] = {}

    @hookimpl
    def hotswap_request_finished(self, request: Any) -> None:
        self.ended[request.id] = request


class Recording:
    """An engine whose decisions are logged."""

    def __init__(self, path: Path, replica: str = "", log: dict[str, Any] | None = None, config: Any = None,
                 **rig: Any) -> None:
        self.live, self.witness, self.path = LiveComponents(), Witness(), path
        self.live.add(build("observer", "decision_log", path=str(path), **(log or {})))
        self.live.add(self.witness)
        settings = {"num_pages": 1 + 33, "page_size": 4, "max_running": 6, "max_batch_tokens": 24}
        self.rig: Rig = make_rig(observers=self.live.observers, **{**settings, **rig})
        self.rig.start_observers(config, replica)

    def traffic(
        self, turns: int = 60, seed: int = 3, forks: bool = False, resets: bool = False, few_prompts: bool = False,
    ) -> "Recording":
        rng, rig, shared = random.Random(seed), self.rig, [7] * 13
        few = [shared + [rng.randrange(13) for _ in range(20)] for _ in range(8)]
        for turn in range(turns):
            if turn % 2 == 0:
                prompt = rng.choice(few) if few_prompts else random_prompt(rng, 30, shared)
                rig.add(f"r{turn}", prompt, rng.randrange(5, 40),
                        eos_token_ids=frozenset([5] if turn % 8 == 0 else []), priority=rng.randrange(3),
                        tenant=rng.choice(["", "a", "b"]))
            if forks and turn % 10 == 4:
                prompt = random_prompt(rng, 30, shared)
                for number in range(3):
                    rig.add(f"f{turn}-{number}", prompt, 12, seed=number, fork_of=f"f{turn}-0" if number else None)
            if turn in (23, 45):
                rig.loop.abort(f"r{turn - 1}")
            if resets and turn == 30:
                self.live.observers.notify("hotswap_cache_reset", time=rig.clock.now())
                rig.loop.parts.kv.reset()
                rig.loop.transfers.reset()
            rig.loop.turn()
            rig.clock.advance(0.0017)
        rig.run()
        return self

    def stop(self, replays: bool = True) -> Log:
        """Its log, whatever a test then makes of it. ``replays`` False: the test itself says what a replay comes to."""
        self.live.observers.notify("hotswap_engine_stopped", time=self.rig.clock.now())
        assert self.live.observers.failures == 0, self.live.observers.silenced
        for log in open_logs([self.path]) if replays else ():
            outcome = replay(log)
            assert outcome.equal, outcome
        [log] = open_logs([self.path])
        return log


@pytest.fixture
def record(tmp_path: Path) -> Iterator[Callable[..., Recording]]:
    """``record(**of make_rig)`` starts an engine; ``name`` is its log's."""
    def start(name: str = "decisions.jsonl", **settings: Any) -> Recording:
        return Recording(tmp_path / name, **settings)

    yield start
