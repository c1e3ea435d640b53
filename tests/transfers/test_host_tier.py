"""The host tier itself: what it refuses, what it finds, what it chooses, and its copies."""

import random
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config, unmet
from hotswap.core.engine.context import Limits
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kv_transfer import AxisShard, CachePages, GroupPages, LayerPages, TransferLayout
from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan, CacheSpec, GroupPlan
from hotswap.core.interfaces.messages import EndedTransfer
from hotswap.core.interfaces.scheduler import SuspendMode
from hotswap.core.live import LiveComponents
from hotswap.core.registry import Registry
from hotswap.core.testing.kv_transfer import look_up
from hotswap.core.testing.kv_transfer_traffic import LateWorker, OnDemand, traffic
from hotswap.core.testing.replay import Replay, read_log
from hotswap.core.testing.rig import assert_clean, build, expected, make_rig
from hotswap.plugins.kv_transfer.copies import HostTierWorker, InOrder, OnAThread
from hotswap.plugins.kv_transfer.host import HostTier, HostTierOptions
from hotswap.plugins.kvcache.paged import PagedKVCache

SPECS = (CacheSpec("full", (0,), 1, 1, 8),)


def tier(**options: Any) -> HostTier:
    return HostTier(HostTierOptions(**{"memory": 4096, "swap_overhead": 0, **options}))


def layout(**sizes: int) -> TransferLayout:
    plan = CachePlan({group: GroupPlan(9, size) for group, size in (sizes or {"full": 4}).items()})
    return TransferLayout(SPECS, plan, 1, lambda: 0.0)


# ------------------------------------------------------------------ what it refuses

def test_memory_for_less_than_a_page_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="31 bytes hold no page of 32 bytes") as refused:
        tier(memory=31).configure(layout())
    assert refused.value.path == "kv_transfer.memory"


def test_cache_groups_with_pages_of_two_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"pages of one size, the cache groups have \[4, 8\]"):
        tier().configure(layout(full=4, window=8))


@pytest.mark.parametrize(("options", "problem"), [
    ({"memory": "none"}, "kv_transfer.memory"), ({"swap_overhead": -1}, "kv_transfer.swap_overhead"),
    ({"size": 3}, "kv_transfer.size"),
])
def test_wrong_options_are_refused_before_anything_is_loaded(options: dict[str, Any], problem: str) -> None:
    config = load_config({"model": "m", "kv_transfer": {"use": "host", **options}}, environ={}).config
    with pytest.raises(ConfigError, match=problem.replace(".", r"\.")):
        check_config(config, Registry())


def test_a_manager_that_cannot_tell_its_tables_is_refused_with_the_key_to_change() -> None:
    class Secretive(PagedKVCache):
        def describe(self) -> Description:
            return Description(offers=frozenset({"fork"}))

    problems = unmet({"kv_transfer": tier(), "kvcache": Secretive()})
    assert [problem.path for problem in problems] == ["kv_transfer"]
    assert "requires 'tables' of the kvcache: it copies the pages of requests" in problems[0].message
    assert problems[0].message.endswith("Change kvcache.")
    assert not unmet({"kv_transfer": tier(), "kvcache": PagedKVCache()})


# ------------------------------------------------------------------ what it finds

class CollidingTier(HostTier):
    """All pages have one of four keys."""

    digest = staticmethod(lambda parent, tokens: bytes([(sum(parent) + sum(tokens)) % 4]))


def test_with_keys_that_collide_only_equal_tokens_hit() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        run = traffic(lambda: CollidingTier(HostTierOptions(memory=4096)), seed, seen, list(SuspendMode))
        run.run()
        run.check()
    assert seen["hits"]


def test_a_request_too_long_for_the_tier_leaves_its_beginning() -> None:
    rig, prompt = make_rig(page_size=4, transfer=tier(memory=3 * 32)), list(range(24))
    rig.add("a", prompt, 2)
    rig.run()
    assert look_up(rig, prompt) == 12
    rig.add("b", prompt, 2)  # it finds what it would write, and drives none of that out
    rig.run()
    assert look_up(rig, prompt) == 12
    assert_clean(rig)


