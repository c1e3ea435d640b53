"""Requests that share their parent's prompt (n > 1): computed once, its last partial page copied, the rest shared."""

from pathlib import Path
from typing import Any

import pytest

from hotswap.core.engine.context import Limits
from hotswap.core.interfaces.kvcache import CacheConstraints, CacheSpec
from hotswap.core.interfaces.scheduler import Answer
from hotswap.core.live import LiveComponents
from hotswap.core.request import Request
from hotswap.core.testing.replay import Replay, read_log
from hotswap.core.testing.rig import Rig, build, finish, make_rig

PROMPT = [(7 * i) % 13 for i in range(100)]
FORKING = ["paged", "prefix", "radix"]


def rig_of(kv: str = "paged", scheduler: Any = "chunked", **settings: Any) -> Rig:
    return make_rig(scheduler, kv, **{
        "num_pages": 1 + 200, "page_size": 8, "max_batch_tokens": 40, "max_model_len": 200, **settings})


def family(rig: Rig, n: int, prompt: list[int] = PROMPT, max_tokens: int = 20, **fields: Any) -> list[Request]:
    return [rig.add(f"c{i}", prompt, max_tokens, seed=i, fork_of="c0" if i else None, **fields) for i in range(n)]


def computed(rig: Rig) -> int:
    """Tokens that all rows have computed."""
    return sum(row.n_tokens for message in rig.executor.messages for row in message.rows)


def copies(rig: Rig) -> int:
    return sum(len(change.copies) for message in rig.executor.messages for _, grant in message.grants
               for change in grant.groups.values())


def resumed(rig: Rig) -> dict[str, int]:
    return {resume.request: resume.computed for message in rig.executor.messages for resume in message.resumes}


