"""What each queue policy is for, and what bounds the waiting under it."""

import random
from typing import Any

import pytest

from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig
from hotswap.plugins.schedulers.fair_share import FairShare


def scheduler(policy: Any, use: str = "continuous") -> Any:
    return build("scheduler", use, policy=policy)


def started(rig: Rig) -> list[str]:
    """Ids in the order in which they started, each once."""
    return list(dict.fromkeys(resume.request for message in rig.executor.messages for resume in message.resumes))


# ---------------------------------------------------------------------- shortest_first


def test_the_shortest_starts_first() -> None:
    rig = make_rig(scheduler("shortest_first"), max_running=1)
    rig.add("long answer", [1], 30)
    rig.add("long prompt", [1] * 20, 5)
    rig.add("short", [1] * 3, 4)
    rig.run()
    assert started(rig) == ["short", "long prompt", "long answer"]


@pytest.mark.parametrize(("rate", "starves"), [(0, True), (1000, False)])
def test_a_long_request_waits_only_for_those_that_arrive_within_its_bonus(rate: float, starves: bool) -> None:
    """60 tokens behind a stream of 4: at 1000 tokens a second, nobody may overtake it who comes 56 ms later."""
    rig = make_rig(scheduler({"use": "shortest_first", "tokens_per_second": rate}), max_running=1)
    rig.add("first", [2], 2)
    rig.loop.turn()
    begun = rig.clock.now()
    rig.add("long", [1] * 40, 20)
    arrivals = {}
    for i in range(300):
        if rig.loop.pool.waiting < 3:
            rig.add(f"short {i}", [3] * 2, 2)
            arrivals[f"short {i}"] = rig.clock.now()
        rig.loop.turn()
        rig.clock.advance(0.001)
    overtook = [name for name in started(rig)[1:] if "long" in started(rig) and name != "long"
                and started(rig).index(name) < started(rig).index("long")]
    assert ("long" not in started(rig)) is starves
    assert all(arrivals[name] <= begun + 0.0561 for name in overtook)
    assert starves or len(overtook) > 5, "it should have been overtaken while that was allowed"


# ---------------------------------------------------------------------- longest_prefix_first


def families(rig: Rig) -> None:
    """Three families of prompts take turns; the cache holds the prefix of one."""
    for i in range(12):
        rig.add(f"{'abc'[i % 3]}{i}", [i % 3] * 40 + [3 + i, 4], 2)


def test_requests_of_one_family_run_together_and_hit_more() -> None:
    hits, orders = {}, {}
    for policy in ("fcfs", "longest_prefix_first"):
        rig = make_rig(scheduler(policy), max_running=1, num_pages=1 + 16, page_size=4, max_model_len=48)
        families(rig)
        states = list(rig.loop.pool.states.values())
        rig.run()
        hits[policy] = sum(state.cached_tokens or 0 for state in states)
        orders[policy] = "".join(name[0] for name in started(rig))
    assert orders == {"fcfs": "abc" * 4, "longest_prefix_first": "aaaabbbbcccc"}
    assert hits == {"fcfs": 0, "longest_prefix_first": 3 * 3 * 40}


@pytest.mark.parametrize("bound", [0, 3, 10])
def test_nobody_is_overtaken_more_often_than_the_bound(bound: int) -> None:
    """One without a hit, before an endless stream of hits."""
    rig = make_rig(scheduler({"use": "longest_prefix_first", "max_overtaken": bound}), max_running=2)
    rig.add("warm", [1] * 40, 2)
    rig.run()
    for i in range(3):
        rig.add(f"before {i}", [1] * 40 + [i], 4)
    rig.add("cold", [2] * 30, 4)
    for i in range(60):
        if rig.loop.pool.waiting < 4:
            rig.add(f"after {i}", [1] * 40 + [i], 4)
        rig.loop.turn()
        rig.clock.advance(0.001)
        rig.loop.parts.kv.check()
    order = started(rig)
    assert "cold" in order, "it starves"
    overtook = [name for name in order[: order.index("cold")] if name.startswith("after")]
    assert len(overtook) == max(0, bound - 3), "three older ones have started while it waited, too"


