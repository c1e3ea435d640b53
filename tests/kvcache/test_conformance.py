"""The stock managers and policies pass the kit, as any plugin author's would."""

from hotswap.core.interfaces.kvcache import EvictionPolicy, KVCacheManager
from hotswap.core.testing.eviction import EvictionPolicySuite
from hotswap.core.testing.kvcache import KVCacheManagerSuite
from hotswap.plugins.kvcache.contiguous import ContiguousKVCache
from hotswap.plugins.kvcache.eviction import FirstInFirstOut, LeastRecentlyUsed
from hotswap.plugins.kvcache.paged import PagedKVCache
from hotswap.plugins.kvcache.prefix import PrefixKVCache


class TestContiguous(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return ContiguousKVCache()


class TestPaged(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return PagedKVCache()


class TestPrefix(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return PrefixKVCache()


class TestPrefixWithFirstInFirstOut(KVCacheManagerSuite):
    def make_manager(self) -> KVCacheManager:
        return PrefixKVCache(parts={"eviction": FirstInFirstOut()})


class TestLeastRecentlyUsed(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return LeastRecentlyUsed()


class TestFirstInFirstOut(EvictionPolicySuite):
    def make_policy(self) -> EvictionPolicy:
        return FirstInFirstOut()
