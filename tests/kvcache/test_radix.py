"""The trie: its shape, what goes first, and that it finds what the hash chain finds."""

import random
from typing import Any

import pytest

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import CacheKey, Grant, KVCacheManager
from hotswap.core.interfaces.page_keys import key_digest, pack
from hotswap.core.testing.kvcache_harness import KEY, LONGEST, PAGE, Harness, prompt
from hotswap.plugins.kvcache import probes
from hotswap.plugins.kvcache.eviction import (
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    SegmentedLRU,
)
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.radix import RadixKVCache

POLICIES = [LeastRecentlyUsed, FirstInFirstOut, LeastFrequentlyUsed, SegmentedLRU]


def harness(kv: KVCacheManager, usable: int = 8, max_model_len: int = LONGEST, **windows: int | None) -> Harness:
    return Harness(kv, usable, windows or {"full": None}, max_model_len)


def shape(kv: RadixKVCache) -> list[tuple[int, int, int]]:
    """(pages before it, its pages, its children) of every edge."""
    return sorted((edge.start, len(edge), len(edge.children)) for edge in kv._trie.edges())


# ---------------------------------------------------------------------- the shape


def test_a_sequence_is_one_edge_and_a_branch_splits_it_at_a_page() -> None:
    kv = RadixKVCache()
    h = harness(kv, usable=40)
    h.run("a", prompt(1))
    assert shape(kv) == [(0, 4, 0)]
    h.run("b", prompt(1, PAGE + 2) + prompt(2, 2 * PAGE))  # branches inside the second page
    assert shape(kv) == [(0, 1, 2), (1, 2, 0), (1, 3, 0)]
    h.run("c", prompt(3))
    assert shape(kv) == [(0, 1, 2), (0, 4, 0), (1, 2, 0), (1, 3, 0)]


def test_a_sequence_that_grows_lengthens_its_edge() -> None:
    kv = RadixKVCache()
    h = harness(kv, usable=40, max_model_len=64)
    h.start("a", prompt(1, PAGE))
    for end in range(PAGE + 1, 64):
        assert isinstance(h.kv.reserve("a", end), Grant)
        h.kv.commit("a", [prompt(1, 64)[end - 1]], end)
    assert shape(kv) == [(0, 15, 0)]
    assert h.match(prompt(1, 64)).cached == 60
    kv.check()


def test_who_is_probed_again_is_not_packed_again_and_a_change_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    monkeypatch.setattr(probes, "pack", lambda tokens: packed.append(len(tokens)) or pack(tokens))
    kv = RadixKVCache()
    h = harness(kv, usable=40, max_model_len=64)
    h.run("a", prompt(1, 40))
    waits = prompt(1, 40)
    limit = len(waits)
    assert [kv.match(waits, KEY, limit).cached for _ in range(5)] == [40] * 5
    assert sum(packed) == 40, "each token once"
    assert kv.match(waits, CacheKey(salt="other"), limit).cached == 0
    waits[PAGE] = 7  # as a list of tokens never does
    assert kv.match(waits, KEY, limit).cached == PAGE
    waits[PAGE:] = prompt(1, 40)[PAGE:] + [3]
    assert kv.match(waits, KEY, limit).cached == 40
    monkeypatch.undo()
    for number in range(1000):
        kv.match(prompt(number, 40), KEY, limit)
    assert len(kv._probes._made) == 16 + probes.WAITING, "no more than may run, and some that wait"


def test_a_split_below_a_request_that_runs_does_not_lose_its_place() -> None:
    kv = RadixKVCache()
    h = harness(kv, usable=40, max_model_len=64)
    h.start("runs", prompt(1, 3 * PAGE))
    h.run("other", prompt(1, PAGE) + prompt(2, PAGE))  # splits the edge above the end of the first
    assert isinstance(h.kv.reserve("runs", 5 * PAGE), Grant)
    h.kv.commit("runs", prompt(1, 64)[3 * PAGE:5 * PAGE], 5 * PAGE)
    assert h.match(prompt(1, 64)).cached == 5 * PAGE
    assert shape(kv) == [(0, 1, 2), (1, 1, 0), (1, 4, 0)]
    kv.check()