def test_without_its_bound_a_request_without_a_hit_starves() -> None:
    """The traffic of the test above does what it is there for."""
    rig = make_rig(scheduler({"use": "longest_prefix_first", "max_overtaken": 10_000}), max_running=2)
    rig.add("warm", [1] * 40, 2)
    rig.run()
    rig.add("cold", [2] * 30, 4)
    for i in range(60):
        if rig.loop.pool.waiting < 4:
            rig.add(f"after {i}", [1] * 40 + [i], 4)
            rig.add(f"also {i}", [1] * 40 + [i], 4)
        rig.loop.turn()
    assert "cold" not in started(rig)


def matches_of(rig: Rig) -> list[int]:
    """An entry for each time that a prompt is compared with the cache."""
    matched: list[int] = []
    match = rig.loop.parts.kv.match

    def counting(*args: Any) -> Any:
        matched.append(1)
        return match(*args)

    rig.loop.parts.kv.match = counting  # type: ignore[method-assign]
    return matched


def test_a_preemptive_policy_looks_who_could_give_way_before_it_compares_a_prompt_with_the_cache() -> None:
    rig = make_rig(scheduler("priority"), max_running=2, depth=2, chained=False)
    matched = matches_of(rig)
    for i in range(2):
        rig.add(f"runs {i}", [1], 20 * (i + 1), priority=1)
    while len(rig.loop.pool.running) < 2:
        rig.loop.turn()
    for i in range(3):
        rig.add(f"r{i}", [2], 4, priority=i)
    matched.clear()
    while not rig.client.endings("runs 0"):
        assert not matched, "every slot is taken, and whoever has one is in this step or in flight"
        rig.loop.turn()
    rig.run()
    assert started(rig) == ["runs 0", "runs 1", "r0", "r1", "r2"]


def test_only_so_many_waiting_requests_are_matched_in_a_plan_and_none_where_none_could_start() -> None:
    continuous = scheduler("longest_prefix_first")
    rig = make_rig(continuous, max_running=2)
    matched = matches_of(rig)
    for i in range(2):
        rig.add(f"runs {i}", [1], 20 * (i + 1))
    rig.loop.turn()
    for i in range(3 * continuous.policy.probes):
        rig.add(f"r{i}", [2], 30)
    matched.clear()
    while not rig.client.endings("runs 0"):
        assert not matched, "every slot is taken"
        rig.loop.turn()
    rig.loop.turn()
    assert continuous.policy.probes < len(matched) <= continuous.policy.probes + 3, "and twice the one that starts"
    rig.run()


# ---------------------------------------------------------------------- fair_share


def served(rig: Rig, requests: list[Any], weights: tuple[float, float] = (1.0, 2.0)) -> dict[str, float]:
    """Weighted tokens that each tenant has got so far, counted from outside."""
    total: dict[str, float] = {}
    for request in requests:
        tokens = len(rig.client.tokens(request.id))
        begun = request.id in started(rig)
        total[request.tenant] = total.get(request.tenant, 0.0) + (
            weights[0] * len(request.prompt_token_ids) * begun + weights[1] * tokens)
    return total


def backlog(policy: Any, turns: int, sizes: dict[str, tuple[int, int, int]]) -> tuple[Rig, list[dict[str, float]]]:
    """Every tenant always has requests waiting: ``sizes`` are (how many at once, prompt, answer). What each had got,
    after each turn."""
    rig = make_rig(scheduler(policy), max_running=4, num_pages=1 + 200, max_batch_tokens=64)
    requests, history = [], []
    for turn in range(turns):
        for tenant, (burst, prompt, answer) in sizes.items():
            while sum(s.tenant == tenant and not s.running for s in rig.loop.pool.states.values()) < burst:
                requests.append(rig.add(f"{tenant}{len(requests)}", [turn % 9] * prompt, answer, tenant=tenant))
        rig.loop.turn()
        rig.clock.advance(0.001)
        history.append(served(rig, requests))
    return rig, history


