"""Who is served when: orders, fairness between long and short prompts, shortage."""

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView
from hotswap.core.testing.rig import Rig, assert_clean, expected, make_rig
from hotswap.plugins.schedulers.chunked import ChunkedScheduler


def finish_order(rig: Rig) -> list[str]:
    order: list[str] = []
    original = rig.client.sink

    def sink(output):  # type: ignore[no-untyped-def]
        original(output)
        if output.finish_reason:
            order.append(output.request_id)

    rig.client.sink = sink  # type: ignore[method-assign]
    return order


def scheduler(use: str = "chunked", **options):  # type: ignore[no-untyped-def]
    from hotswap.core.testing.rig import build

    return build("scheduler", use, **options)


def test_smaller_priority_is_sooner() -> None:
    rig = make_rig(scheduler(policy="priority"), max_running=1)
    order = finish_order(rig)
    rig.add("running", [1], 5, priority=0)
    rig.loop.turn()
    rig.add("ten", [2], 5, priority=10)
    rig.add("zero", [3], 5, priority=0)
    rig.run()
    assert order == ["running", "zero", "ten"]


def test_a_better_priority_takes_the_place_of_a_worse_one_and_the_rest_keeps_its_order() -> None:
    """Low, low, high in a pool for one: high finishes first, then the two by arrival."""
    rig = make_rig(scheduler(policy="priority"), num_pages=1 + 32, page_size=4, max_model_len=128)
    order = finish_order(rig)
    requests = [rig.add("low1", [1] * 60, 50, priority=5)]
    rig.loop.turn()
    requests.append(rig.add("low2", [2] * 60, 50, priority=5))
    requests.append(rig.add("high", [3] * 60, 50, priority=1))
    rig.run()
    assert order == ["high", "low1", "low2"]
    assert all(rig.client.tokens(request.id) == expected(request) for request in requests)
    assert_clean(rig)


def test_fcfs_never_suspends_for_a_newcomer() -> None:
    rig = make_rig("chunked", num_pages=1 + 32, page_size=4)
    order = finish_order(rig)
    rig.add("first", [1] * 60, 50)
    rig.loop.turn()
    rig.add("second", [2] * 100, 20)
    rig.run()
    assert order == ["first", "second"]
    assert not any(message.suspensions for message in rig.executor.messages)


def test_growth_suspends_no_more_than_needed_and_does_not_thrash() -> None:
    """Two requests of 60 + 60 tokens, room for 156: one suspension, and few more steps than one after the other."""
    rig = make_rig("chunked", num_pages=1 + 39, page_size=4, max_batch_tokens=128)
    requests = [rig.add(f"r{i}", [i + 1] * 60, 60) for i in range(2)]
    states = list(rig.loop.pool.states.values())
    rig.run()
    assert [state.preemptions for state in states] == [0, 1]
    assert len(rig.executor.messages) <= 3 * 2 * 61
    assert all(rig.client.tokens(request.id) == expected(request) for request in requests)


def test_a_fence_does_not_start_a_cascade_of_suspensions() -> None:
    """Pages of a victim in flight come back only with its fence; until then the plan waits rather than suspend more."""
    rig = make_rig("chunked", "paged", num_pages=1 + 36, page_size=4, depth=2, max_running=6)
    requests = [rig.add(f"r{i}", [i + 1] * 20, 30) for i in range(6)]
    rig.run()
    worst = max(len(message.suspensions) for message in rig.executor.messages)
    assert worst == 1, "one victim makes enough room for one row"
    assert all(rig.client.tokens(request.id) == expected(request) for request in requests)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    rig = make_rig("chunked", num_pages=1 + 200, max_model_len=700, max_batch_tokens=16)
    rig.add("long", [i % 13 for i in range(600)], 2)
    rig.loop.turn()
    rig.add("short", [1, 2, 3], 1)
    for _ in range(1, 5):
        rig.loop.turn()
        if rig.client.endings("short"):
            break
    assert rig.client.endings("short"), "a prompt of 3 tokens has waited for more than 4 steps"
    assert not rig.client.tokens("long")
    rig.run()


def test_decodes_are_in_every_step_beside_a_long_prompt() -> None:
    rig = make_rig("chunked", num_pages=1 + 200, max_model_len=700, max_batch_tokens=16)
    rig.add("decode", [1], 50)
    rig.loop.turn()
    rig.add("long", [i % 13 for i in range(300)], 2)
    rig.run()
    prompt_steps = [m for m in rig.executor.messages if any(r.request == "long" and r.n_tokens > 1 for r in m.rows)]
    assert len(prompt_steps) >= 300 // 16
    assert all(any(row.request == "decode" for row in message.rows) for message in prompt_steps)


def test_a_large_max_tokens_reserves_nothing_in_advance() -> None:
    rig = make_rig("chunked", num_pages=1 + 32, page_size=4, max_model_len=128)
    order = finish_order(rig)
    rig.add("wide", [1] * 20, 105)
    rig.loop.turn()
    rig.add("small", [2] * 20, 5)
    rig.run()
    assert order[0] == "small"


def test_static_waits_for_the_whole_batch() -> None:
    rig = make_rig("static", max_running=2)
    order = finish_order(rig)
    for name, length in [("a", 20), ("b", 2), ("c", 2)]:
        rig.add(name, [1, 2], length)
    rig.run()
    assert order == ["b", "a", "c"], "c must wait until a has ended, although b's place is free"


