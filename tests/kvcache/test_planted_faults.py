"""Faults that real servers had, planted one by one: the random lives of the conformance kit must find each of them."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kvcache import CacheKey, Fence, Grant, KVCacheManager, Match
from hotswap.core.interfaces.scheduler import Answer
from hotswap.core.testing.kvcache import KVCacheManagerSuite
from hotswap.core.testing.kvcache_machine import KVCacheMachine
from hotswap.plugins.kvcache.index import IndexedPool
from hotswap.plugins.kvcache.pool import PagePool
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.radix import RadixKVCache
from hotswap.plugins.kvcache.tables import Table
from hotswap.plugins.kvcache.trie import TriePool


class Quiet(PrefixKVCache):
    """Without its own check and without hand-over: what is found, the reads and the books have found."""

    def describe(self) -> Description:
        return Description(offers=super().describe().offers - {"handover"})

    def check(self) -> None: ...


class MappingSurvivesEviction(Quiet):
    """The index still leads to a page that has been given to another request."""

    def _new_pool(self, group: str, num_pages: int) -> PagePool:
        pool = super()._new_pool(group, num_pages)
        assert isinstance(pool, IndexedPool)

        def evict() -> int:
            page = int(str(pool.policy.pick()))
            pool.policy.on_remove(page)
            digest = pool.nodes[page].digest
            pool._unindex(page)
            pool.pages[digest], pool.nodes[page] = page, pool.nodes.get(page) or self._tombs[group, digest]
            return page

        def publish(page: int, node: Any, publish: Any = pool.publish) -> Any:
            self._tombs[group, node.digest] = node
            return publish(page, node)
        pool._evict, pool.publish = evict, publish  # type: ignore[method-assign]
        return pool

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._tombs: dict[tuple[str, bytes], Any] = {}


class FreesBeforeTheFence(Quiet):
    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        return super().release(request_id, (), retain)


class StepFencePassesTransfers(Quiet):
    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        return super().release(request_id, {f for f in fences if isinstance(f, int)}, retain)


class SharesUnverifiedPages(Quiet):
    """Pages are published once reserved and their tokens known, before they are computed."""

    def _admit(self, request_id: str, *args: Any) -> Grant | Answer:
        grant = super()._admit(request_id, *args)
        if isinstance(grant, Grant):
            table = self._tables[request_id]
            verified, table.verified = table.verified, min(len(table.tokens), table.capacity)
            self._publish(table)
            table.verified = verified
        return grant


class OffByOneAtAPageBoundary(Quiet):
    def _wanted(self, upto: int) -> int:
        return upto // self._page_size + (upto % self._page_size > 1)


class UndoCountsTwice(Quiet):
    def _undo_grow(self, request_id: str, table: Table, need: int) -> None:
        super()._undo_grow(request_id, table, need)
        for pool in self._pools:
            pool.held -= need


class UndoForgetsTheTable(Quiet):
    """The pages of an undone reserve come back, but the table still lists them."""

    def _undo_grow(self, request_id: str, table: Table, need: int) -> None:
        kept = [list(pages) for pages in table.pages]
        super()._undo_grow(request_id, table, need)
        table.pages = kept
        self._set_end(table, table.end + need)


class UndoOfAReleaseForgotten(Quiet):
    def _undo_release(self, *args: Any) -> None: ...


class MatchIgnoresTheKey(Quiet):
    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        return super().match(tokens, CacheKey(), limit, tail)

    def reserve(self, request_id: str, upto: int, match: Any = None, key: Any = None, tokens: Any = ()) -> Any:
        return super().reserve(request_id, upto, match, CacheKey(), tokens)


class MatchReturnsTheWholePrompt(Quiet):
    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        return super().match(tokens, key, len(tokens), tail)


class MatchIgnoresTheWindow(Quiet):
    """The last page alone is taken for the whole window."""

    def _last_miss(self, chain: Any, number: int, window: int, pages: int) -> int:
        return super()._last_miss(chain, number, 1, pages)

    def _first_pages(self, position: int) -> list[int]:
        first = super()._first_pages(position)
        for number, _ in self._windows:
            first[number] = max(0, position - 1) // self._page_size
        return first


class WindowFreedTooEarly(Quiet):
    def _first_page(self, position: int, window: int) -> int:
        return super()._first_page(position + 2, window)


class ForkSharesThePartialPage(Quiet):
    def fork(self, parent: str, child: str, upto: int, fence: Fence) -> Grant | Answer:
        grant = super().fork(parent, child, upto, fence)
        if isinstance(grant, Grant):
            grant = Grant({group: told._replace(copies=()) for group, told in grant.groups.items()}, grant.entry)
        return grant


class ShrinkBelowTheBound(Quiet):
    def shrink(self, request_id: str, upto: int, fences: Iterable[Fence]) -> None:
        super().shrink(request_id, 0, fences)


class LaterWithoutAFence(Quiet):
    """Never NO: a request that cannot fit waits for ever."""

    def _answer(self, *args: Any) -> Answer:
        answer = super()._answer(*args)
        return Answer.LATER if answer is Answer.NO else answer


class EvictsHeldPages(Quiet):
    def _new_pool(self, group: str, num_pages: int) -> PagePool:
        pool = super()._new_pool(group, num_pages)
        assert isinstance(pool, IndexedPool)
        pool.policy.on_pin = lambda page: None  # type: ignore[method-assign]
        return pool


class EvictsAnInnerPageAlone(RadixKVCache):
    """What hangs on it stays in the trie. No read shows it, since nothing finds it: the check must."""

    def _new_pool(self, group: str, num_pages: int) -> PagePool:
        pool = super()._new_pool(group, num_pages)
        assert isinstance(pool, TriePool)
        pool.whole = False
        return pool


class QuietTrie(RadixKVCache):
    def check(self) -> None: ...


class EvictsLeavesOnly(QuietTrie):
    """Where requests hold all leaves, nothing goes, and who counts on the pages between starves."""

    def _adopt_plan(self, *args: Any) -> None:
        super()._adopt_plan(*args)
        leaf_below = self._trie.leaf_below

        def leaf(pool: TriePool, page: int) -> int:
            edge, index = self._trie.resolve(pool.nodes[leaf_below(pool, page)])
            assert not edge.children and index == edge.end - 1, "no leaf can be evicted"
            return leaf_below(pool, page)
        self._trie.leaf_below = leaf  # type: ignore[method-assign]


FOUND_BY_RANDOM_LIVES = {
    EvictsAnInnerPageAlone: r"^\d+$",  # it trips over its own books, at this page
    EvictsHeldPages: "given to .* while in use",
    EvictsLeavesOnly: "no leaf can be evicted",
    ForkSharesThePartialPage: "fork at .* copies pages",
    FreesBeforeTheFence: "wait for a fence",
    LaterWithoutAFence: "LATER, but no fence is pending",
    MappingSurvivesEviction: "reads position .*: (poison|what another history wrote)",
    MatchIgnoresTheKey: "reads position .*: what another history wrote",
    MatchIgnoresTheWindow: "lacks pages",
    MatchReturnsTheWholePrompt: "the limit was",
    OffByOneAtAPageBoundary: "lacks pages",
    SharesUnverifiedPages: "reads position .*: poison",
    ShrinkBelowTheBound: "but requests hold",
    StepFencePassesTransfers: "wait for a fence",
    UndoCountsTwice: "undo left",
    UndoForgetsTheTable: "given up by a table, but no table holds it|while in use",
    UndoOfAReleaseForgotten: "undo left",
    WindowFreedTooEarly: "lacks pages",
}


SEEDS = 40


def run_random_lives(manager: type[KVCacheManager], examples: int, number: int = 0) -> None:
    machine = seed(number)(type("Machine", (KVCacheMachine,), {"make_manager": staticmethod(manager)}))
    run_state_machine_as_test(machine, settings=settings(
        max_examples=examples, stateful_step_count=40, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate], report_multiple_bugs=False,
    ))


@pytest.mark.parametrize("sound", [Quiet, QuietTrie])
def test_random_lives_without_a_fault_find_nothing(sound: type[KVCacheManager], request: Any) -> None:
    """The same managers, but for what they keep quiet about, live longer in the conformance tests."""
    run_random_lives(sound, 400 if request.config.getoption("--whole") else 20)


@pytest.mark.parametrize("fault", FOUND_BY_RANDOM_LIVES, ids=lambda fault: fault.__name__)
def test_random_lives_find(fault: type[KVCacheManager]) -> None:
    """Each run of many lives finds the fault. By which of its symptoms depends on what is drawn, and a manager with
    broken books may trip over them itself (KeyError); the one that names the fault comes within a few runs."""
    symptoms = []
    for number in range(SEEDS):
        with pytest.raises((AssertionError, KVInvariantError, KeyError)) as found:
            run_random_lives(fault, 400, number)
        symptoms.append(str(found.value).partition("\n")[0])
        if re.search(FOUND_BY_RANDOM_LIVES[fault], symptoms[-1]):
            return
    raise AssertionError(f"none of these names the fault: {symptoms}")


# ---------------------------------------------------------------------- faults that a short story shows best


class MatchIgnoresTheTail(PrefixKVCache):
    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        return super().match(tokens, key, limit)


class NeverHits(PrefixKVCache):
    """Advertised, and without effect."""

    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        return Match(0, 0)


class SharesKnownTokensThatAreNotComputed(PrefixKVCache):
    def commit(self, request_id: str, new_tokens: Sequence[int], verified: int) -> int:
        return super().commit(request_id, new_tokens, len(self._tables[request_id].tokens) + len(new_tokens))


class GrantsAMatchThatIsOutOfDate(PrefixKVCache):
    def _still_there(self, cached: int, hit: Any) -> bool:
        return True


class ForkSourceIsNotKept(PrefixKVCache):
    def fork(self, parent: str, child: str, upto: int, fence: Fence) -> Grant | Answer:
        grant = super().fork(parent, child, upto, fence)
        self.on_fence(fence)
        return grant


class PromisesAreForgotten(PrefixKVCache):
    def _answer(self, *args: Any) -> Answer:
        answer = super()._answer(*args)
        self.begin_plan()
        return answer


class PromisesAddUp(PrefixKVCache):
    """Asking again adds a promise instead of replacing it."""

    def _withdraw(self, request_id: str) -> None: ...


class NoInsteadOfLater(PrefixKVCache):
    def _answer(self, *args: Any) -> Answer:
        answer = super()._answer(*args)
        return Answer.NO if answer is Answer.LATER else answer


class KeepsPoisonedPages(PrefixKVCache):
    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        return super().release(request_id, fences)


class DropsPagesOfOthersWithPoisonedOnes(PrefixKVCache):
    def _retract(self, table: Table) -> None:
        for pool, pages in zip(self._indexes, table.pages, strict=True):
            for page in pages:
                if pool.is_indexed(page):
                    pool.forget(page)


class ResetKeepsHeldPagesIndexed(PrefixKVCache):
    def reset(self) -> int:
        idle = [(pool, page) for pool in self._indexes for page in list(pool.nodes) if not pool.holders[page]]
        for pool, page in idle:
            pool.forget(page)
        return len(idle)


class SecondReleaseRaises(PrefixKVCache):
    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        self._tables[request_id]
        return super().release(request_id, fences, retain)


FOUND_BY_STORIES = {
    MatchIgnoresTheTail: "test_the_tail_is_left_to_be_recomputed",
    NeverHits: "test_an_exact_duplicate_still_computes_a_token",
    SharesKnownTokensThatAreNotComputed: "test_only_verified_full_pages_are_shared",
    GrantsAMatchThatIsOutOfDate: "test_a_match_that_is_out_of_date_is_not_granted",
    ForkSourceIsNotKept: "test_a_fork_copies_the_partial_page_and_shares_the_rest",
    PromisesAreForgotten: "test_granted_leaves_room_for_earlier_promises",
    PromisesAddUp: "test_a_promise_is_kept_against_those_who_ask_afterwards",
    NoInsteadOfLater: "test_fenced_pages_mean_later_and_their_fence_means_granted",
    KeepsPoisonedPages: "test_pages_of_a_poisoned_request_are_dropped",
    DropsPagesOfOthersWithPoisonedOnes: "test_pages_of_a_poisoned_request_are_dropped",
    ResetKeepsHeldPagesIndexed: "test_reset_forgets_cached_pages_and_keeps_held_ones",
    SecondReleaseRaises: "test_a_second_release_is_a_no_op",
}


class OnFault(KVCacheManagerSuite):
    """Not collected: its name does not begin with Test."""

    fault: type[PrefixKVCache]

    def make_manager(self) -> KVCacheManager:
        return self.fault()


@pytest.mark.parametrize("fault", FOUND_BY_STORIES, ids=lambda fault: fault.__name__)
def test_a_story_of_the_kit_finds(fault: type[PrefixKVCache]) -> None:
    suite = OnFault()
    suite.fault = PrefixKVCache
    story = getattr(suite, FOUND_BY_STORIES[fault])
    story()
    suite.fault = fault
    with pytest.raises((AssertionError, KVInvariantError, KeyError)):
        story()
