"""The kit runs random lives of requests over a cache whose every slot is checked; then what is its own."""

from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.testing.kvcache import KVCacheManagerSuite
from hotswap.core.testing.kvcache_harness import prompt
from hotswap.core.testing.rig import build
from hotswap_mypart import MyPart


class TestMyPart(KVCacheManagerSuite):
    def make_manager(self) -> MyPart:
        return MyPart(MyPart.Options(), {"inner": build("kvcache", "prefix")})

    def test_who_brings_no_salt_finds_nothing_and_who_brings_the_same_does(self) -> None:
        h = self.harness()
        for salt in ("", "mine"):
            h.run(salt, prompt(1), CacheKey(salt=salt))
        assert h.match(prompt(1), CacheKey()).cached == 0
        assert h.match(prompt(1), CacheKey(salt="mine")).cached > 0
        assert h.match(prompt(1), CacheKey(salt="yours")).cached == 0