def test_continuous_fills_a_free_place_at_once() -> None:
    rig = make_rig("continuous", max_running=2)
    order = finish_order(rig)
    for name, length in [("a", 20), ("b", 2), ("c", 2)]:
        rig.add(name, [1, 2], length)
    rig.run()
    assert order == ["b", "c", "a"]


def test_continuous_computes_a_prompt_whole() -> None:
    rig = make_rig("continuous", max_batch_tokens=20)
    rig.add("decode", [1], 20)
    rig.loop.turn()
    rig.add("prompt", [i % 13 for i in range(20)], 1)
    rig.run()
    rows = [row.n_tokens for m in rig.executor.messages for row in m.rows if row.request == "prompt"]
    assert rows == [20]


def test_a_step_with_decodes_has_few_prompt_tokens_where_the_config_says_so() -> None:
    rig = make_rig(scheduler(beside_decodes=6), max_batch_tokens=20)
    rig.add("first", [1] * 20, 5)
    rig.loop.turn()
    for name in ("second", "third"):
        rig.add(name, [i % 13 for i in range(20)], 1)
    rig.run()
    steps = [{row.request: row.n_tokens for row in message.rows} for message in rig.executor.messages]
    assert steps[0] == {"first": 20}, "nobody decodes beside it"
    beside = [sum(n for name, n in step.items() if name != "first") for step in steps[1:] if "first" in step]
    assert beside == [6] * 4
    assert sum(n for step in steps if "first" not in step for n in step.values()) == 40 - 24
    assert max(sum(step.values()) for step in steps if "first" not in step) > 6, "once nobody decodes, the budget holds"


def tokens_beside_a_decode(max_running: int, max_new: int) -> list[int]:
    """Of 20 prompts of 20 tokens that come while a request decodes, by step; up to 6 where there is a backlog."""
    rig = make_rig(scheduler(beside_decodes=2, beside_decodes_backlog=6), max_batch_tokens=20, max_running=max_running)
    rig.add("first", [1] * 20, max_new)
    rig.loop.turn()
    for i in range(20):
        rig.add(f"prompt {i}", [i % 5 + 2, i // 5, *([1] * 18)], 1)
    rig.run()
    steps = [{row.request: row.n_tokens for row in message.rows} for message in rig.executor.messages[1:]]
    return [sum(n for name, n in step.items() if name != "first") for step in steps if "first" in step]


def test_a_backlog_of_prompts_gets_more_of_a_step_with_decodes_and_the_last_of_them_as_little_as_ever() -> None:
    beside = tokens_beside_a_decode(max_running=12, max_new=200)
    # 11 of 20 have slots to wait for: 220 tokens, of which 32 steps would have to take 6 each.
    assert beside[0] == 6
    assert sum(beside) == 400
    assert set(beside) == {6, 5, 4, 3, 2}, "it shrinks with the backlog"
    assert set(beside[-30:]) == {2}, "what is left is none"


def test_no_more_than_asked_for_is_computed_beside_decodes_whoever_waits_without_a_slot() -> None:
    assert set(tokens_beside_a_decode(max_running=2, max_new=60)) == {2}


@pytest.mark.parametrize("least", [None, 64])
def test_what_is_computed_beside_decodes_cannot_grow_to_less_or_from_nothing(least: int | None) -> None:
    with pytest.raises(ConfigError, match=f"beside_decodes_backlog is 32.*{least or 'not set'}: set .* at most 32, or"):
        scheduler(beside_decodes=least, beside_decodes_backlog=32)


@pytest.mark.parametrize("use", ["static", "continuous", "chunked"])
def test_eight_equal_decodes_run_as_four_rows_in_two_steps_in_flight_when_unchained(use: str) -> None:
    rig = make_rig(use, depth=2, chained=False, num_pages=1 + 200)
    for i in range(8):
        rig.add(f"r{i}", [i + 1] * 4, 30)
    rig.run()
    rows = [len(message.rows) for message in rig.executor.messages[4:20]]
    if use != "static":
        assert rows == [4] * len(rows)
    assert rig.loop.max_depth_seen == 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gate_keeps_back_one_request_and_not_those_behind_it(dynamic: bool) -> None:
    class Gated(QueuePolicy):
        def key(self, view: RequestView, now: float) -> tuple[int]:
            return (view.sequence,)

        def gate(self, view: RequestView, now: float) -> str | None:
            return "too early" if view.tenant == "late" and now < 1.0 else None

        def next_wakeup(self) -> float | None:
            return 1.0

    Gated.dynamic = dynamic
    rig = make_rig(ChunkedScheduler(None, {"policy": Gated()}))
    order = finish_order(rig)
    rig.add("kept back", [1], 3, tenant="late")
    rig.add("behind", [2], 3)
    for _ in range(20):
        rig.loop.turn()
    assert order == ["behind"]
    assert rig.loop.next_wakeup() == 1.0
    rig.clock.advance(1.0)
    rig.run()
    assert order == ["behind", "kept back"]


def test_requests_that_give_up_behind_a_blocked_head_leave_nothing_behind() -> None:
    chunked = scheduler()
    rig = make_rig(chunked, max_running=1)
    rig.add("running", [1], 100)
    rig.loop.turn()
    rig.add("head", [2], 5)
    for i in range(1000):
        rig.add(f"r{i}", [3], 5)
        rig.loop.abort(f"r{i}")
    assert len(chunked.waiting._heap) < 100
    rig.run()
    assert rig.client.endings("head") == ["length"]