def test_a_tenant_that_floods_the_queue_gets_no_more_than_the_others() -> None:
    sizes = {"flood": (20, 16, 8), "few": (2, 16, 8)}
    _, fcfs = backlog("fcfs", 250, sizes)
    rig, fair = backlog("fair_share", 250, sizes)
    assert fcfs[-1]["flood"] > 4 * fcfs[-1]["few"], "the traffic is unfair by itself"
    # The paper's bound: twice the most that one request, or all that fit into a batch, can cost.
    bound = 2 * max(1 * 16, 2 * 4 * 8)
    assert max(abs(now["flood"] - now["few"]) for now in fair) <= bound
    assert min(fair[-1].values()) > 10 * bound, "the bound says something"


def test_shares_count_tokens_and_not_requests() -> None:
    _, fair = backlog("fair_share", 250, {"long": (3, 30, 20), "short": (3, 4, 2)})
    assert abs(fair[-1]["long"] - fair[-1]["short"]) <= 2 * max(30, 2 * 4 * 20)


def test_a_tenant_of_weight_three_gets_three_times_as_much() -> None:
    _, fair = backlog({"use": "fair_share", "tenant_weights": {"gold": 3}}, 400, {"gold": (4, 8, 8), "tin": (4, 8, 8)})
    assert fair[-1]["gold"] / fair[-1]["tin"] == pytest.approx(3, rel=0.1)


def test_idle_time_earns_no_credit() -> None:
    """One tenant works alone for long; when another comes, both get the same from then on."""
    rig = make_rig(scheduler("fair_share"), max_running=2, num_pages=1 + 200)
    requests = []
    for turn in range(400):
        for tenant in ("busy", "late") if turn >= 200 else ("busy",):
            while sum(s.tenant == tenant and not s.running for s in rig.loop.pool.states.values()) < 3:
                requests.append(rig.add(f"{tenant}{len(requests)}", [1] * 8, 8, tenant=tenant))
        if turn == 200:
            before = served(rig, requests)
        rig.loop.turn()
    after = served(rig, requests)
    gained = {tenant: after[tenant] - before[tenant] for tenant in after}
    assert abs(gained["busy"] - gained["late"]) <= 2 * max(8, 2 * 2 * 8)
    assert before["busy"] > 10 * 2 * 32, "the credit would have been large"


def test_the_counters_are_what_the_requests_were_served_also_after_suspensions_and_failed_plans() -> None:
    fair = FairShare()
    continuous = scheduler("fcfs")
    continuous.policy = continuous.waiting.policy = fair
    rig = make_rig(continuous, num_pages=1 + 24, page_size=4, max_model_len=96)
    plan, rng = continuous.plan, random.Random(1)

    def sometimes_lost(ctx: Any) -> Any:
        made = plan(ctx)
        if rng.random() < 0.2 and not rig.loop.failed_plans:
            raise RuntimeError("planted")
        return made

    continuous.plan = sometimes_lost
    requests = [rig.add(f"r{i}", [i] * 20, 40, tenant="ab"[i % 2]) for i in range(6)]
    states = list(rig.loop.pool.states.values())
    rig.run()
    assert any(state.preemptions for state in states)
    assert all(rig.client.tokens(request.id) == expected(request) for request in requests)
    assert fair.counters["a"] == fair.counters["b"] == 3 * (20 + 2 * 40)
    assert not (fair._waiting or fair._charged or fair._tenants or fair._ended or +fair._queued)
    assert_clean(rig)


