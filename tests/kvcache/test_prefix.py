"""The prefix indexes: keys, hits, evictions, and the faults that other servers' prefix caches had."""

import hashlib
import random
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from hotswap.core.interfaces.kvcache import CacheKey, Grant, KVCacheManager
from hotswap.core.interfaces.page_keys import key_digest, page_digest
from hotswap.core.interfaces.scheduler import Answer
from hotswap.core.testing.kvcache_harness import KEY, LONGEST, PAGE, Harness, prompt
from hotswap.core.testing.kvcache_machine import KVCacheMachine
from hotswap.plugins.kvcache.chain import Chain
from hotswap.plugins.kvcache.eviction import FirstInFirstOut
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.radix import RadixKVCache

each_manager = pytest.mark.parametrize("make", [PrefixKVCache, RadixKVCache])
SOURCES = Path(__file__).parents[2] / "src"


def harness(kv: KVCacheManager | None = None, usable: int = 8, max_model_len: int = LONGEST,
            **windows: int | None) -> Harness:
    return Harness(kv or PrefixKVCache(), usable, windows or {"full": None}, max_model_len)


def digests(tokens: list[int], key: CacheKey = KEY) -> list[bytes]:
    chain = Chain(tokens, key, PAGE, page_digest)
    chain.grow(len(tokens) // PAGE)
    return [node.digest for node in chain.nodes[1:]]


# ---------------------------------------------------------------------- keys


def test_a_key_is_the_sha256_of_its_parent_and_its_tokens() -> None:
    first = hashlib.sha256(key_digest(KEY) + struct.pack("<4I", 1, 2, 3, 70000)).digest()
    second = hashlib.sha256(first + struct.pack("<4I", 5, 6, 7, 8)).digest()
    assert digests([1, 2, 3, 70000, 5, 6, 7, 8, 9]) == [first, second]


def test_two_fresh_interpreters_agree_on_a_key() -> None:
    program = ("from hotswap.core.interfaces.kvcache import CacheKey\n"
               "from hotswap.core.interfaces.page_keys import page_digest\n"
               "from hotswap.plugins.kvcache.chain import Chain\n"
               "chain = Chain(list(range(8)), CacheKey('r', 'd', 'a', 's'), 4, page_digest)\n"
               "chain.grow(2)\n"
               "print(chain.nodes[-1].digest.hex())\n")
    outputs = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                              env={"PYTHONPATH": str(SOURCES), "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    assert outputs[0] == outputs[1] and len(outputs[0].strip()) == 64


def test_the_fields_of_a_key_do_not_run_together() -> None:
    assert key_digest(CacheKey("a", "bc")) != key_digest(CacheKey("ab", "c"))
    assert key_digest(CacheKey(adapter="x")) != key_digest(CacheKey(salt="x"))


def test_many_contents_have_as_many_keys() -> None:
    contents = range(70_000)
    assert len({page_digest(b"", struct.pack("<I", content)) for content in contents}) == len(contents)
    assert len(page_digest(b"", b"")) * 8 == 256


@each_manager
def test_another_salt_never_sees_what_the_first_has_cached(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=16)
    cached = []
    for salt in ("s1", "s1", "s2"):
        key = CacheKey(salt=salt)
        cached.append(h.match(prompt(1), key).cached)
        h.run(f"{salt}-{len(cached)}", prompt(1), key)
    assert cached == [0, LONGEST - PAGE, 0]


class ConstantDigest(PrefixKVCache):
    """The worst of all hashes: every page has the same."""

    @staticmethod
    def digest(parent: bytes, tokens: bytes) -> bytes:
        return b"7"


def test_with_a_hash_that_always_collides_only_equal_tokens_hit() -> None:
    h = harness(ConstantDigest(), usable=16)
    h.start("a", prompt(1))
    assert h.match(prompt(1)).cached == PAGE, "one page a digest is all that such a hash can hold"
    assert h.match(prompt(2)).cached == 0
    same_page_twice = prompt(1)[:PAGE] * 2 + [1]
    assert h.match(same_page_twice).cached == PAGE, "equal tokens at another place are another history"
    assert h.match(prompt(1), CacheKey(salt="other")).cached == 0
    h.run("b", prompt(2))
    h.kv.check()


def test_with_a_hash_that_always_collides_random_lives_read_only_what_they_wrote() -> None:
    class Machine(KVCacheMachine):
        make_manager = ConstantDigest

    run_state_machine_as_test(Machine, settings=settings(
        max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck)))


# ---------------------------------------------------------------------- hits


@each_manager
def test_a_long_prompt_sent_twice_is_nearly_all_cached(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=200, max_model_len=600)
    h.run("a", list(range(600)))
    assert h.match(list(range(600))).cached >= 540


def test_matching_stops_at_the_first_page_that_is_missing() -> None:
    kv = PrefixKVCache()
    h = harness(kv)
    tokens = prompt(1, 4 * PAGE)
    h.run("a", tokens)
    index = kv._indexes[0]
    index.forget(index.pages[digests(tokens)[2]])
    assert h.match([*tokens, 1]).cached == 2 * PAGE
    kv.check()


def test_a_page_that_comes_back_joins_what_hung_on_it() -> None:
    kv = PrefixKVCache()
    h = harness(kv)
    tokens = prompt(1)
    h.run("a", tokens)
    index = kv._indexes[0]
    index.forget(index.pages[digests(tokens)[0]])
    h.run("b", tokens[:PAGE])
    assert h.match([*tokens, 1]).cached == LONGEST


@each_manager
def test_after_much_churn_every_hit_holds_the_tokens_that_it_is_taken_for(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=40, max_model_len=40 * PAGE)
    content: dict[int, tuple[int, ...]] = {}
    rng, hits = random.Random(1), 0
    for number in range(500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 8))] * PAGE + [number % 7]
        h.kv.begin_plan()
        match = h.match(tokens)
        grant = h.kv.reserve(str(number), len(tokens), match, KEY, tokens)
        assert isinstance(grant, Grant)
        for logical, page in enumerate(grant.groups["full"].pages):
            history = tuple(tokens[:(logical + 1) * PAGE])
            if logical * PAGE < match.cached:
                assert content[page] == history, f"request {number}: page {page} holds something else"
                hits += 1
            content[page] = history
        h.kv.commit(str(number), [], len(tokens))
        h.kv.release(str(number), ())
        h.kv.check()
    assert hits > 50


