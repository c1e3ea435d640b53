"""What all managers here share: page tables of requests, the answers to reserve, fences, and undo.

A manager on top of it decides how many pages a request needs, what of them can be shared, and what it offers.
"""

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kvcache import (
    NOTHING,
    CacheConstraints,
    CacheKey,
    CachePlan,
    CacheSpec,
    CacheUsage,
    Fence,
    Grant,
    GroupGrant,
    KVCacheManager,
    Match,
)
from hotswap.core.interfaces.scheduler import Answer
from hotswap.plugins.kvcache.audit import check_pools
from hotswap.plugins.kvcache.fences import Batch, FenceQueue
from hotswap.plugins.kvcache.pool import PagePool
from hotswap.plugins.kvcache.sizing import pages_for, plan_pages

logger = logging.getLogger(__name__)

NEVER = sys.maxsize
"""A token count that no request reaches."""


class Table:
    """One request's pages. In group number g they are the logical pages ``first[g] .. end - 1``; ``end`` is the same
    for all groups, and the worker knows all pages below it.

    ``due`` is the verified length at which :meth:`TableKVCache.commit` has more to do than to append tokens.
    """

    __slots__ = (
        "capacity", "chain", "due", "end", "first", "inherited", "key", "pages", "published", "tokens", "verified",
    )

    def __init__(self, key: CacheKey, tokens: list[int], first: list[int], pages: list[list[int]], verified: int = 0):
        self.key = key
        self.tokens = tokens
        self.first = first
        self.pages = pages
        self.verified = verified
        self.end = 0  # logical pages
        self.capacity = 0  # tokens
        self.due = NEVER  # tokens
        self.inherited = 0  # logical pages that others computed
        self.published = 0  # logical pages that have been offered to the index
        self.chain: Any = None  # what an index keeps beside the tokens


