"""What managers that reuse prefixes share: eviction, what a match binds, reset, events. Subclasses keep the index."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part
from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CacheEvent,
    CacheKey,
    CachePlan,
    CacheSpec,
    EvictionPolicy,
    Match,
)
from hotswap.plugins.kvcache.eviction import LeastRecentlyUsed
from hotswap.plugins.kvcache.index import CachingPool
from hotswap.plugins.kvcache.paged import PagedKVCache
from hotswap.plugins.kvcache.pool import PagePool
from hotswap.plugins.kvcache.tables import NEVER, Table

Pool = TypeVar("Pool", bound=CachingPool[Any])


class ReuseOptions(ComponentOptions):
    eviction: Annotated[ComponentRef, Part("eviction_policy")] = ComponentRef(use="lru")
    """Which cached page goes first when an empty one is needed."""


class ReusingKVCache(PagedKVCache, Generic[Pool]):
    """Not a component yet: see its subclasses.

    What a match finds (``Match.opaque``) has ``tokens``, ``key``, the ``pages`` per group, and ``removals``.
    """

    Options: ClassVar[type[ComponentOptions]] = ReuseOptions

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._policy: EvictionPolicy = self.parts.get("eviction") or LeastRecentlyUsed()
        self._indexes: list[Pool] = []
        self._full: list[Pool] = []
        self._events: list[CacheEvent] | None = None

    def describe(self) -> Description:
        return Description(offers=super().describe().offers | {"prefix_reuse"})

    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        self._indexes = []
        plan = super().configure(specs, num_bytes, constraints)
        windowed = {number for number, _ in self._windows}
        self._full = [pool for number, pool in enumerate(self._indexes) if number not in windowed]
        return plan

    def _new_pool(self, group: str, num_pages: int) -> PagePool:
        pool = self._make_index(group, num_pages)
        self._indexes.append(pool)
        return pool

    # ------------------------------------------------------------------ what a subclass decides

    @abstractmethod
    def _make_index(self, group: str, num_pages: int) -> Pool:
        """The pool of a group, with a clone of the policy."""

    @abstractmethod
    def _still_there(self, cached: int, hit: Any) -> bool:
        """Are the pages of a match still in the index, with the content that was found?"""

    @abstractmethod
    def _own_chain(self, table: Table, cached: int, hit: Any) -> Any:
        """What the table keeps of the index. ValueError where ``hit`` was made for other tokens."""

    @abstractmethod
    def _clear(self) -> int:
        """Empty the index. Returns how many of its pages nobody used."""

    # ------------------------------------------------------------------ bind, reset, fork

    def _removals(self) -> int:
        return sum(pool.removals for pool in self._indexes)

    def _bind(self, match: Match, key: CacheKey | None, tokens: Sequence[int]) -> Table | None:
        hit = match.opaque
        if hit is not None and hit.removals != self._removals() and not self._still_there(match.cached, hit):
            return None
        if hit is not None and not tokens:
            tokens = hit.tokens
        table = super()._bind(match, key or (hit.key if hit is not None else None), tokens)
        assert table is not None
        table.chain = self._own_chain(table, match.cached, hit)
        table.verified = match.cached
        if hit is not None:
            end = table.end = table.inherited = table.published = match.cached // self._page_size
            # With tokens pending behind them, a window may reach back over fewer of the pages that were found.
            table.pages = [pages[max(0, first - end + len(pages)):]
                           for first, pages in zip(table.first, hit.pages, strict=True)]
        return table

    def reset(self) -> int:
        dropped = self._clear()
        for table in self._tables.values():
            # What runs now was computed before the reset and must not come back into the index.
            table.published = NEVER
            table.due = self._next_due(table, NEVER)
        if self._events is not None:
            for pool in self._indexes:
                pool.removed = []
                self._events.append(CacheEvent("reset", pool.group, page_size=self._page_size))
        return dropped

    def _forked(self, source: Table, upto: int, first: list[int], shared: Sequence[Sequence[int]]) -> Table:
        table = super()._forked(source, upto, first, shared)
        if source.published == NEVER:
            table.published = NEVER
        return table

    # ------------------------------------------------------------------ events

    def keep_events(self, keep: bool) -> None:
        self._events = [] if keep else None
        for pool in self._indexes:
            pool.removed = [] if keep else None

    def events(self) -> list[CacheEvent]:
        if self._events is None:
            return []
        for pool in self._indexes:
            self._collect_evicted(pool)
        events, self._events = self._events, []
        return events

    def _tell(self, kind: str, pool: Pool, digests: Sequence[bytes]) -> None:
        if self._events is not None and digests:
            self._collect_evicted(pool)
            self._events.append(self._event(kind, pool, digests))

    def _collect_evicted(self, pool: Pool) -> None:
        if self._events is not None and pool.removed:
            self._events.append(self._event("evicted", pool, pool.removed))
            pool.removed = []

    def _event(self, kind: str, pool: Pool, digests: Sequence[bytes]) -> CacheEvent:
        return CacheEvent(kind, pool.group, tuple(digest.hex() for digest in digests), self._page_size)