@each_manager
def test_a_duplicate_in_flight_neither_hits_nor_enters_twice(make: type[KVCacheManager]) -> None:
    h = harness(make())
    h.ask("a", prompt(1))
    h.ask("b", prompt(1))
    assert h.held == 8
    h.kv.commit("a", [], LONGEST)
    h.kv.commit("b", [], LONGEST)
    h.kv.release("b", ())
    assert h.kv.usage().free == 4, "b's pages were copies that nobody could find"
    h.kv.release("a", ())
    assert h.kv.usage().cached == 4
    h.kv.check()


@each_manager
def test_a_hit_after_a_preemption_spares_the_recomputation(make: type[KVCacheManager]) -> None:
    h = harness(make())
    h.start("a", prompt(1, 9))
    h.kv.commit("a", [7, 8, 9], 12)
    h.kv.release("a", {1})
    h.kv.on_fence(1)
    assert h.match([*prompt(1, 9), 7, 8, 9]).cached == 8
    assert h.match([*prompt(1, 9), 7, 8, 9, 10]).cached == 12


# ---------------------------------------------------------------------- hashing once


class Counting(PrefixKVCache):
    hashed = 0

    @staticmethod
    def digest(parent: bytes, tokens: bytes) -> bytes:
        Counting.hashed += 1
        return page_digest(parent, tokens)


@pytest.fixture
def counting() -> Harness:
    Counting.hashed = 0
    return harness(Counting(), usable=32, max_model_len=64)


def test_match_and_commit_hash_each_page_once(counting: Harness) -> None:
    counting.start("a", prompt(1, 64))
    assert Counting.hashed == 16
    counting.kv.commit("a", [], 64)
    counting.start("b", prompt(1, 64))
    assert Counting.hashed == 32


def test_a_waiting_request_is_not_hashed_again_in_every_plan(counting: Harness) -> None:
    counting.run("a", prompt(1, 64))
    tokens = prompt(1, 63)
    Counting.hashed = 0
    for _ in range(10):
        assert counting.kv.match(tokens, KEY, 62).cached == 60
    assert Counting.hashed == 15
    tokens += [prompt(1, 64)[-1], 5]
    assert counting.kv.match(tokens, KEY, 64).cached == 64, "the list has grown"
    assert Counting.hashed == 16


def test_a_miss_hashes_no_more_than_it_must(counting: Harness) -> None:
    counting.match(prompt(3, 64))
    assert Counting.hashed == 1


@each_manager
def test_a_list_whose_tokens_were_exchanged_is_hashed_anew(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=16)
    h.run("a", prompt(1))
    h.run("b", prompt(2))
    tokens = prompt(1)
    assert h.kv.match(tokens, KEY, 15).cached == 12
    tokens[1] += 1
    assert h.kv.match(tokens, KEY, 15).cached == 0
    tokens[:] = prompt(2)
    match = h.kv.match(tokens, KEY, 15)
    assert match.cached == 12
    assert isinstance(h.kv.reserve("c", LONGEST, match, KEY, tokens), Grant)
    h.kv.check()