def test_the_least_recently_used_pages_go_first_and_ends_before_beginnings() -> None:
    rig = make_rig(page_size=4, transfer=tier(memory=5 * 32))
    first, second, third = ([start] * 8 for start in (1, 2, 3))
    for name, prompt in (("a", first), ("b", second), ("c", first), ("d", third)):
        rig.add(name, prompt, 1)
        rig.run()
        rig.loop.parts.kv.reset()
    assert [look_up(rig, prompt) for prompt in (first, second, third)] == [8, 4, 8]


def test_a_reset_forgets_what_others_could_find_and_keeps_what_was_swapped() -> None:
    rig = make_rig(OnDemand(build("scheduler", "chunked")), "paged", page_size=4, transfer=tier())
    ended = rig.add("a", list(range(9)), 3)
    rig.run()
    request = rig.add("b", list(range(20, 30)), 9)
    while len(rig.client.tokens("b")) < 2:
        rig.loop.turn()
    rig.loop.parts.scheduler.victim = "b"
    while rig.loop.pool.running:
        rig.loop.turn()
    assert rig.loop.transfers.reset() > 0
    assert look_up(rig, ended.prompt_token_ids) == 0
    rig.run()
    assert rig.loop.transfers.counters()["swaps_in"] == 1
    assert rig.client.tokens("b") == expected(request)
    assert_clean(rig)


# ------------------------------------------------------------------ what it chooses

@pytest.mark.parametrize(("mode", "length", "overhead", "rate", "chosen"), [
    (SuspendMode.AUTO, 9, 30, 2**20, SuspendMode.RECOMPUTE), (SuspendMode.AUTO, 40, 30, 2**20, SuspendMode.SWAP),
    (SuspendMode.AUTO, 40, 30, 32, SuspendMode.RECOMPUTE),  # moving its 11 pages out and in takes as long as 22 tokens
    (SuspendMode.SWAP, 9, 30, 32, SuspendMode.SWAP), (SuspendMode.RECOMPUTE, 40, 0, 2**20, SuspendMode.RECOMPUTE),
])
def test_it_swaps_where_that_costs_less_than_computing_again(
    mode: SuspendMode, length: int, overhead: int, rate: int, chosen: SuspendMode,
) -> None:
    scheduler = OnDemand(build("scheduler", "chunked"))
    rig = make_rig(scheduler, "paged", page_size=4, transfer=tier(swap_overhead=overhead, swap_rate=rate))
    request = rig.add("a", list(range(13)) * 3 + [1] if length == 40 else list(range(length)), 9)
    while len(rig.client.tokens("a")) < 3:
        rig.loop.turn()
    scheduler.victim, scheduler.mode = "a", mode
    rig.run()
    assert [mode for m in rig.executor.messages for _, mode in m.suspensions] == [chosen]
    assert rig.client.tokens("a") == expected(request)


@pytest.mark.parametrize(("options", "fields"), [
    ({"memory": 64}, {}), ({"swap": False}, {}), ({}, {"sampling": {"prompt_logprobs": 0}}),
])
def test_where_a_swap_cannot_be_or_would_be_in_vain_it_is_a_recomputation(
    options: dict[str, Any], fields: dict[str, Any],
) -> None:
    """No room; switched off; a request whose whole prompt must be computed whatever is kept."""
    scheduler = OnDemand(build("scheduler", "chunked"))
    rig = make_rig(scheduler, "paged", page_size=4, transfer=tier(**options))
    request = rig.add("a", list(range(12)), 9, **fields)
    while len(rig.client.tokens("a")) < 3:
        rig.loop.turn()
    scheduler.victim = "a"
    rig.run()
    assert [mode for m in rig.executor.messages for _, mode in m.suspensions] == [SuspendMode.RECOMPUTE]
    assert rig.loop.transfers.counters()["swaps_refused"] == ("memory" in options)
    assert rig.client.tokens("a") == expected(request)
    assert_clean(rig)


# ------------------------------------------------------------------ copies that fail

class Failing(InOrder):
    """Every third copy raises."""

    def __init__(self) -> None:
        self.count = 0

    def start(self, copy: Any) -> Any:
        self.count += 1
        if self.count % 3 == 0:
            raise OSError("planted")
        return super().start(copy)


def test_after_a_copy_that_failed_the_tokens_are_computed_and_nobody_is_harmed() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        run = traffic(
            lambda: tier(overlap=True), seed, seen, list(SuspendMode),
            lambda worker, rng: LateWorker(HostTierWorker(True, Failing()), rng))
        run.run()
        run.check()
    assert seen["failed"] > 20


