"""Parts are exchanged again and again under random traffic on a late device that checks every slot it reads."""

import random
from collections import Counter
from typing import Any

import pytest

from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan, KVCacheManager
from hotswap.core.request import Request
from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig, random_prompt

SCHEDULERS = ("static", "continuous", "chunked", "prefill_first")
POLICIES = ("fcfs", "priority", "shortest_first", "longest_prefix_first", "fair_share")
MANAGERS = ("paged", "prefix", "radix", "contiguous")
EVICTIONS = ("lru", "fifo", "lfu", "slru")
LONGEST = 96
TRIALS = 18


class PlantedError(RuntimeError):
    pass


class Exchanging:
    """A rig whose parts are exchanged at random: between two steps, by hand-over, by computing again; or not, since a
    new part raises at the worst moment."""

    def __init__(self, rig: Rig, rng: random.Random, page_size: int, num_pages: int, max_running: int) -> None:
        self.rig, self.rng = rig, rng
        self.constraints = CacheConstraints(LONGEST, max_running, page_size=page_size, num_pages=num_pages)
        self.plan: CachePlan | None = CachePlan(dict(rig.setup.groups))
        self.seen = Counter[str]()

    def scheduler(self) -> Any:
        return build("scheduler", self.rng.choice(SCHEDULERS), policy=self.rng.choice(POLICIES))

    def manager(self) -> KVCacheManager:
        name = self.rng.choice(MANAGERS)
        options = {"eviction": self.rng.choice(EVICTIONS)} if name in ("prefix", "radix") else {}
        kv: KVCacheManager = build("kvcache", name, **options)
        return kv

    def exchange(self) -> None:
        rng, loop, worker = self.rng, self.rig.loop, self.rig.worker
        scheduler = self.scheduler() if rng.random() < 0.5 else None
        kv, keeps, workers = None, True, rng.random() < 0.3
        plan = self.plan
        if rng.random() < 0.6:
            kv = self.manager()
            plan = kv.configure(worker.info().cache_specs, 0, self.constraints)
            keeps = self.plan is not None and plan.groups == self.plan.groups
            if not keeps and self.rig.loop.transfers.component is not None:
                return  # refused: its worker half knows the pages that there are
        old = self.plan

        def forget() -> None:
            worker.sequences.clear()
            self.rig.executor.cached.clear()  # no transfer fills the pages that are told again
            if not keeps:
                worker.allocate(plan)
            fail_if("workers")

        def back() -> None:
            worker.sequences.clear()
            self.rig.executor.cached.clear()
            if not keeps:
                worker.allocate(old)

        fault = rng.choice(["workers", "adopt", "admit", "handover"]) if rng.random() < 0.25 else ""

        def fail_if(place: str) -> None:
            if fault == place:
                raise PlantedError(place)

        if kv is not None and fault in ("adopt", "handover"):
            error = PlantedError if fault == "adopt" else KVInvariantError
            kv.adopt = raising(error)  # type: ignore[method-assign]
        if scheduler is not None and fault == "admit":
            scheduler.admit = raising(PlantedError)
        touches = workers or not keeps
        try:
            effect = carry_out(loop, Switch(
                loop.limits, scheduler, kv, forget if touches else None, back if touches else None, keeps))
        except PlantedError as error:
            self.seen[f"undone after {error}"] += 1
            self.check()
            return
        if scheduler is not None:
            vars(scheduler).pop("admit", None)  # nobody waited
        self.plan = plan
        self.seen["exchanges"] += 1
        self.seen["handed over"] += effect.handed_over
        self.seen["recomputed"] += effect.recomputed
        self.seen["told again"] += effect.handed_over if workers else 0
        self.seen["by invariant"] += fault == "handover" and kv is not None
        self.check()

    def check(self) -> None:
        loop = self.rig.loop
        loop.parts.kv.check()
        running = {state.id for state in loop.pool.running.values()}
        assert set(loop.parts.kv.owners()) <= running


def raising(error: type[Exception]) -> Any:
    def method(*arguments: Any) -> None:
        raise error("admit" if error is PlantedError and len(arguments) and hasattr(arguments[0], "id") else "adopt")

    return method