@pytest.mark.parametrize("kv", FORKING)
@pytest.mark.parametrize(("depth", "lookahead"), [(1, 0), (2, 0), (2, 3)])
def test_a_prompt_is_computed_once_for_all(kv: str, depth: int, lookahead: int) -> None:
    rig = rig_of(kv, depth=depth, lookahead=lookahead)
    requests = family(rig, 4)
    most_held = 0
    while rig.loop.pool.states:
        rig.loop.turn()
        most_held = max(most_held, rig.loop.parts.kv.usage().held)
    finish(rig, requests)
    if not lookahead:
        assert computed(rig) == 100 + 3 + 4 * 19, "the prompt, its last token for each child, and the outputs"
    assert resumed(rig) == {"c0": 0, "c1": 99, "c2": 99, "c3": 99}
    assert copies(rig) == 3, "the last page of the prompt is not full"
    assert most_held <= 12 + 4 * (1 + -(-(24 + lookahead) // 8)), "twelve full pages, held together"
    assert len({tuple(rig.client.tokens(request.id)) for request in requests}) == 4, "each goes its own way"


def test_at_the_end_of_a_page_nothing_is_copied() -> None:
    rig = rig_of()
    finish(rig, family(rig, 3, PROMPT[:33]))
    assert (copies(rig), computed(rig)) == (0, 33 + 2 + 3 * 19)


@pytest.mark.parametrize("kv", FORKING)
def test_what_a_speculator_must_see_again_is_computed_again(kv: str) -> None:
    rig = rig_of(kv)
    limits = rig.loop.limits
    rig.loop.lifecycle.limits = Limits(
        limits.max_batch_tokens, limits.max_running, limits.max_model_len, 0, reuse_tail=5)
    requests = family(rig, 3)
    finish(rig, requests)
    assert resumed(rig) == {"c0": 0, "c1": 94, "c2": 94}


def test_children_that_wait_for_their_parent_hold_up_nobody() -> None:
    rig = rig_of(max_batch_tokens=16)
    requests = [*family(rig, 4), rig.add("behind", [1, 2, 3], 2)]
    while not rig.client.endings("behind"):
        rig.loop.turn()
    assert not rig.client.tokens("c0"), "the prompt of 100 tokens takes many steps of 16"
    finish(rig, requests)
    assert computed(rig) == 100 + 3 + 4 * 19 + 3 + 1


@pytest.mark.parametrize("turns", range(14))
@pytest.mark.parametrize("kv", FORKING)
def test_a_parent_that_is_aborted_leaves_children_that_are_served(kv: str, turns: int) -> None:
    rig = rig_of(kv, depth=2, max_batch_tokens=24, max_running=2)
    requests = family(rig, 4)
    for _ in range(turns):
        rig.loop.turn()
    rig.loop.abort("c0")
    finish(rig, requests[1:])
    assert rig.client.endings("c0") == ["abort"]


@pytest.mark.parametrize("turns", range(10))
def test_children_are_aborted_in_every_state(turns: int) -> None:
    rig = rig_of("prefix", depth=2, max_batch_tokens=24)
    requests = family(rig, 4)
    for _ in range(turns):
        rig.loop.turn()
    rig.loop.abort("c1")
    rig.loop.abort("c3")
    finish(rig, requests[::2])
    assert rig.client.endings("c1") == rig.client.endings("c3") == ["abort"]


def test_a_parent_that_ends_with_its_first_token_leaves_children_that_are_served() -> None:
    for kv in FORKING:
        rig = rig_of(kv)
        finish(rig, family(rig, 3, max_tokens=1))


def test_a_parent_that_is_suspended_lets_its_children_go() -> None:
    """Another request's output needs the pages while the prompt is being computed."""
    rig = rig_of("paged", build("scheduler", "chunked", policy="priority"), num_pages=1 + 25, max_batch_tokens=64)
    requests = [rig.add("better", [1] * 60, 40, priority=0)]
    rig.loop.turn()
    rig.loop.lifecycle.limits = Limits(8, 8, 200)
    requests += family(rig, 3, [*PROMPT, *PROMPT[:30]], priority=5)
    parent = rig.loop.pool.states["c0"]
    assert [child.id for child in parent.held] == ["c1", "c2"]
    while not parent.preemptions:
        assert parent.verified < 129
        rig.loop.turn()
    assert not parent.held
    finish(rig, requests)


@pytest.mark.parametrize("kv", FORKING)
def test_forks_under_shortage_with_suspensions_and_lost_plans(kv: str) -> None:
    chunked = build("scheduler", "chunked")
    rig = rig_of(kv, chunked, num_pages=1 + 30, depth=2, lookahead=2)
    plan, lost, forks_lost = chunked.plan, [0], [0]

    def sometimes_lost(ctx: Any) -> Any:
        made = plan(ctx)
        forks = sum(bool(change.copies) for _, grant in ctx.message.grants for change in grant.groups.values())
        if (forks or lost[0] % 7 == 6) and not rig.loop.failed_plans:
            lost[0] += 1
            forks_lost[0] += forks
            raise RuntimeError("planted")
        lost[0] += 1
        return made

    chunked.plan = sometimes_lost
    requests = family(rig, 5, max_tokens=60)
    states = list(rig.loop.pool.states.values())
    finish(rig, requests)
    assert forks_lost[0] and copies(rig), "a plan with a fork was lost, and made again"
    assert any(state.preemptions for state in states)


def test_a_parent_whose_window_has_moved_on_is_not_forked_from() -> None:
    """Slots for one request only: the children start when the parent has ended or far beyond its prompt."""
    rig = rig_of("paged", windows={"full": None, "window": 5}, max_running=2)
    requests = [rig.add("first", [3] * 10, 40), *family(rig, 3, max_tokens=60)]
    finish(rig, requests)
    assert resumed(rig)["c1"] == 0, "its pages of the window were gone when a slot came free"


@pytest.mark.parametrize("windows", [{"full": None, "window": 6}, {"window": 6}])
def test_a_group_with_a_window_forks_too(windows: dict[str, int | None]) -> None:
    rig = rig_of("prefix", windows=windows)
    finish(rig, family(rig, 4))
    assert resumed(rig) == {"c0": 0, "c1": 99, "c2": 99, "c3": 99}
    assert copies(rig) == 3 * len(windows)


@pytest.mark.parametrize(("scheduler", "kv"), [("static", "paged"), ("chunked", "contiguous")])
def test_where_forks_cannot_be_n_requests_run_as_any_others(scheduler: str, kv: str) -> None:
    rig = rig_of(kv, scheduler, num_pages=1 + 4 * 25)
    requests = family(rig, 4)
    rig.loop.turn()
    rig.loop.turn()
    assert len(rig.loop.pool.running) == 4
    finish(rig, requests)
    assert computed(rig) == 4 * 119


@pytest.mark.parametrize("different", [
    {"prompt": [*PROMPT[:-1], 5]}, {"sampling": {"prompt_logprobs": 0}}, {"fork_of": "nobody"}, {"prompt": [1]},
])
def test_a_request_that_cannot_share_is_not_held(different: dict[str, Any]) -> None:
    rig = rig_of()
    parent = rig.add("c0", different.get("prompt", PROMPT)[:1] if different.get("prompt") == [1] else PROMPT, 5)
    fields = {"fork_of": "c0", **different}
    child = rig.add("c1", fields.pop("prompt", PROMPT), 5, **fields)
    assert not rig.loop.pool.states["c0"].held and rig.loop.pool.states["c1"].parent is None
    finish(rig, [parent, child])


def test_a_log_with_forks_is_replayed(tmp_path: Path) -> None:
    live = LiveComponents()
    live.add(build("observer", "decision_log", path=str(tmp_path / "log.jsonl"), page_size=8))
    rig = rig_of("prefix", depth=2, lookahead=2, num_pages=1 + 40, observers=live.observers)
    rig.start_observers()
    for call in range(4):
        for i in range(3):
            rig.add(f"{call}-{i}", PROMPT[call:60 + call], 40, seed=i, fork_of=f"{call}-0" if i else None)
        for _ in range(9):
            rig.loop.turn()
            rig.clock.advance(0.001)
    rig.run()
    live.observers.notify("hotswap_engine_stopped", time=rig.clock.now())
    assert copies(rig) >= 4
    kv = build("kvcache", "prefix")
    kv.configure([CacheSpec("full", (0,), 1, 1, 1)], 0, CacheConstraints(200, 8, page_size=8, num_pages=1 + 40))
    events = read_log(tmp_path / "log.jsonl")
    again, forks = Replay(events, build("scheduler", "chunked"), kv, Limits(40, 8, 200, 2), 2, True), []
    fork = kv.fork
    kv.fork = lambda *arguments: forks.append(fork(*arguments)) or forks[-1]
    assert again.run() is None
    assert sum(len(change.copies) for grant in forks if not isinstance(grant, Answer)
               for change in grant.groups.values()) == copies(rig)