def test_tenants_that_ask_for_nothing_any_more_are_forgotten_once_that_changes_nothing() -> None:
    """Thousands come once while two stay. Whoever has got more than the least that those who wait have is known still:
    to come back is no way to lose a debt."""
    rig = make_rig(scheduler("fair_share"), max_running=2, num_pages=1 + 200)
    fair = rig.loop.parts.scheduler.policy
    rig.add("debt", [1] * 60, 1, tenant="debtor")
    rig.run()
    debt = fair.counters["debtor"]
    for number in range(60):
        for stays in ("stays", "too"):
            rig.add(f"{stays}{number}", [1] * 4, 1, tenant=stays)
        rig.add(f"once{number}", [1] * 2, 1, tenant=f"once{number}")
        for _ in range(3):
            rig.loop.turn()
        if (served := fair.counters["stays"]) < debt:
            assert fair.counters["debtor"] == debt
    rig.run()
    assert served > debt
    assert fair.counters.keys() <= {"stays", "too", "once59"} | {f"once{number}" for number in range(40, 60)}
    assert "debtor" not in fair.counters
    rig.add("again", [1], 1, tenant="debtor")
    assert fair.counters["debtor"] >= debt, "it is lifted over what it was forgotten with"


def test_there_is_an_end_to_what_is_remembered_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody ever waits, the least counter of those that do stands still."""
    monkeypatch.setattr("hotswap.plugins.schedulers.fair_share.REMEMBERED", 10)
    rig = make_rig(scheduler("fair_share"), max_running=2, num_pages=1 + 200)
    for number in range(40):
        rig.add(f"r{number}", [1] * (40 - number), 1, tenant=f"t{number}")
        rig.run()
    fair = rig.loop.parts.scheduler.policy
    assert len(fair.counters) <= 10 and len(fair._idle) <= 10
    assert "t0" in fair.counters, "those that have got most are remembered"


# ---------------------------------------------------------------------- prefill_first


def steps_of(rig: Rig) -> list[str]:
    """P for a step of prompts, D for one of decodes, M for a mixed one."""
    letters = []
    for message in rig.executor.messages:
        widths = {row.n_tokens > 1 for row in message.rows}
        letters += ["M" if len(widths) == 2 else "P" if widths == {True} else "D"] if message.rows else []
    return letters


def test_prompts_come_in_steps_of_their_own_before_all_decodes() -> None:
    rig = make_rig(build("scheduler", "prefill_first"), max_batch_tokens=24, num_pages=1 + 100)
    for i in range(4):
        rig.add(f"r{i}", [i] * 20, 6)
    rig.loop.turn()
    rig.add("late", [5] * 10, 6)
    rig.run()
    assert "".join(steps_of(rig)[:7]) == "PPPPPDD", "one whole prompt of 20 fits into a step of 24"
    rows = [row.n_tokens for message in rig.executor.messages for row in message.rows]
    assert rows.count(20) == 4 and rows.count(10) == 1, "none was cut"


def test_a_prompt_longer_than_a_step_is_cut_and_finished_before_anybody_decodes() -> None:
    rig = make_rig(build("scheduler", "prefill_first"), max_batch_tokens=16, num_pages=1 + 100)
    rig.add("decodes", [1] * 4, 20)
    rig.loop.turn()
    rig.add("long", [2] * 40, 3)
    rig.run()
    assert "".join(steps_of(rig)[:5]) == "PPPPD"


def test_those_that_decode_get_a_step_after_so_many_of_prompts() -> None:
    rig = make_rig(build("scheduler", "prefill_first", max_prefills_in_a_row=3), max_batch_tokens=16, max_running=50,
                   num_pages=1 + 200)
    rig.add("decodes", [1] * 4, 10)
    for i in range(9):
        rig.add(f"r{i}", [2 + i] * 15, 1)
    rig.run()
    assert "".join(steps_of(rig)[:8]) == "PPPDPPPD"