def test_a_load_that_fails_within_its_step_fails_the_step_and_ends_every_transfer(caplog: Any) -> None:
    worker = HostTierWorker(False, Failing())
    worker.register(pages(torch.zeros(4, 8)), {"slots": 4})
    moves = {"full": ([1], [0])}
    worker.begin({"save": [["s", moves]], "load": []})
    with pytest.raises(RuntimeError, match="the pages of b could not be filled"):
        worker.begin({"save": [], "load": [["a", 4, moves], ["b", 8, moves], ["c", 0, moves]]})
    assert sorted(worker.report(0.0)) == [("a", None), ("b", 8), ("c", None), ("s", None)]


# ------------------------------------------------------------------ bytes

def pages(*tensors: torch.Tensor) -> CachePages:
    layers = tuple(LayerPages(i, (tensor, tensor.clone())) for i, tensor in enumerate(tensors))
    axes = ("page", "token", "kv_heads", "head_dim")
    return CachePages({"full": GroupPages("full", 4, len(tensors[0]), axes, AxisShard(0, 1, 1), layers)}, "cpu", "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(4, 2, 8), (3, 1, 5)])
def test_every_byte_of_every_layer_goes_out_and_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensors = [torch.randint(0, 250, (9, *shape)).to(dtype) for _ in range(3)]
    cache = pages(*tensors)
    worker = HostTierWorker(False)
    worker.register(cache, {"slots": 5})
    before = [tensor.clone() for layer in cache.groups["full"].layers for tensor in layer.tensors]
    worker.begin({"save": [["s", {"full": ([2, 7, 3], [4, 0, 1])}]], "load": []})
    for layer in cache.groups["full"].layers:
        for tensor in layer.tensors:
            tensor[[2, 3, 5, 7]] = 0
    worker.begin({"save": [], "load": [["l", 0, {"full": ([5, 2, 3], [0, 4, 1])}]]})
    after = [tensor for layer in cache.groups["full"].layers for tensor in layer.tensors]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[5, 2, 3]], old[[7, 2, 3]])
        assert torch.equal(new[[1, 4, 6, 8]], old[[1, 4, 6, 8]]), "another page was touched"
        assert not new[7].any()
    assert worker.report(0.0) == [EndedTransfer("s"), EndedTransfer("l")]
    worker.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("overlap", [False, True])
def test_a_page_goes_to_pinned_memory_and_back_while_its_stream_goes_on(overlap: bool) -> None:
    """What a step queues behind a transfer is not seen by it, and what was queued before is."""
    cache = pages(*[torch.zeros(64, 16, 8, 64, device="cuda") for _ in range(4)])
    cache = replace(cache, device="cuda")
    tensors = [tensor for layer in cache.groups["full"].layers for tensor in layer.tensors]
    worker = HostTierWorker(overlap)
    worker.register(cache, {"slots": 32})
    some, slots = list(range(1, 33)), list(range(31, -1, -1))
    for round_ in range(1, 4):
        for tensor in tensors:
            tensor[some] = round_ + torch.arange(32.0, device="cuda")[:, None, None, None]
        expected = [tensor[some].clone() for tensor in tensors]
        worker.begin({"save": [[f"s{round_}", {"full": (some, slots)}]], "load": []})
        end(worker, f"s{round_}")
        for tensor in tensors:
            tensor.fill_(-1)
        worker.begin({"save": [], "load": [[f"l{round_}", 0, {"full": (some, slots)}]]})
        end(worker, f"l{round_}")
        for tensor, wanted in zip(tensors, expected, strict=True):
            assert torch.equal(tensor[some], wanted)
            assert (tensor[33:] == -1).all()
    worker.close()


def end(worker: HostTierWorker, name: str) -> None:
    ended: list[EndedTransfer] = []
    while not ended:
        ended = worker.report(0.01)
    assert ended == [EndedTransfer(name)]


def test_more_than_is_staged_at_a_time_is_copied_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.plugins.kv_transfer.copies.STAGED_BYTES", 200)
    test_every_byte_of_every_layer_goes_out_and_comes_back(torch.float32, (4, 2, 8))