@each_manager
def test_requests_that_share_one_list_do_not_share_their_future(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=16)
    tokens = prompt(1, 7)
    matches = [h.kv.match(tokens, KEY, 6) for _ in "ab"]
    for request_id, match in zip("ab", matches, strict=True):
        h.kv.reserve(request_id, 8, match, KEY, tokens)
    h.kv.commit("a", [1], 8)
    h.kv.commit("b", [2], 8)
    h.kv.check()
    assert tokens == prompt(1, 7)
    assert [h.match([*tokens, last, 9]).cached for last in (1, 2, 3)] == [8, 8, 4]


@each_manager
def test_a_match_for_other_tokens_is_refused(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=16)
    h.run("a", prompt(1))
    with pytest.raises(ValueError, match="other tokens"):
        h.kv.reserve("b", LONGEST, h.match(prompt(1)), KEY, prompt(2))
    with pytest.raises(ValueError, match="another key"):
        h.kv.reserve("b", LONGEST, h.match(prompt(1)), CacheKey(salt="x"), prompt(1))


# ---------------------------------------------------------------------- eviction


def cached_after(kv: KVCacheManager, lives: Sequence[str]) -> list[int]:
    """Runs requests "1" and "2" with one full page each in this order, then one must go: says who is still cached."""
    h = harness(kv, usable=4)
    for life in lives:
        h.run(life, [*prompt(int(life), PAGE), 1])
    h.start("big", prompt(9, 3 * PAGE))
    return [seed for seed in (1, 2) if h.match([*prompt(seed, PAGE), 1]).cached]


@each_manager
def test_the_policy_decides_what_goes(make: Any) -> None:
    assert cached_after(make(), "121") == [1]
    assert cached_after(make(parts={"eviction": FirstInFirstOut()}), "121") == [2]


def test_each_group_has_a_policy_of_its_own() -> None:
    kv = PrefixKVCache(parts={"eviction": FirstInFirstOut()})
    harness(kv, full=None, window=5)
    policies = [index.policy for index in kv._indexes]
    assert len({id(policy) for policy in policies}) == 2
    assert all(isinstance(policy, FirstInFirstOut) for policy in policies)


@each_manager
def test_a_sequence_loses_its_tail_before_its_head(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=4)
    h.run("a", prompt(1))
    h.start("b", prompt(2, 2 * PAGE))
    assert h.match([*prompt(1), 1]).cached == 2 * PAGE


@each_manager
def test_a_hit_page_is_never_evicted_for_the_request_that_hit_it(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=4)
    h.run("a", prompt(1, 2 * PAGE))
    h.run("b", prompt(2, 2 * PAGE))
    tokens = [*prompt(1, 2 * PAGE), *prompt(3, 2 * PAGE)]
    assert isinstance(h.start("c", tokens), Grant)
    assert h.match([*tokens, 1]).cached == LONGEST
    h.kv.check()


@each_manager
def test_a_grant_counts_pages_that_leave_the_cache_because_they_are_shared(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=4)
    h.run("a", prompt(1))
    h.start("b", prompt(2, PAGE))
    assert h.ask("c", prompt(1)) is Answer.NO, "three shared and one new page do not fit beside b's"
    h.kv.check()


# ---------------------------------------------------------------------- hand-over


@each_manager
def test_events_name_the_pages_by_their_digests(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=4)
    h.kv.keep_events(True)
    h.run("a", prompt(1))
    h.run("b", prompt(2))
    stored, evicted, stored_again = h.kv.events()
    keys = [digest.hex() for digest in digests(prompt(1))]
    assert (stored.kind, stored.group, list(stored.keys)) == ("stored", "full", keys)
    assert (evicted.kind, list(evicted.keys)) == ("evicted", keys[::-1])
    assert list(stored_again.keys) == [digest.hex() for digest in digests(prompt(2))]


@each_manager
def test_a_hand_over_lists_parents_before_children(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=32, full=None, window=5)
    for seed in (1, 2):
        h.run(str(seed), prompt(seed))
    for group in ("full", "window"):
        seen = {key_digest(KEY)}
        for entry in (entry for entry in h.kv.handover().cached if entry.group == group):
            assert entry.parent in seen or group == "window"
            seen.add(page_digest(entry.parent, struct.pack("<4I", *entry.tokens)))


@each_manager
def test_the_keys_of_a_predecessor_are_found_in_a_group_with_a_window(make: type[KVCacheManager]) -> None:
    h = harness(make(), usable=16, window=5)
    h.run("a", prompt(1))
    successor = harness(make(), usable=16, window=5)
    successor.kv.adopt(h.kv.handover())
    assert successor.match([*prompt(1), 1]).cached == h.match([*prompt(1), 1]).cached == LONGEST
