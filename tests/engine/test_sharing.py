"""Requests that begin alike and arrive together: the beginning is computed once, and nobody waits for nobody."""

import random
from typing import Any

import pytest

from hotswap.core.engine.context import COMPUTED_BY
from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.scheduler import GRANTED, PlanContext, RequestView, Row, Scheduler, StepPlan
from hotswap.core.live import LiveComponents
from hotswap.core.request import Request
from hotswap.core.testing.rig import Rig, build, finish, make_rig
from hotswap.core.testing.wrapping import Wrapped

PAGE = 8
SHARED = [(5 * i + i // 7) % 13 for i in range(12 * PAGE)]
SCHEDULERS = ["static", "continuous", "chunked", "prefill_first"]
MANAGERS = ["prefix", "radix"]


class Holds(Observer):
    """For what requests were held, with the number of plans."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[dict[str, str]] = []

    @hookimpl
    def hotswap_step_planned(self, holds: Any) -> None:
        assert len(holds) == len(dict(holds)), f"one reason for each: {holds}"
        self.plans.append(dict(holds))

    @hookimpl
    def hotswap_nothing_planned(self, holds: Any) -> None:
        self.hotswap_step_planned(holds)

    def of(self, request: str) -> list[str]:
        return [plan[request] for plan in self.plans if request in plan]


def rig_of(scheduler: Any = "chunked", kv: str = "prefix", **settings: Any) -> tuple[Rig, Holds]:
    live, holds = LiveComponents(), Holds()
    live.add(holds)
    rig = make_rig(scheduler, build("kvcache", kv, **settings.pop("options", {})), observers=live.observers, **{
        "num_pages": 1 + 400, "page_size": PAGE, "max_batch_tokens": 200, "max_model_len": 160, "max_running": 32,
        **settings})
    return rig, holds


def crowd(rig: Rig, n: int, max_tokens: int = 3, **fields: Any) -> list[Request]:
    """Requests of one beginning, each with 5 tokens of its own."""
    return [rig.add(f"r{i}", [*SHARED, i % 13, i // 13, 1, 2, 3], max_tokens, **fields) for i in range(n)]


def computed(rig: Rig) -> int:
    return sum(row.n_tokens for message in rig.executor.messages for row in message.rows)


# ---------------------------------------------------------------------- computed once


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("depth", "chained"), [(1, True), (2, True), (3, False)])
@pytest.mark.parametrize("budget", [40, 200])
def test_a_beginning_is_computed_once_for_all_that_arrive_together(
    kv: str, scheduler: str, depth: int, chained: bool, budget: int,
) -> None:
    rig, holds = rig_of(scheduler, kv, depth=depth, chained=chained, max_batch_tokens=budget)
    requests = crowd(rig, 32)
    finish(rig, requests)
    assert computed(rig) == len(SHARED) + 32 * (5 + 2), "the beginning, and for each its own end and its output"
    assert [rig.client.last(request.id).cached_tokens for request in requests] == [0] + 31 * [len(SHARED)]
    assert {reason for reason in holds.of("r1") if reason.startswith(COMPUTED_BY)} == {f"{COMPUTED_BY}r0"}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_policy_with_keys_that_change_shares_too(scheduler: str) -> None:
    rig, _ = rig_of(build("scheduler", scheduler, policy="longest_prefix_first"))
    finish(rig, crowd(rig, 20))
    assert computed(rig) == len(SHARED) + 20 * (5 + 2)


@pytest.mark.parametrize("kv", MANAGERS)
def test_a_request_starts_as_soon_as_its_part_is_there(kv: str) -> None:
    """The first goes on for long behind what the second shares with it."""
    rig, _ = rig_of(kv=kv, max_batch_tokens=32)
    requests = [rig.add("long", [*SHARED, *[9] * 50], 2), rig.add("short", [*SHARED[:64], 4], 2)]
    while not rig.client.tokens("short"):
        rig.loop.turn()
    assert not rig.client.tokens("long")
    finish(rig, requests)
    assert rig.client.last("short").cached_tokens == 64


def test_the_choices_of_one_request_in_a_closed_batch_compute_their_prompt_once() -> None:
    rig, _ = rig_of("static")
    prompt = [*SHARED, 1, 2, 3]
    requests = [rig.add(f"c{i}", prompt, 4, seed=i, fork_of="c0" if i else None) for i in range(4)]
    finish(rig, requests)
    assert computed(rig) == len(SHARED) + 4 * (3 + 3)


def test_nobody_joins_a_closed_batch_by_himself_since_a_full_step_has_no_row_for_the_one_that_he_waits_for() -> None:
    rig, _ = rig_of("static", max_batch_tokens=24)
    requests = [rig.add("before", [9] * 60, 2), *crowd(rig, 3)]
    finish(rig, requests)
    assert computed(rig) == 60 + 1 + len(SHARED) + 3 * (5 + 2)
    assert [rig.client.last(request.id).cached_tokens for request in requests] == [0, 0, len(SHARED), len(SHARED)]


def test_keys_that_change_are_asked_for_once_for_all_that_are_passed_over_in_a_plan() -> None:
    chunked, policy, asked = build("scheduler", "chunked"), build("queue_policy", "longest_prefix_first"), list[str]()
    key = policy.key
    policy.key = lambda view, now: asked.append(view.id) or key(view, now)
    chunked.policy = chunked.waiting.policy = policy
    rig, _ = rig_of(chunked)
    requests = crowd(rig, 30)
    rig.loop.plan_and_submit()
    assert len(chunked.waiting.passed) == 29, "all but the one that computes the beginning"
    assert len(asked) <= 3 * 30, "for the head, for the next one, and for all behind it"
    rig.loop.collect()
    finish(rig, requests)


def test_what_a_speculator_must_see_again_is_computed_again() -> None:
    rig, _ = rig_of(depth=2, lookahead=2, reuse_tail=3)
    requests = crowd(rig, 6)
    finish(rig, requests)
    tail = [rig.client.last(request.id).cached_tokens for request in requests]
    assert tail == [0] + 5 * [len(SHARED) - PAGE]


# ---------------------------------------------------------------------- who does not wait


def alone(rig: Rig, requests: list[Request], holds: Holds) -> None:
    """Each has computed all of its prompt, and none was held for another's."""
    finish(rig, requests)
    assert [rig.client.last(request.id).cached_tokens for request in requests] == [0] * len(requests)
    assert not any(reason.startswith(COMPUTED_BY) for plan in holds.plans for reason in plan.values())


@pytest.mark.parametrize("kv", MANAGERS)
def test_with_the_option_off_everybody_computes_everything(kv: str) -> None:
    rig, holds = rig_of(kv=kv, options={"share_pending": None}, max_batch_tokens=1000)
    alone(rig, crowd(rig, 5), holds)


def test_tenants_of_other_salts_do_not_wait_for_each_other() -> None:
    rig, holds = rig_of(max_batch_tokens=1000)
    prompt = [*SHARED, 1]
    alone(rig, [rig.add(f"r{i}", prompt, 3, cache_key=CacheKey(salt=str(i))) for i in range(4)], holds)


def test_whose_prompt_logprobs_are_asked_computes_its_prompt() -> None:
    rig, holds = rig_of(max_batch_tokens=1000)
    alone(rig, crowd(rig, 4, sampling={"prompt_logprobs": 0}), holds)


def test_a_short_beginning_is_not_worth_a_step() -> None:
    rig, holds = rig_of(max_batch_tokens=1000)
    alone(rig, [rig.add(f"r{i}", [*SHARED[:63], i, 1], 3) for i in range(4)], holds)


@pytest.mark.parametrize(("depth", "budget", "waits"), [(1, 24, False), (2, 24, False), (2, 104, True)])
def test_a_better_priority_waits_for_a_worse_one_only_where_all_of_it_is_in_flight(
    depth: int, budget: int, waits: bool,
) -> None:
    rig, holds = rig_of(build("scheduler", "chunked", policy="priority"), depth=depth, max_batch_tokens=budget)
    requests = [rig.add("worse", [*SHARED, 1, 2, 3, 4], 3, priority=5)]
    rig.loop.plan_and_submit()
    requests.append(rig.add("better", [*SHARED, 5], 3, priority=1))
    finish(rig, requests)
    assert bool(holds.of("better")) is waits
    assert (rig.client.last("better").cached_tokens == len(SHARED)) is waits


def test_those_behind_one_that_waits_are_served_meanwhile() -> None:
    rig, holds = rig_of(max_batch_tokens=24)
    requests = [*crowd(rig, 3), rig.add("behind", [1, 2, 3], 2)]
    while not rig.client.endings("behind"):
        rig.loop.turn()
    assert not rig.client.tokens("r0"), "its prompt of 101 tokens takes steps of 24"
    assert holds.of("r2") and not holds.of("behind")
    finish(rig, requests)


def test_those_that_wait_start_in_their_order() -> None:
    rig, _ = rig_of(max_running=2)
    requests = crowd(rig, 6, max_tokens=5)
    finish(rig, requests)
    started = [resume.request for message in rig.executor.messages for resume in message.resumes]
    assert started == [request.id for request in requests]


# ---------------------------------------------------------------------- nobody waits for ever


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("turns", [1, 2, 3, 5])
def test_where_the_one_that_computes_is_aborted_the_next_one_does(scheduler: str, kv: str, turns: int) -> None:
    rig, _ = rig_of(scheduler, kv, depth=2, max_batch_tokens=24, options={"share_pending": PAGE})
    requests = crowd(rig, 5)
    for _ in range(turns):
        rig.loop.turn()
    rig.loop.abort("r0")
    finish(rig, requests[1:])
    assert rig.client.endings("r0") == ["abort"]
    assert computed(rig) <= 2 * len(SHARED) + 5 * (5 + 2), "at worst once by the first and once by the second"


class Suspends(Wrapped):
    """Takes the pages of ``r0`` away in its second plan, before the scheduler inside decides anything."""

    plans = 0

    def plan(self, ctx: PlanContext) -> StepPlan:
        self.plans += 1
        if self.plans == 2:
            ctx.suspend("r0")
        return self.inner.plan(ctx)


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("scheduler", ["continuous", "chunked", "prefill_first"])
@pytest.mark.parametrize("depth", [1, 2])
def test_where_the_one_that_computes_is_suspended_the_next_one_goes_on_in_that_plan(
    scheduler: str, kv: str, depth: int,
) -> None:
    rig, _ = rig_of(Suspends(build("scheduler", scheduler)), kv, depth=depth, max_batch_tokens=24)
    requests = crowd(rig, 4)
    finish(rig, requests)
    [resumed] = [message.resumes for message in rig.executor.messages if message.suspensions]
    assert [resume.request for resume in resumed] == ["r1"]
    lost = 24 * (depth - 1)  # what was in flight could not be shared yet
    assert computed(rig) == len(SHARED) + lost + 4 * (5 + 2)


@pytest.mark.parametrize("kv", MANAGERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", range(4))
def test_a_shortage_of_pages_ends_with_everybody_served(scheduler: str, kv: str, seed: int) -> None:
    rng = random.Random(seed)
    rig, _ = rig_of(
        scheduler, kv, depth=rng.choice([1, 2]), num_pages=1 + 20 + rng.randrange(12), max_running=rng.choice([2, 5]),
        max_batch_tokens=rng.choice([24, 60, 300]), options={"share_pending": rng.choice([1, 16, 64])}, seed=seed)
    requests = []
    for i in range(12):
        prompt = SHARED[:rng.randrange(1, len(SHARED))] + [rng.randrange(13) for _ in range(rng.randrange(1, 20))]
        requests.append(rig.add(f"r{i}", prompt, rng.randrange(1, 30), priority=rng.randrange(3)))
        for _ in range(rng.randrange(3)):
            rig.loop.turn()
    finish(rig, requests)


class StartsFirst(Scheduler):
    """Gives whoever waits its first tokens, and serves those that run when nobody waits: a plan never has the one that
    computes before those that could wait for it. It knows nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: dict[str, None] = {}

    def admit(self, view: RequestView) -> None:
        self.waiting[view.id] = None

    def drop(self, request_id: str) -> None:
        self.waiting.pop(request_id, None)

    def plan(self, ctx: PlanContext) -> StepPlan:
        for request_id in self.waiting:
            view = ctx.view(request_id)
            if ctx.reserve(request_id, view.ready) is GRANTED:
                del self.waiting[request_id]
                return StepPlan([Row(request_id, min(view.ready, 16))])
            ctx.hold(request_id, "no room")
        rows = [Row(view.id, 1 if view.ready == 1 else min(view.ready, 16)) for view in ctx.running[:4] if view.ready]
        return StepPlan([row for row in rows if ctx.reserve(row.request, row.n_tokens) is GRANTED])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_scheduler_that_does_not_go_on_with_the_one_that_computes_lets_the_others_start(depth: int) -> None:
    rig, holds = rig_of(StartsFirst(), depth=depth)
    finish(rig, crowd(rig, 4))
    if depth == 1:
        assert not holds.of("r1"), "r0 was in no plan and not in flight"
    else:
        assert set(holds.of("r1")) == {f"{COMPUTED_BY}r0"}, "the better of two reasons is told"


@pytest.mark.parametrize(("scheduler", "kv"), [
    ("continuous", None), ("static", None), (None, "radix"), (None, "prefix")])
def test_an_exchange_in_between_computes_nothing_again(scheduler: str | None, kv: str | None) -> None:
    rig, _ = rig_of(max_batch_tokens=24)
    requests = crowd(rig, 6)
    rig.loop.turn()
    room, manager = rig.setup.room, build("kvcache", kv) if kv else None
    if manager is not None:
        manager.configure(room.specs, room.num_bytes, room.constraints)
    carry_out(rig.loop, Switch(rig.loop.limits, build("scheduler", scheduler) if scheduler else None, manager))
    finish(rig, requests)
    assert computed(rig) == len(SHARED) + 6 * (5 + 2)
