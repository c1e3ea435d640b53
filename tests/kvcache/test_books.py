"""Counts, leaks, and numbers of pages at the edges."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.errors import ConfigError, KVInvariantError
from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CachedPage,
    CacheKey,
    CacheSpec,
    Grant,
    KVState,
    TableState,
)
from hotswap.core.interfaces.scheduler import Answer
from hotswap.core.testing.kvcache_harness import KEY, LONGEST, PAGE, Harness, prompt
from hotswap.plugins.kvcache.contiguous import ContiguousKVCache
from hotswap.plugins.kvcache.paged import PagedKVCache
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.tables import TableKVCache


def harness(kv: TableKVCache, usable: int = 8, **windows: int | None) -> Harness:
    return Harness(kv, usable, windows or {"full": None})


# ---------------------------------------------------------------------- leaks


def test_a_leaked_page_is_named_with_the_request_that_holds_it() -> None:
    kv = PagedKVCache()
    harness(kv).start("r1", prompt(1))
    kv._pools[0].holders[2] += 1
    with pytest.raises(KVInvariantError, match=r"'full'.*\[2\].*leaked.*\['r1'\]"):
        kv.check()


def test_a_page_that_nobody_knows_is_named() -> None:
    kv = PagedKVCache()
    h = harness(kv)
    h.run("r1", prompt(1))
    del kv._pools[0]._recycled[3]
    with pytest.raises(KVInvariantError, match=r"\[3\] are leaked: neither free"):
        kv.check()


def test_a_page_that_is_free_and_in_use_is_named_with_its_fence() -> None:
    kv = PagedKVCache()
    h = harness(kv)
    h.start("r1", prompt(1))
    h.kv.release("r1", {"copy of r1"})
    kv._pools[0]._recycled[1] = None
    with pytest.raises(KVInvariantError, match=r"\[1\] are free and in use.*copy of r1"):
        kv.check()


def test_a_wrong_count_is_seen() -> None:
    kv = PagedKVCache()
    harness(kv).start("r1", prompt(1))
    kv._pools[0].held += 1
    with pytest.raises(KVInvariantError, match="counted 5 held and 0 fenced pages, but there are 4 and 0"):
        kv.check()


def test_an_index_entry_for_other_tokens_is_seen() -> None:
    kv = PrefixKVCache()
    h = harness(kv)
    h.start("r1", prompt(1))
    kv._tables["r1"].tokens[0] += 1
    with pytest.raises(KVInvariantError, match="logical page 0 of request 'r1'"):
        kv.check()


def test_undo_out_of_order_is_refused() -> None:
    kv = PagedKVCache()
    h = harness(kv)
    first = h.ask("a", prompt(1, PAGE))
    second = h.kv.reserve("a", 2 * PAGE)
    assert isinstance(first, Grant) and isinstance(second, Grant)
    release = h.kv.release("a", {1})
    with pytest.raises(KVInvariantError, match="last in, first out"):
        h.kv.undo(second.entry)
    h.kv.undo(release)
    h.kv.undo(second.entry)
    h.kv.undo(first.entry)
    h.kv.check()
    assert h.held == 0


def test_finish_and_abort_in_one_step_free_once() -> None:
    h = harness(PrefixKVCache())
    h.start("a", prompt(1))
    h.start("b", prompt(1))
    h.kv.release("a", {4})
    h.kv.release("a", {4}, retain=False)
    h.kv.on_fence(4)
    h.kv.check()
    assert h.held == 4 and h.kv.owners() == {"b": 4}


def test_every_page_returns_whatever_the_release_waits_for() -> None:
    h = harness(PrefixKVCache(), usable=16)
    before = h.kv.usage()
    h.start("swapped out", prompt(1))
    h.kv.release("swapped out", {1, "transfer 1"})
    h.start("swapped in", prompt(1))
    h.kv.release("swapped in", {"transfer 2"})
    h.kv.fork("nobody", "child", 3, 2)
    for fence in (1, "transfer 2", "transfer 1"):
        assert h.kv.usage().fenced
        h.kv.on_fence(fence)
    h.kv.reset()
    assert h.kv.usage() == before


# ---------------------------------------------------------------------- pages, not tokens


@given(st.integers(1, 64), st.sampled_from((1, 2, 4, 16)))
@settings(deadline=None, max_examples=60, derandomize=True, database=None)
def test_a_request_holds_as_many_pages_as_its_tokens_need(length: int, page_size: int) -> None:
    kv = PagedKVCache()
    kv.configure([CacheSpec("full", (0,), 1, 8, 32)], 0, CacheConstraints(64, 4, page_size=page_size, num_pages=65))
    for upto in range(1, length + 1):
        kv.reserve("a", upto, None, KEY, list(range(upto)))
        held = kv.usage().held
        assert held == (upto + page_size - 1) // page_size
        assert 1 <= upto - (held - 1) * page_size <= page_size, "the last page holds 1 to page_size tokens"
    kv.check()


def test_requests_near_the_limit_are_never_refused_a_page_that_is_there() -> None:
    """Six requests at the edge of the pool, each with two drafts a step, by pages and not by tokens."""
    kv = PagedKVCache()
    kv.configure([CacheSpec("full", (0,), 1, 8, 32)], 0, CacheConstraints(592, 8, page_size=16, num_pages=38))
    lengths, refused = {name: 80 + i for i, name in enumerate("abcdef")}, 0
    for name, length in lengths.items():
        assert isinstance(kv.reserve(name, length, None, KEY, [1] * length), Grant)
    for step in range(500):
        kv.begin_plan()
        for name in sorted(lengths):
            grant = kv.reserve(name, lengths[name] + 3)
            free = kv.usage().free
            if isinstance(grant, Answer):
                assert grant is Answer.NO and free == 0
                refused += 1
                kv.release(name, (), retain=False)
                lengths[name] = 80
                assert isinstance(kv.reserve(name, 80, None, KEY, [1] * 80), Grant)
            else:
                lengths[name] += 1
                kv.commit(name, [step], lengths[name] - 1)
                kv.shrink(name, lengths[name], ())
    kv.check()
    assert refused


def test_a_window_gives_its_pages_up_as_soon_as_no_query_sees_them() -> None:
    h = harness(PagedKVCache(), window=5)
    h.ask("a", prompt(1))
    held = []
    for verified in range(LONGEST + 1):
        h.kv.commit("a", [], verified)
        held.append(h.held)
    # A query at position v sees v - 4 .. v: page 0 goes at v = 8, page 1 at 12, page 2 at 16.
    assert held == [4] * 8 + [3] * 4 + [2] * 4 + [1]


def test_commit_of_unknown_tokens_is_an_error_that_says_so() -> None:
    h = harness(PrefixKVCache())
    h.ask("a", prompt(1, 3))
    with pytest.raises(ValueError, match="8 tokens are verified, but only 3 are known"):
        h.kv.commit("a", [], 8)


def test_preempting_no_more_than_is_needed_while_fences_are_slow() -> None:
    """A request that lacks room suspends one other; until the fence passes it waits and suspends no further."""
    h = harness(PagedKVCache(), usable=12)
    for i, name in enumerate("abc"):
        h.start(name, prompt(i))
    suspended: list[str] = []
    for step in range(1, 7):
        h.kv.begin_plan()
        while (answer := h.ask("d", prompt(9))) is Answer.NO:
            suspended.append("abc"[len(suspended)])
            h.kv.release(suspended[-1], {step})
        if step > 3:
            h.kv.on_fence(step - 3)
        if isinstance(answer, Grant):
            break
    assert suspended == ["a"]


def test_two_requests_that_each_need_most_of_the_pool_run_one_after_the_other() -> None:
    h = Harness(PrefixKVCache(), 10, {"full": None}, 28)
    assert isinstance(h.ask("a", prompt(1, 28)), Grant)
    assert h.ask("b", prompt(2, 28)) is Answer.NO
    assert h.held == 7, "the second holds nothing while it waits"
    h.kv.release("a", ())
    assert isinstance(h.ask("b", prompt(2, 28)), Grant)


# ---------------------------------------------------------------------- sizes


def test_bytes_are_divided_evenly_over_the_groups() -> None:
    specs = [CacheSpec("full", (0,), 1, 8, 32), CacheSpec("window", (1,), 1, 8, 16, "window", 8)]
    plan = PrefixKVCache().configure(specs, 48 * 16 * 11 + 5, CacheConstraints(64, 4))
    assert [(sizes.num_pages, sizes.page_size) for sizes in plan.groups.values()] == [(11, 16), (11, 16)]


def test_a_million_pages_are_configured_without_touching_one() -> None:
    kv = PrefixKVCache()
    kv.configure([CacheSpec("full", (0,), 1, 8, 32)], 0, CacheConstraints(64, 4, num_pages=1_000_000))
    assert kv.usage().free == 999_999
    assert len(kv._pools[0].holders) == 1


def test_a_kind_of_state_that_cannot_be_paged_is_refused() -> None:
    with pytest.raises(ConfigError, match="'ssm' is of kind 'recurrent'"):
        PagedKVCache().configure([CacheSpec("ssm", (0,), 1, 8, 32, "recurrent")], 1 << 20, CacheConstraints(64, 4))


def test_num_blocks_too_small_for_one_request_names_the_key_and_a_length_that_fits() -> None:
    with pytest.raises(ConfigError, match="lower max_model_len to 96") as error:
        PagedKVCache().configure([CacheSpec("full", (0,), 1, 8, 32)], 0, CacheConstraints(256, 4, num_pages=7))
    assert error.value.path == "kvcache.num_blocks"
    told = "needs 17 pages of 16 tokens, the dummy page included, but kvcache.num_blocks is 7; give at least 17, or"
    assert told in str(error.value)
    assert "bytes" not in str(error.value)


@pytest.mark.parametrize("num_pages", [0, 1])
def test_too_little_room_for_any_request_asks_for_what_is_enough_and_for_no_length(num_pages) -> None:
    specs, constraints = [CacheSpec("full", (0,), 1, 8, 32)], CacheConstraints(256, 4)
    page_bytes = 16 * specs[0].bytes_per_token
    with pytest.raises(ConfigError, match=f"give at least {17 * page_bytes} bytes") as error:
        PagedKVCache().configure(specs, num_pages * page_bytes, constraints)
    assert error.value.path == "kvcache.memory"
    assert "lower max_model_len" not in str(error.value)
    PagedKVCache().configure(specs, 17 * page_bytes, constraints)


def test_contiguous_gives_each_request_one_run() -> None:
    h = harness(ContiguousKVCache(), usable=11, full=None, window=5)
    assert h.plan.groups["full"].num_pages == 9, "two whole runs, and the dummy page"
    grant = h.ask("a", prompt(1, 1))
    assert isinstance(grant, Grant)
    for told in grant.groups.values():
        assert told.pages == tuple(range(told.pages[0], told.pages[0] + 4)) and told.first_live == 0
    h.kv.commit("a", [1] * 15, 16)
    assert h.held == 8, "windows give nothing back"
    with pytest.raises(ValueError, match="at most 16"):
        h.kv.reserve("a", LONGEST + 1)


# ---------------------------------------------------------------------- hand-over


def test_a_hand_over_waits_for_no_fence() -> None:
    h = harness(PrefixKVCache())
    h.start("a", prompt(1))
    h.kv.release("a", {3, "copy"})
    with pytest.raises(KVInvariantError, match="'3', 'copy'"):
        h.kv.handover()


@pytest.mark.parametrize("state", [
    KVState({}, [CachedPage("full", b"", (1, 2, 3, 4), 99)]),
    KVState({"a": TableState({"other": 0}, {"other": [1]}, [1], 1, CacheKey())}),
])
def test_pages_that_are_not_ours_are_refused_before_anything_changes(state: KVState) -> None:
    h = harness(PrefixKVCache())
    before = h.kv.usage()
    with pytest.raises(KVInvariantError):
        h.kv.adopt(state)
    assert h.kv.usage() == before
    h.kv.check()


def test_an_index_takes_up_the_verified_pages_of_a_predecessor_without_one() -> None:
    h = harness(PagedKVCache(), usable=16)
    h.start("a", prompt(1, 9))
    successor = harness(PrefixKVCache(), usable=16)
    successor.kv.adopt(h.kv.handover())
    successor.kv.check()
    assert successor.match(prompt(1)).cached == 8
