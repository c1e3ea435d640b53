"""The stock managers and policies pass the kit, as any plugin author's would."""

from hotswap.core.interfaces.kvcache import EvictionPolicy, KVCacheManager
from hotswap.core.testing.eviction import EvictionPolicySuite
from hotswap.core.testing.kvcache import KVCacheManagerSuite
from hotswap.plugins.kvcache.contiguous import ContiguousKVCache
from hotswap.plugins.kvcache.eviction import (
    FirstInFirstOut,
    LeastFrequentlyUsed,
    LeastRecentlyUsed,
    SegmentedLRU,
)
from hotswap.plugins.kvcache.paged import PagedKVCache
from hotswap.plugins.kvcache.prefix import PrefixKVCache
from hotswap.plugins.kvcache.radix import RadixKVCache


class TestContiguous(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return ContiguousKVCache()


class TestPaged(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return PagedKVCache()


class TestPrefix(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return PrefixKVCache(PrefixKVCache.Options(share_pending=1))


class TestPrefixWithFirstInFirstOut(KVCacheManagerSuite):
    machine_examples = 40

    def make_manager(self) -> KVCacheManager:
        return PrefixKVCache(parts={"eviction": FirstInFirstOut()})


class TestPrefixWithLeastFrequentlyUsed(KVCacheManagerSuite):
    machine_examples = 40

    def make_manager(self) -> KVCacheManager:
        return PrefixKVCache(parts={"eviction": LeastFrequentlyUsed()})


class TestPrefixWithSegmentedLRU(KVCacheManagerSuite):
    machine_examples = 40

    def make_manager(self) -> KVCacheManager:
        return PrefixKVCache(parts={"eviction": SegmentedLRU()})


class TestRadix(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return RadixKVCache(RadixKVCache.Options(share_pending=1))


class TestRadixWithFirstInFirstOut(KVCacheManagerSuite):
    """Which wants to evict the first page of a sequence first: the trie gives it the last one instead."""

    machine_examples = 40

    def make_manager(self) -> KVCacheManager:
        return RadixKVCache(parts={"eviction": FirstInFirstOut()})


class TestRadixWithLeastFrequentlyUsed(KVCacheManagerSuite):
    machine_examples = 40

    def make_manager(self) -> KVCacheManager:
        return RadixKVCache(parts={"eviction": LeastFrequentlyUsed()})


class TestRadixWithSegmentedLRU(KVCacheManagerSuite):
    machine_examples = 40

    def make_manager(self) -> KVCacheManager:
        return RadixKVCache(parts={"eviction": SegmentedLRU()})


class TestLeastRecentlyUsed(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LeastRecentlyUsed()


class TestFirstInFirstOut(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return FirstInFirstOut()


class TestLeastFrequentlyUsed(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LeastFrequentlyUsed()


class TestSegmentedLRU(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return SegmentedLRU()


class TestSegmentedLRUWithATinyProtectedSegment(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return SegmentedLRU(SegmentedLRU.Options(protected=0.2))