def test_each_key_has_a_root_of_its_own_and_an_empty_root_goes() -> None:
    kv = RadixKVCache()
    h = harness(kv, usable=4)
    h.run("a", prompt(1, PAGE), KEY)
    h.run("b", prompt(1, PAGE), CacheKey(salt="other"))
    assert len(kv._trie.roots) == 2
    h.start("c", prompt(2))  # takes every page
    assert kv._trie.roots.keys() == {key_digest(KEY)}


# ---------------------------------------------------------------------- the same as the hash chain


@pytest.mark.parametrize("windows", [{"full": None}, {"full": None, "window": 6}, {"window": 3}])
def test_it_finds_what_the_hash_chain_finds(windows: dict[str, int | None]) -> None:
    """The same random lives in both, with room for all, so that nothing is evicted."""
    rng, hits = random.Random(3), 0
    both = [harness(make(), usable=4000, max_model_len=64, **windows) for make in (PrefixKVCache, RadixKVCache)]
    running: list[str] = []
    for number in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 50))]
        tail = rng.randrange(3) if "full" in windows else 0
        ended = running.pop(rng.randrange(len(running))) if len(running) > 4 else None
        found = []
        for h in both:
            if ended:
                h.kv.release(ended, ())
            found.append(h.match(tokens, tail=tail).cached)
            h.start(str(number), tokens)
            h.kv.check()
        assert found[0] == found[1], tokens
        hits += found[0]
        running.append(str(number))
    assert hits > 300


# ---------------------------------------------------------------------- what goes


def unfindable(h: Harness, prompts: list[list[int]]) -> int:
    """Pages that are cached and that no prompt finds."""
    found = set()
    for tokens in prompts:
        match = h.kv.match([*tokens, 1], KEY, len(tokens))
        found |= set(match.opaque.pages[0]) if match.opaque is not None else set()
    return h.kv.usage().cached - len(found)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_page_is_kept_that_cannot_be_found_whatever_the_policy(policy: Any) -> None:
    lost = {}
    for make in (PrefixKVCache, RadixKVCache):
        h = harness(make(parts={"eviction": policy()}), usable=20, max_model_len=10 * PAGE)
        rng = random.Random(5)
        shared = [rng.randrange(9) for _ in range(4 * PAGE)]
        prompts = [shared[:PAGE * rng.randrange(5)] + [rng.randrange(9) for _ in range(PAGE * rng.randrange(1, 5))]
                   for _ in range(60)]
        lost[make] = 0
        for number, tokens in enumerate(prompts):
            h.run(str(number), tokens)
            lost[make] += unfindable(h, prompts)
    assert lost[RadixKVCache] == 0
    assert (lost[PrefixKVCache] > 0) is (policy is FirstInFirstOut), "the hash chain does lose some under fifo"


def test_a_request_below_duplicates_can_have_the_whole_pool() -> None:
    """Two compute the same beginning at once; the index has the first one's pages, and the second one goes on below
    them. When the first has ended, nobody holds the inner pages: they must go although held ones hang on them."""
    kv = RadixKVCache()
    h = harness(kv, usable=10, max_model_len=10 * PAGE)
    h.ask("first", prompt(1))
    h.ask("second", prompt(1))
    h.kv.commit("first", [], LONGEST)
    h.kv.commit("second", [], LONGEST)
    h.kv.release("first", ())
    assert (h.kv.usage().cached, h.held) == (4, 4)
    assert isinstance(h.kv.reserve("second", 6 * PAGE), Grant)
    h.kv.commit("second", prompt(1, 6 * PAGE)[LONGEST:], 6 * PAGE)
    assert h.match([*prompt(1, 6 * PAGE), 1]).cached == 6 * PAGE
    for end in range(7, 11):
        assert isinstance(h.kv.reserve("second", end * PAGE), Grant), "it starves below the duplicates"
        kv.check()
        h.kv.commit("second", prompt(1, end * PAGE)[(end - 1) * PAGE:], end * PAGE)
        kv.check()
    assert h.match([*prompt(1, 10 * PAGE), 1]).cached == 10 * PAGE, "its own pages took the places of those that went"
    assert (h.held, h.kv.usage().cached) == (10, 0)