class TableKVCache(KVCacheManager):
    """Page tables over one pool a group. Not a component yet: see its subclasses."""

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._page_size = 0
        self._pools: list[PagePool] = []
        self._windows: list[tuple[int, int]] = []  # (group number, window) of the groups that have one
        self._tables: dict[str, Table] = {}
        self._fences = FenceQueue()
        self._promises: dict[str, list[int]] = {}

    def describe(self) -> Description:
        return Description(offers=frozenset({"tables"}))

    # ------------------------------------------------------------------ what a subclass decides

    def _new_pool(self, group: str, num_pages: int) -> PagePool:
        return PagePool(group, num_pages)

    def _bind(self, match: Match, key: CacheKey | None, tokens: Sequence[int]) -> Table | None:
        """A table for a new request that lists the pages it shares, not held yet. None: the match is out of date."""
        first = self._first_pages(match.cached + match.pending)
        table = Table(key or CacheKey(), list(tokens), first, [[] for _ in self._pools])
        table.end = max(first)
        return table

    def _wanted(self, upto: int) -> int:
        """Logical pages that a request of ``upto`` tokens needs."""
        return pages_for(upto, self._page_size)

    def _publish(self, table: Table) -> int:
        """Offer the verified full pages to an index. Returns the verified length at which there will be more."""
        return NEVER

    def _retract(self, table: Table) -> None:
        """Take this request's pages out of the index, except those that others hold."""

    # ------------------------------------------------------------------ sizes

    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        plan = plan_pages(specs, num_bytes, constraints)
        self._adopt_plan(plan, specs)
        return plan

    def _adopt_plan(self, plan: CachePlan, specs: Sequence[CacheSpec]) -> None:
        self._page_size = next(iter(plan.groups.values())).page_size
        self._pools = [self._new_pool(group, sizes.num_pages) for group, sizes in plan.groups.items()]
        self._windows = [(number, spec.window) for number, spec in enumerate(specs) if spec.window is not None]

    def _first_pages(self, position: int) -> list[int]:
        """The first logical page that a query at ``position`` sees, per group."""
        first = [0] * len(self._pools)
        for number, window in self._windows:
            first[number] = self._first_page(position, window)
        return first

    def _first_page(self, position: int, window: int) -> int:
        return max(0, position - window + 1) // self._page_size

    # ------------------------------------------------------------------ reserve

    def begin_plan(self) -> None:
        if self._promises:
            self._promises.clear()
            for pool in self._pools:
                pool.promised = 0

    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        return Match(0, 0)

    def reserve(
        self, request_id: str, upto: int, match: Match | None = None, key: CacheKey | None = None,
        tokens: Sequence[int] = (),
    ) -> Grant | Answer:
        if self._promises:
            self._withdraw(request_id)
        table = self._tables.get(request_id)
        if table is None:
            return self._admit(request_id, upto, match or Match(0, 0), key, tokens)
        if upto <= table.capacity:
            return NOTHING
        return self._grow(request_id, table, self._wanted(upto) - table.end)

    def _admit(
        self, request_id: str, upto: int, match: Match, key: CacheKey | None, tokens: Sequence[int]
    ) -> Grant | Answer:
        table = self._bind(match, key, tokens)
        if table is None:
            return Answer.LATER
        shared = [list(pages) for pages in table.pages]
        end = max(self._wanted(upto), table.end)
        needs = [end - first - len(pages) for first, pages in zip(table.first, shared, strict=True)]
        answer = self._answer(request_id, needs, shared)
        if answer is not Answer.GRANTED:
            return answer
        for pool, pages, need in zip(self._pools, table.pages, needs, strict=True):
            pool.share(pages)  # before the take, which could evict them
            pages += pool.take(need)
        return Grant(self._enter(request_id, table, end), partial(self._undo_admit, request_id, table, shared))

    def _grow(self, request_id: str, table: Table, need: int) -> Grant | Answer:
        answer = self._answer(request_id, [need] * len(self._pools))
        if answer is not Answer.GRANTED:
            return answer
        groups = {}
        for pool, pages, first in zip(self._pools, table.pages, table.first, strict=True):
            fresh = pool.take(need)
            pages += fresh
            groups[pool.group] = GroupGrant(table.end, tuple(fresh), first)
        self._set_end(table, table.end + need)
        return Grant(groups, partial(self._undo_grow, request_id, table, need))

    def _answer(self, request_id: str, needs: Sequence[int], pins: Sequence[Sequence[int]] = ()) -> Answer:
        """GRANTED, or LATER with a promise, or NO, for ``needs`` empty pages besides the shared ``pins``, per group."""
        now = later = True
        for number, (pool, need) in enumerate(zip(self._pools, needs, strict=True)):
            fits_now, fits_later = pool.room(need, pins[number] if pins else ())
            now &= fits_now
            later &= fits_later
        if not later:
            return Answer.NO
        if now:
            return Answer.GRANTED
        # All pins count, held ones too: their holders may give them up before this request asks again.
        promise = [need + len(pins[number] if pins else ()) for number, need in enumerate(needs)]
        self._promises[request_id] = promise
        for pool, pages in zip(self._pools, promise, strict=True):
            pool.promised += pages
        return Answer.LATER

    def _withdraw(self, request_id: str) -> None:
        promise = self._promises.pop(request_id, None)
        if promise is not None:
            for pool, pages in zip(self._pools, promise, strict=True):
                pool.promised -= pages

    def _enter(
        self, request_id: str, table: Table, end: int, copies: Sequence[tuple[tuple[int, int], ...]] = ()
    ) -> dict[str, GroupGrant]:
        """A new table takes effect: what the worker is told of it."""
        self._set_end(table, end)
        self._tables[request_id] = table
        table.due = self._next_due(table, table.verified - table.verified % self._page_size + self._page_size)
        return {
            pool.group: GroupGrant(0, tuple(table.pages[number]), table.first[number], copies[number] if copies else ())
            for number, pool in enumerate(self._pools)
        }

    def _set_end(self, table: Table, end: int) -> None:
        table.end = end
        table.capacity = end * self._page_size

    # ------------------------------------------------------------------ commit

    def commit(self, request_id: str, new_tokens: Sequence[int], verified: int) -> int:
        table = self._tables[request_id]
        table.tokens += new_tokens
        if verified > table.verified:
            table.verified = verified
            if verified >= table.due:
                self._advance(request_id, table)
        return table.due

    def _advance(self, request_id: str, table: Table) -> None:
        """Publish pages that have become full, give up pages that have left their window."""
        if table.verified > len(table.tokens):
            raise ValueError(
                f"commit of request {request_id!r} says that {table.verified} tokens are verified, "
                f"but only {len(table.tokens)} are known; pass the missing ones as new_tokens"
            )
        publication = self._publish(table)
        for number, window in self._windows:
            gone = self._first_page(table.verified, window) - table.first[number]
            if gone > 0:
                pages = table.pages[number]
                self._pools[number].drop(pages[:gone])
                del pages[:gone]
                table.first[number] += gone
        table.due = self._next_due(table, publication)

    def _next_due(self, table: Table, publication: int) -> int:
        leaves = [(table.first[number] + 1) * self._page_size + window - 1 for number, window in self._windows]
        return min(publication, *leaves) if leaves else publication

    # ------------------------------------------------------------------ release and undo

    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        if self._promises:
            self._withdraw(request_id)
        table = self._tables.pop(request_id, None)
        if table is None:
            logger.debug("release of request %r, which holds no pages", request_id)
            return None
        if not retain:
            self._retract(table)
        return partial(self._undo_release, request_id, table, self._give_up(table.pages, fences))

    def _give_up(self, pages: Sequence[Sequence[int]], fences: Iterable[Fence]) -> Batch | None:
        batch = self._fences.add(fences, pages)
        for pool, own in zip(self._pools, pages, strict=True):
            if batch is None:
                pool.drop(own)
            else:
                pool.fence(own)
        return batch

    def on_fence(self, fence: Fence) -> None:
        if self._fences:
            for batch in self._fences.passed(fence):
                for pool, pages in zip(self._pools, batch.pages, strict=True):
                    pool.pass_fence(pages)

    def undo(self, entry: Callable[[], None] | None) -> None:
        if entry is not None:
            entry()

    def _undo_grow(self, request_id: str, table: Table, need: int) -> None:
        self._require_current(request_id, table)
        for pool, pages in zip(self._pools, table.pages, strict=True):
            pool.give_back(pages[-need:])
            del pages[-need:]
        self._set_end(table, table.end - need)

    def _undo_admit(self, request_id: str, table: Table, shared: Sequence[Sequence[int]]) -> None:
        self._require_current(request_id, table)
        del self._tables[request_id]
        for pool, pages, kept in zip(self._pools, table.pages, shared, strict=True):
            pool.give_back(pages[len(kept):])
            pool.drop(kept)

    def _undo_release(self, request_id: str, table: Table, batch: Batch | None) -> None:
        if request_id in self._tables:
            raise KVInvariantError(f"undo of the release of request {request_id!r}, which has a table again: "
                                   "entries must be undone last in, first out")
        if batch is not None:
            self._fences.cancel(batch)
        for pool, pages in zip(self._pools, table.pages, strict=True):
            if batch is None:
                pool.hold(pages)
            else:
                pool.unfence(pages)
        self._tables[request_id] = table

    def _require_current(self, request_id: str, table: Table) -> None:
        if self._tables.get(request_id) is not table:
            raise KVInvariantError(f"undo of a reserve or fork of request {request_id!r}, whose table is not the one "
                                   "that it made: entries must be undone last in, first out")

    # ------------------------------------------------------------------ what is where

    def table(self, request_id: str) -> Grant:
        table = self._tables[request_id]
        return Grant({pool.group: GroupGrant(0, tuple(table.pages[number]), table.first[number])
                      for number, pool in enumerate(self._pools)})

    def reset(self) -> int:
        return 0

    def usage(self) -> CacheUsage:
        total = held = fenced = empty = 0
        for pool in self._pools:
            total += pool.total
            held += pool.held
            fenced += pool.fenced
            empty += pool.empty
        return CacheUsage(total, held, fenced, total - held - fenced - empty, empty)

    def owners(self) -> dict[str, int]:
        return {request_id: sum(map(len, table.pages)) for request_id, table in self._tables.items()}

    def check(self) -> None:
        tables = {request_id: table.pages for request_id, table in self._tables.items()}
        check_pools(self._pools, tables, self._fences.batches())
        for request_id, table in self._tables.items():
            ends = [first + len(pages) for first, pages in zip(table.first, table.pages, strict=True)]
            if set(ends) != {table.end} or table.capacity != table.end * self._page_size:
                raise KVInvariantError(f"request {request_id!r}: tables end at logical pages {ends}, not {table.end}")
            if table.verified > table.capacity:
                raise KVInvariantError(f"request {request_id!r} has {table.verified} verified tokens in pages for "
                                       f"{table.capacity}")
        for number, pool in enumerate(self._pools):
            promised = sum(promise[number] for promise in self._promises.values())
            if pool.promised != promised:
                raise KVInvariantError(f"group {pool.group!r}: {pool.promised} pages promised, but requests "
                                       f"{sorted(self._promises)} were promised {promised}")
