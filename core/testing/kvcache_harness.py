"""A configured KV manager, and the few steps that most tests take with it."""

from collections.abc import Iterable, Mapping, Sequence

from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CacheKey,
    CachePlan,
    CacheSpec,
    Fence,
    Grant,
    KVCacheManager,
    Match,
)
from hotswap.core.interfaces.page_keys import key_digest, pack, page_digest
from hotswap.core.interfaces.scheduler import Answer

PAGE = 4
LONGEST = 4 * PAGE
KEY = CacheKey(model_revision="r1", dtype="bfloat16", adapter="a", salt="s")


class Harness:
    def __init__(
        self, kv: KVCacheManager, usable: int, windows: Mapping[str, int | None], max_model_len: int = LONGEST
    ) -> None:
        self.kv = kv
        specs = [CacheSpec(group, (0,), 1, 8, 32, "window" if window else "full", window)
                 for group, window in windows.items()]
        limits = CacheConstraints(max_model_len, 16, page_size=PAGE, num_pages=usable + 1)
        self.plan: CachePlan = kv.configure(specs, 0, limits)
        self.kv.begin_plan()

    def match(self, tokens: Sequence[int], key: CacheKey = KEY, tail: int = 0) -> Match:
        return self.kv.match(list(tokens), key, len(tokens) - 1, tail)

    def start(self, request_id: str, tokens: Sequence[int], key: CacheKey = KEY) -> Grant | Answer:
        """Match and reserve, and where granted compute all of ``tokens``."""
        grant = self.ask(request_id, tokens, key)
        if isinstance(grant, Grant):
            self.kv.commit(request_id, [], len(tokens))
        return grant

    def ask(self, request_id: str, tokens: Sequence[int], key: CacheKey = KEY) -> Grant | Answer:
        return self.kv.reserve(request_id, len(tokens), self.match(tokens, key), key, list(tokens))

    def run(self, request_id: str, tokens: Sequence[int], key: CacheKey = KEY, fences: Iterable[Fence] = (),
            retain: bool = True) -> None:
        """A whole life."""
        assert isinstance(self.start(request_id, tokens, key), Grant), "there should have been room"
        self.kv.release(request_id, fences, retain)
        self.kv.check()

    @property
    def held(self) -> int:
        return self.kv.usage().held


def digests(tokens: Sequence[int], key: CacheKey = KEY) -> list[bytes]:
    """The keys of the full pages of ``tokens``."""
    found = [key_digest(key)]
    for begin in range(0, len(tokens) - PAGE + 1, PAGE):
        found.append(page_digest(found[-1], pack(tokens[begin : begin + PAGE])))
    return found[1:]


def prompt(seed: int, length: int = LONGEST) -> list[int]:
    return [seed * 1000 + i for i in range(length)]