def trial(seed: int) -> Counter[str]:
    rng = random.Random(seed)
    page_size, max_running = rng.choice([1, 2, 4, 8]), rng.choice([3, 6])
    windows: dict[str, int | None] = {"full": None}
    if rng.random() < 0.4:
        windows["window"] = rng.choice([1, 3, 6, 13])
    depth, chained = rng.choice([(1, True), (2, True), (2, True), (3, False)])
    num_pages = 1 + -(-int(LONGEST * rng.uniform(1.1, 3.5)) // page_size)
    rig = make_rig(
        "chunked", "prefix", windows=windows, page_size=page_size, max_model_len=LONGEST, num_pages=num_pages,
        max_batch_tokens=rng.choice([9, 16, 40]), max_running=max_running, depth=depth, chained=chained,
        lookahead=rng.choice([0, 0, 3]), seed=seed,
        transfer=build("kv_transfer", "host", memory=4096, swap_overhead=0) if seed % 3 == 2 else None)
    parts = Exchanging(rig, rng, page_size, num_pages, max_running)
    requests = drive(rig, rng, parts)
    for name, request in requests.items():
        endings, tokens = rig.client.endings(name), rig.client.tokens(name)
        if endings == ["abort"]:
            parts.seen["aborted"] += 1
            assert tokens == expected(request)[: len(tokens)]
        else:
            assert endings == ["length"], (name, rig.client.last(name).error)
            assert tokens == expected(request)
    assert_clean(rig)
    parts.seen["preempted"] += sum(len(message.suspensions) for message in rig.executor.messages)
    parts.seen["swapped"] += rig.loop.transfers.counters().get("swaps_out", 0)
    parts.seen["copies"] += sum(
        len(change.copies) for message in rig.executor.messages for _, grant in message.grants
        for change in grant.groups.values())
    return parts.seen


def drive(rig: Rig, rng: random.Random, parts: Exchanging) -> dict[str, Request]:
    """Requests come in bursts, some as children of others; some are aborted; every few turns parts are exchanged."""
    requests: dict[str, Request] = {}
    shared = [rng.randrange(13) for _ in range(20)]
    loop: EngineLoop = rig.loop
    for _ in range(4000):
        if len(requests) < 24 and rng.random() < 0.3:
            prompt = random_prompt(rng, 50, shared)
            most, parent = rng.randrange(1, LONGEST - len(prompt)), f"r{len(requests)}"
            for child in range(rng.choice([1, 1, 1, 3])):
                name = f"r{len(requests)}"
                requests[name] = rig.add(name, prompt, most, priority=rng.randrange(3), tenant=rng.choice("ab"),
                        fork_of=parent if child else None)
        if rng.random() < 0.02 and loop.pool.states:
            loop.abort(rng.choice(list(loop.pool.states)))
        if rng.random() < 0.15:
            parts.exchange()
        if not loop.turn() and not loop.in_flight and not loop.pool.states and len(requests) >= 24:
            return requests
        rig.clock.advance(0.001)
    raise AssertionError(f"no end after 4000 turns: {loop.pool.snapshot()}")


def test_exchanges_at_random_lose_and_corrupt_nothing():
    seen = Counter[str]()
    for seed in range(TRIALS):
        seen += trial(seed)
    print(dict(seen))
    for what in ("handed over", "recomputed", "told again", "undone after workers", "undone after adopt",
                 "undone after admit", "by invariant", "aborted", "preempted", "copies", "swapped"):
        assert seen[what], f"nothing was {what}"
    assert seen["exchanges"] > 30 * TRIALS


def test_children_that_wait_for_their_parent_run_by_themselves_where_nobody_forks_any_more():
    """A manager without forks, and a scheduler that starts nobody until its batch has ended."""
    prompt = list(range(12)) * 3
    for parts in ({"kv": "contiguous"}, {"scheduler": "static"}):
        rig = make_rig(page_size=4, max_batch_tokens=8, max_running=4, num_pages=200)
        for name in ("parent", "child", "other"):
            rig.add(name, prompt, 5, fork_of=None if name == "parent" else "parent")
        rig.loop.turn()
        assert [child.id for child in rig.loop.pool.states["parent"].held] == ["child", "other"]
        kv = scheduler = forget = None
        if "kv" in parts:
            kv = build("kvcache", parts["kv"])
            sizes = CacheConstraints(128, 4, page_size=4, num_pages=200)
            plan = kv.configure(rig.worker.info().cache_specs, 0, sizes)

            def forget(plan=plan, rig=rig):
                rig.worker.sequences.clear()
                rig.worker.allocate(plan)
        else:
            scheduler = build("scheduler", parts["scheduler"])
        carry_out(rig.loop, Switch(rig.loop.limits, scheduler, kv, forget, forget, kv is None))
        assert not rig.loop.pool.states["parent"].held
        rig.run()
        assert {rig.client.endings(name)[0] for name in ("parent", "child", "other")} == {"length"}
        assert len({tuple(rig.client.tokens(name)) for name in ("parent", "child", "other")}) == 1
        assert_clean(rig)


def test_a_scheduler_is_exchanged_while_steps_are_in_flight():
    rig = make_rig(depth=2)
    for name in "abc":
        rig.add(name, [1, 2, 3], 6)
    rig.loop.plan_and_submit()
    assert rig.loop.in_flight
    effect = carry_out(rig.loop, Switch(rig.loop.limits, build("scheduler", "continuous")))
    assert rig.loop.in_flight, "nothing was waited for"
    assert (effect.handed_over, effect.recomputed, effect.pause_s) == (0, 0, 0)
    rig.run()
    assert all(rig.client.endings(name) == ["length"] for name in "abc")


def test_a_queue_policy_that_is_new_orders_those_that_wait_already():
    rig = make_rig(max_running=1)
    rig.add("first", [1], 3)
    rig.loop.turn()
    for name, priority in (("low", 5), ("high", 1), ("middle", 3)):
        rig.add(name, [1], 2, priority=priority)
    carry_out(rig.loop, Switch(rig.loop.limits, build("scheduler", "chunked", policy="priority")))
    rig.run()
    assert list(rig.client.outputs) == ["first", "high", "middle", "low"]


def test_what_a_new_manager_cannot_find_any_more_is_told_to_those_who_listen():
    rig, heard = make_rig(page_size=4), []
    rig.loop.watch(heard.extend)
    rig.add("a", list(range(8)) * 2, 2)
    rig.run()
    assert {event.kind for event in heard} == {"stored"}
    successor = build("kvcache", "paged")
    successor.configure(rig.worker.info().cache_specs, 0, CacheConstraints(128, 8, page_size=4, num_pages=64))
    carry_out(rig.loop, Switch(rig.loop.limits, kv=successor))
    assert heard[-1].kind == "reset"


def test_a_prefix_that_was_handed_over_is_found():
    for name in ("radix", "prefix"):
        rig = make_rig(page_size=4)
        rig.add("a", list(range(12)) * 2, 2)
        rig.run()
        successor = build("kvcache", name)
        successor.configure(rig.worker.info().cache_specs, 0, CacheConstraints(128, 8, page_size=4, num_pages=64))
        carry_out(rig.loop, Switch(rig.loop.limits, kv=successor))
        rig.add("b", list(range(12)) * 2, 2)
        rig.run()
        assert rig.client.last("b").cached_tokens == 20


def successor(rig: Rig, name: str, **options: Any) -> KVCacheManager:
    kv: KVCacheManager = build("kvcache", name, **options)
    kv.configure(rig.worker.info().cache_specs, 0, CacheConstraints(128, 8, page_size=4, num_pages=64))
    return kv


def test_children_stay_with_their_parent_where_the_new_parts_fork_too():
    rig = make_rig(page_size=4, max_batch_tokens=8)
    for name in ("parent", "child", "other"):
        rig.add(name, list(range(12)) * 3, 5, fork_of=None if name == "parent" else "parent")
    rig.loop.turn()
    carry_out(rig.loop, Switch(rig.loop.limits, build("scheduler", "continuous"), successor(rig, "radix")))
    assert len(rig.loop.pool.states["parent"].held) == 2
    rig.run()
    computed = sum(row.n_tokens for message in rig.executor.messages for row in message.rows)
    assert computed == 36 + 4 + 2 * (1 + 4), "the prompt once, and of each child its last token"


def test_pages_that_become_full_after_a_hand_over_are_found():
    """The old manager had no use for them, so that it did not ask to be told."""
    rig = make_rig(kv="paged", page_size=4, depth=2)
    request = rig.add("a", [1, 2, 3, 4, 5], 80)
    for _ in range(3):
        rig.loop.turn()
    carry_out(rig.loop, Switch(rig.loop.limits, kv=successor(rig, "prefix")))
    for _ in range(40):
        rig.loop.turn()
    rig.add("b", [1, 2, 3, 4, 5, *expected(request)[:23]], 2)
    rig.run()
    assert rig.client.last("b").cached_tokens == 24


def test_what_waits_again_when_an_exchange_is_undone_is_told_to_the_old_scheduler():
    rig = make_rig(page_size=4)
    requests = [rig.add(name, [1, 2, 3], 9) for name in "abc"]
    rig.loop.turn()
    kv, scheduler = successor(rig, "paged"), build("scheduler", "continuous")
    kv.adopt = raising(KVInvariantError)  # type: ignore[method-assign]
    scheduler.admit = raising(PlantedError)
    with pytest.raises(PlantedError):
        carry_out(rig.loop, Switch(rig.loop.limits, scheduler, kv))
    assert rig.loop.parts.kv.name == "prefix"
    assert rig.loop.pool.waiting == 3
    rig.run()
    assert [rig.client.tokens(request.id) for request in requests] == [expected(request) for request in requests]
    assert_clean(rig)


def test_a_request_that_lost_its_pages_and_is_given_up_leaves_the_workers():
    rig = make_rig(page_size=4)
    for name in "ab":
        rig.add(name, [1, 2, 3], 9)
    rig.loop.turn()
    kv = successor(rig, "paged")
    kv.adopt = raising(KVInvariantError)  # type: ignore[method-assign]
    assert carry_out(rig.loop, Switch(rig.loop.limits, kv=kv)).recomputed == 2
    rig.loop.abort("a")
    rig.run()
    assert rig.client.endings("a") == ["abort"]
    assert_clean(rig)


def test_a_successor_is_told_every_token_though_commits_are_put_off():
    rig, told = make_rig(page_size=16), []
    rig.add("a", [1, 2, 3], 12)
    for _ in range(6):
        rig.loop.turn()
    kv = build("kvcache", "paged")
    kv.configure(rig.worker.info().cache_specs, 0, CacheConstraints(128, 8, page_size=16, num_pages=64))
    adopt = kv.adopt
    kv.adopt = lambda state: (told.extend(state.tables["a"].tokens), adopt(state))
    carry_out(rig.loop, Switch(rig.loop.limits, kv=kv))
    assert told == rig.loop.pool.states["a"].tokens
    assert len(told) > 5
