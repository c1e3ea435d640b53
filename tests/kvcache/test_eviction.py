"""What each eviction policy is for: which pages survive which traffic."""

from collections.abc import Hashable, Iterable

import pytest

from hotswap.core.interfaces.kvcache import EvictionPolicy
from hotswap.plugins.kvcache.eviction import (
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    SegmentedLRU,
)


class Cache:
    """As many pages as ``size`` under a policy; each access takes a page up and gives it back at once."""

    def __init__(self, policy: EvictionPolicy, size: int) -> None:
        self.policy, self.size = policy, size
        self.pages: set[Hashable] = set()
        self.hits = 0

    def use(self, pages: Iterable[Hashable]) -> int:
        """Returns how many of them were there."""
        before = self.hits
        for page in pages:
            if page in self.pages:
                self.hits += 1
                self.policy.on_hit(page)
                self.policy.on_pin(page)
            else:
                if len(self.pages) == self.size:
                    victim = self.policy.pick()
                    self.policy.on_remove(victim)
                    self.pages.remove(victim)
                self.pages.add(page)
                self.policy.on_insert(page)
            self.policy.on_unpin(page)
        return self.hits - before


def scan(name: str, count: int) -> list[str]:
    return [f"{name} {i}" for i in range(count)]


@pytest.mark.parametrize("make", [LeastFrequentlyUsed, SegmentedLRU])
def test_pages_that_are_used_again_survive_a_scan_that_lru_and_fifo_lose_them_to(make: type[EvictionPolicy]) -> None:
    survived = {}
    for policy in (make, LeastRecentlyUsed, FirstInFirstOut):
        cache = Cache(policy(), 10)
        cache.use(scan("first", 10))
        for _ in range(8):
            cache.use("abcd")
        cache.use(scan("once", 30))
        survived[policy] = cache.use("abcd")
    assert survived == {make: 4, LeastRecentlyUsed: 0, FirstInFirstOut: 0}


def test_lfu_evicts_the_page_with_the_fewest_hits_and_of_equals_the_one_unheld_for_longest() -> None:
    cache = Cache(LeastFrequentlyUsed(), 4)
    cache.use("aaabbcdcd")
    cache.use("e")
    assert cache.pages == set("acde"), "b, c and d have two uses each, and b's are the oldest"


def test_lfu_outlives_what_was_popular_once() -> None:
    """Without ageing, a page with a thousand hits would stay until a thousand newer ones had as many."""
    turnovers = {}
    for most in (4, 16):
        cache = Cache(LeastFrequentlyUsed(LeastFrequentlyUsed.Options(max_count=most)), 10)
        cache.use(["old favourite"] * 1000)
        count = 0
        while "old favourite" in cache.pages:
            cache.use(scan(f"turn {count}", 10))
            count += 1
            assert count < 100, "it never goes"
        turnovers[most] = count
    assert turnovers[4] < turnovers[16] <= 2 * 16


def test_lfu_does_not_age_by_pages_that_leave_the_index_otherwise() -> None:
    policy = LeastFrequentlyUsed()
    for page in "ab":
        policy.on_insert(page)
    for _ in range(9):
        policy.on_hit("a")
    for page in "ab":
        policy.on_unpin(page)
    policy.on_remove("a")  # a reset, or a poisoned page: not an eviction
    policy.on_insert("c")
    policy.on_unpin("c")
    for page in "bc":
        assert policy.pick() == page, "both have been used once since, b first"
        policy.on_remove(page)


@pytest.mark.parametrize("make", [LeastRecentlyUsed, LeastFrequentlyUsed, SegmentedLRU])
def test_the_tail_of_a_sequence_goes_before_its_head(make: type[EvictionPolicy]) -> None:
    """A head without its tail is of use, a tail without its head is of none."""
    policy = make()
    for page in range(4):
        policy.on_insert(page)
        if page % 2:  # the cache has aged between head and tail
            policy.on_insert(f"filler {page}")
            policy.on_unpin(f"filler {page}")
            policy.on_remove(policy.pick())
    for page in reversed(range(4)):
        policy.on_unpin(page)
    order = []
    for _ in range(4):
        order.append(policy.pick())
        policy.on_remove(order[-1])
    assert order == [3, 2, 1, 0]


def test_slru_gives_a_page_that_leaves_the_protected_segment_a_second_chance() -> None:
    cache = Cache(SegmentedLRU(SegmentedLRU.Options(protected=0.5)), 4)
    cache.use("abcd")
    cache.use("abc")  # three were hit, two may be protected: a goes back, to the young end
    cache.use("e")
    assert cache.pages == set("abce"), "d was never hit, and is older than a there"
    cache.use("f")
    assert cache.pages == set("bcef")


def test_slru_forgets_an_old_favourite_sooner_than_lfu() -> None:
    """A favourite of the past, then two pages that are used in turn with others that are not."""
    left = {}
    for make in (SegmentedLRU, LeastFrequentlyUsed):
        cache = Cache(make(), 5)
        cache.use(["old"] * 20)
        for turn in range(12):
            cache.use(["new 1", "new 2", "new 3", "new 4", f"once {turn}"])
        left[make] = "old" in cache.pages
    assert left == {SegmentedLRU: False, LeastFrequentlyUsed: True}
