"""What managers that reuse prefixes share: eviction, what a match binds, reset, events. Subclasses keep the index."""

from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Annotated, Any, ClassVar, Generic, TypeVar

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part
from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CacheEvent,
    CacheKey,
    CachePlan,
    CacheSpec,
    Coming,
    EvictionPolicy,
    Fence,
    Grant,
    Match,
)
from hotswap.core.interfaces.scheduler import Answer
from hotswap.plugins.kvcache.coming import ComingPages
from hotswap.plugins.kvcache.eviction import LeastRecentlyUsed
from hotswap.plugins.kvcache.fences import Batch
from hotswap.plugins.kvcache.index import CachingPool
from hotswap.plugins.kvcache.paged import PagedKVCache
from hotswap.plugins.kvcache.pool import PagePool
from hotswap.plugins.kvcache.tables import NEVER, Table

Pool = TypeVar("Pool", bound=CachingPool[Any])


class ReuseOptions(ComponentOptions):
    eviction: Annotated[ComponentRef, Part("eviction_policy")] = ComponentRef(use="lru")
    """Which cached page goes first when an empty one is needed."""
    share_pending: Annotated[int, Field(ge=1)] | None = 64
    """A request that has at least so many tokens in common with what another one is computing waits for them, instead
    of computing them, too. None: it never waits."""


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
        self._coming = ComingPages()

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
    def _page_keys(self, table: Table, begin: int, end: int) -> list[Hashable]:
        """Keys of a table's logical pages, for :class:`ComingPages`."""

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
        self._coming.clear()
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

    # ------------------------------------------------------------------ what is being computed

    def _find_coming(
        self, key: Callable[[int], Hashable], cached: int, begin: int, most: int, tail: int,
    ) -> Coming | None:
        """Of ``most`` pages that could be reused, the first ``begin`` are in the index, and ``cached`` tokens can be
        reused now: how many can be once a running request has computed those that follow.

        What counts is how much they have in common that the other one computes, and not how much of it is left to
        come: else all who wait would stop waiting shortly before its end, and compute that."""
        run = self._coming.find(key, begin, most) if self._coming and begin < most else None
        if run is None:
            return None
        size = self._page_size
        tokens = max(0, run.end * size - tail) // size * size
        return Coming(run.request, tokens) if tokens > cached and (
            tokens - run.first * size >= self.options.share_pending) else None

    def _announce(self, request_id: str, table: Table) -> None:
        """A request will compute the full pages of its known tokens, and publish them."""
        first, begin, end = table.inherited, table.published, len(table.tokens) // self._page_size
        least = self.options.share_pending
        if least is not None and begin < end and (end - first) * self._page_size >= least:
            self._coming.announce(request_id, first, end, self._page_keys(table, begin, end))

    def _admit(
        self, request_id: str, upto: int, match: Match, key: CacheKey | None, tokens: Sequence[int]
    ) -> Grant | Answer:
        grant = super()._admit(request_id, upto, match, key, tokens)
        if isinstance(grant, Grant):
            self._announce(request_id, self._tables[request_id])
        return grant

    def _undo_admit(self, request_id: str, table: Table, shared: Sequence[Sequence[int]]) -> None:
        super()._undo_admit(request_id, table, shared)
        self._coming.withdraw(request_id)

    def _advance(self, request_id: str, table: Table) -> None:
        super()._advance(request_id, table)
        self._coming.arrived(request_id, table.published)

    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        self._coming.withdraw(request_id)
        return super().release(request_id, fences, retain)

    def _undo_release(self, request_id: str, table: Table, batch: Batch | None) -> None:
        super()._undo_release(request_id, table, batch)
        self._announce(request_id, table)

    def check(self) -> None:
        super().check()
        tables = self._tables
        self._coming.check(lambda request_id: tables[request_id].published if request_id in tables else None)

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