def grow_behind_a_place_that_others_have_taken(kv: RadixKVCache) -> None:
    """A running request remembers where its pages have ended in the trie. That edge loses its end and another request
    grows it differently; the first one must not hang its next page on it."""
    h = harness(kv, usable=9, max_model_len=8 * PAGE)
    h.ask("first", prompt(1, 2 * PAGE))
    h.ask("second", prompt(1, 2 * PAGE))  # a duplicate: the index has the first one's pages
    h.kv.commit("first", [], 2 * PAGE)
    h.kv.commit("second", [], 2 * PAGE)
    h.kv.release("first", ())
    h.run("evicts", prompt(2, 6 * PAGE))  # one page of the duplicates goes: the last of their edge
    assert h.match([*prompt(1, 2 * PAGE), 1]).cached == PAGE
    h.run("grows it", prompt(1, PAGE) + prompt(3, PAGE))
    assert isinstance(h.kv.reserve("second", 3 * PAGE), Grant)
    h.kv.commit("second", prompt(1, 3 * PAGE)[2 * PAGE:], 3 * PAGE)
    kv.check()
    assert h.match([*prompt(1, 3 * PAGE), 1]).cached == 3 * PAGE
    assert h.match([*prompt(1, PAGE), *prompt(3, PAGE), *prompt(1, 3 * PAGE)[2 * PAGE:], 1]).cached <= 2 * PAGE


def test_a_place_that_was_evicted_and_taken_by_others_is_not_mistaken_for_the_old_one() -> None:
    grow_behind_a_place_that_others_have_taken(RadixKVCache())


class GrowsAnEdgeThatHasLostItsEnd(RadixKVCache):
    def _adopt_plan(self, *args: Any) -> None:
        super()._adopt_plan(*args)
        shorten = self._trie._shorten

        def unsealed(edge: Any, count: int) -> None:
            shorten(edge, count)
            edge.sealed = False
        self._trie._shorten = unsealed  # type: ignore[method-assign]


def test_that_story_finds_an_edge_that_grows_after_it_has_lost_its_end() -> None:
    with pytest.raises((AssertionError, KVInvariantError, KeyError)):
        grow_behind_a_place_that_others_have_taken(GrowsAnEdgeThatHasLostItsEnd())


def test_what_hangs_on_a_poisoned_page_goes_with_it() -> None:
    h = harness(RadixKVCache(), usable=20, full=None, window=5)
    h.start("poisoned", prompt(1, 2 * PAGE))
    h.kv.release("poisoned", ())
    h.start("reader", prompt(1))
    h.kv.release("reader", (), retain=False)
    assert h.match([*prompt(1), 1]).cached == 2 * PAGE, "those it has found were not its own"
    h.kv.check()


def test_a_hit_costs_no_hashing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr("hotswap.plugins.kvcache.trie.page_digest", refuse)
    h = harness(RadixKVCache(), usable=40)
    h.run("a", prompt(1))
    assert h.match(prompt(1)).cached == 3 * PAGE
    h.kv.keep_events(True)
    with pytest.raises(AssertionError, match="hashed"):  # events name pages by their digests
        h.start("b", prompt(2))


# ---------------------------------------------------------------------- hand-over between the two kinds


@pytest.mark.parametrize("windows", [{"full": None}, {"full": None, "window": 6}])
@pytest.mark.parametrize(("old", "new"), [(PrefixKVCache, RadixKVCache), (RadixKVCache, PrefixKVCache),
                                          (RadixKVCache, RadixKVCache)])
def test_a_trie_and_a_hash_chain_succeed_each_other(old: Any, new: Any, windows: dict[str, int | None]) -> None:
    h, rng = harness(old(), usable=60, **windows), random.Random(1)
    shared = prompt(1, 2 * PAGE)
    prompts = [shared[:PAGE * rng.randrange(3)] + prompt(seed, 2 * PAGE) for seed in range(2, 9)]
    for number, tokens in enumerate(prompts):
        h.run(str(number), tokens)
    h.start("runs", [*shared, *prompt(20, PAGE)])
    successor = harness(new(), usable=60, **windows)
    successor.kv.adopt(h.kv.handover())
    successor.kv.check()
    assert successor.kv.usage() == h.kv.usage()
    for tokens in [*prompts, [*shared, *prompt(20, PAGE)]]:
        assert successor.match([*tokens, 1]).cached == h.match([*tokens, 1]).cached > 0
    successor.kv.release("runs", ())
    successor.start("fills", prompt(30))
    successor.kv.check()
