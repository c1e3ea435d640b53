"""A KV-cache manager: which page of the cache belongs to whom."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part
from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CacheEvent,
    CacheKey,
    CachePlan,
    CacheSpec,
    CacheUsage,
    Fence,
    Grant,
    KVCacheManager,
    KVState,
    Match,
)
from hotswap.core.interfaces.scheduler import Answer

NO_MATCH = Match(cached=0, pending=0)


class MyPart(KVCacheManager):
    """Prefixes are reused among requests that bring the same ``cache_salt``, and by no others.

    Choose it ... (where clients must not learn from the time to the first token what others have asked).

    It wraps another manager and changes one answer. One that starts from nothing has these methods, too: see
    hotswap's ``docs/kinds/kvcache.md`` for what each of them promises.
    """

    class Options(ComponentOptions):
        inner: Annotated[ComponentRef, Part("kvcache")] = ComponentRef(use="prefix")
        """The manager that owns the pages."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.inner: KVCacheManager = self.parts["inner"]  # built by core, with its own options

    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        """What of a prompt lies in the cache: nothing for those who bring no salt."""
        return self.inner.match(tokens, key, limit, tail) if key.salt else NO_MATCH

    # Everything else is the inner manager's.

    def describe(self) -> Description:
        return self.inner.describe()

    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        return self.inner.configure(specs, num_bytes, constraints)

    def begin_plan(self) -> None:
        self.inner.begin_plan()

    def reserve(
        self, request_id: str, upto: int, match: Match | None = None, key: CacheKey | None = None,
        tokens: Sequence[int] = (),
    ) -> Grant | Answer:
        return self.inner.reserve(request_id, upto, match, key, tokens)

    def fork(self, parent: str, child: str, upto: int, fence: Fence) -> Grant | Answer:
        return self.inner.fork(parent, child, upto, fence)

    def commit(self, request_id: str, new_tokens: Sequence[int], verified: int) -> int:
        return self.inner.commit(request_id, new_tokens, verified)

    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        return self.inner.release(request_id, fences, retain)

    def table(self, request_id: str) -> Grant:
        return self.inner.table(request_id)

    def undo(self, entry: Any) -> None:
        self.inner.undo(entry)

    def shrink(self, request_id: str, upto: int, fences: Iterable[Fence]) -> None:
        self.inner.shrink(request_id, upto, fences)

    def on_fence(self, fence: Fence) -> None:
        self.inner.on_fence(fence)

    def handover(self) -> KVState:
        return self.inner.handover()

    def adopt(self, state: KVState) -> None:
        self.inner.adopt(state)

    def reset(self) -> int:
        return self.inner.reset()

    def usage(self) -> CacheUsage:
        return self.inner.usage()

    def owners(self) -> dict[str, int]:
        return self.inner.owners()

    def check(self) -> None:
        self.inner.check()

    def events(self) -> list[CacheEvent]:
        return self.inner.events()

    def keep_events(self, keep: bool) -> None:
        self.inner.keep_events(keep)