def test_a_copy_on_the_thread_is_reported_once_it_has_ended_and_a_step_goes_on_meanwhile() -> None:
    gate, copier = threading.Event(), OnAThread()
    worker = HostTierWorker(True, copier)
    worker.register(pages(torch.ones(4, 8)), {"slots": 4})
    blocked = copier.start(gate.wait)  # type: ignore[arg-type]  # its result is not looked at before it is done
    worker.begin({"save": [["s", {"full": ([1], [0])}]], "load": []})
    assert worker.report(0.01) == []
    assert not blocked()
    gate.set()
    ended: list[EndedTransfer] = []
    while not ended:
        ended = worker.report(1.0)
    assert ended == [EndedTransfer("s")]
    worker.close()


# ------------------------------------------------------------------ what can be seen of it

@pytest.mark.parametrize("overlap", [False, True])
def test_a_replayed_log_makes_the_same_swaps(tmp_path: Path, overlap: bool) -> None:
    live, rng = LiveComponents(), random.Random(4)
    prompts = [[7] * 13 + [rng.randrange(13) for _ in range(20)] for _ in range(8)]
    live.add(build("observer", "decision_log", path=str(tmp_path / "log.jsonl"), page_size=4))
    options = {"memory": 8192, "swap_overhead": 20, "overlap": overlap}
    rig = make_rig(
        "chunked", "prefix", num_pages=34, page_size=4, depth=2, max_running=6, max_batch_tokens=24,
        observers=live.observers, transfer=tier(**options),
        wrap_transfer=(lambda w: LateWorker(HostTierWorker(True, InOrder()), rng)) if overlap else lambda w: w)
    rig.start_observers()
    for turn in range(100):
        if turn % 3 == 0:
            rig.add(f"r{turn}", rng.choice(prompts), rng.randrange(9, 60))
        if turn in (34, 58):
            rig.loop.abort(f"r{turn - 1}")
        rig.loop.turn()
        rig.clock.advance(0.0017)
    rig.run()
    live.observers.notify("hotswap_engine_stopped", time=rig.clock.now())
    counters = rig.loop.transfers.counters()
    assert counters["swaps_in"] and counters["hits"], counters
    kv, again = build("kvcache", "prefix"), tier(**options)
    plan = kv.configure(SPECS, 0, CacheConstraints(128, 6, page_size=4, num_pages=34))
    again.configure(TransferLayout(SPECS, plan, 1, lambda: 0.0))
    events = read_log(tmp_path / "log.jsonl")
    replay = Replay(events, build("scheduler", "chunked"), kv, Limits(24, 6, 128), 2, True, again)
    assert replay.run() is None
    assert again.counters() == counters


def test_metrics_tell_swaps_and_what_the_tier_counts() -> None:
    live, metrics = LiveComponents(), build("observer", "metrics")
    live.add(metrics)
    scheduler = OnDemand(build("scheduler", "chunked"))
    rig = make_rig(scheduler, "paged", page_size=4, observers=live.observers, transfer=tier())
    rig.add("a", list(range(12)), 9)
    while len(rig.client.tokens("a")) < 3:
        rig.loop.turn()
    scheduler.victim = "a"
    rig.run()
    samples = {
        (sample.name, sample.labels.get("event")): sample.value
        for family in metrics.families() for sample in family.samples}
    assert samples["hotswap:num_swaps_total", None] == samples["hotswap:num_preemptions_total", None] == 1
    assert samples["hotswap:kv_transfer_total", "swaps_in"] == 1
    assert samples["hotswap:kv_transfer_total", "loaded_bytes"] > 0


class Unkind(HostTier):
    """Raises when it is told that a request has ended."""

    def finished(self, *args: Any) -> Any:
        raise RuntimeError("no")

    def forget(self, *args: Any) -> None:
        raise RuntimeError("no")


def test_a_tier_that_raises_when_requests_end_is_named_and_costs_no_page(caplog: Any) -> None:
    unkind = Unkind(HostTierOptions(memory=4096, swap_overhead=0))
    rig = make_rig(transfer=unkind)
    requests = [rig.add(f"r{i}", [1 + i, 2, 3, 4, 5, 6], 6) for i in range(3)]
    rig.run()
    assert_clean(rig)
    assert [rig.client.tokens(request.id) for request in requests] == [expected(request) for request in requests]
    assert "raised in finished" in caplog.text
    assert "raised in forget" in caplog.text
