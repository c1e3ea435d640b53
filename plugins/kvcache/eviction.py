"""Eviction policies: which cached page that nobody holds goes first. Every call takes constant time (``lfu``: on the
whole, and the logarithm of the greatest count besides)."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.kvcache import EvictionPolicy


class LeastRecentlyUsed(EvictionPolicy):
    """Evicts the page that has been unheld for the longest time. The right choice unless you know better.

    Of pages given up together, the manager unpins the last of a sequence first, so that its tail goes before its head.
    """

    def __init__(self, options: object = None, parts: object = None) -> None:
        super().__init__(options)
        self._idle: OrderedDict[Hashable, None] = OrderedDict()

    def on_insert(self, page: Hashable) -> None: ...

    def on_hit(self, page: Hashable) -> None: ...

    def on_unpin(self, page: Hashable) -> None:
        self._idle[page] = None

    def on_pin(self, page: Hashable) -> None:
        del self._idle[page]

    def on_remove(self, page: Hashable) -> None:
        self._idle.pop(page, None)

    def pick(self) -> Hashable:
        for page in self._idle:
            return page
        raise IndexError("no page can be evicted: every cached page is held")

    def clone(self) -> "LeastRecentlyUsed":
        return type(self)(self.options)


class FirstInFirstOut(EvictionPolicy):
    """Evicts the page that entered the cache first, however often it was hit since.

    For traffic whose prefixes go out of use in the order in which they came, such as a sliding set of documents. A page
    that is held when its turn comes goes as soon as nobody holds it.
    """

    def __init__(self, options: object = None, parts: object = None) -> None:
        super().__init__(options)
        self._order: OrderedDict[Hashable, None] = OrderedDict()  # oldest first, held ones too
        self._pinned: set[Hashable] = set()
        self._overdue: OrderedDict[Hashable, None] = OrderedDict()  # not held, and their turn has been

    def on_insert(self, page: Hashable) -> None:
        self._order[page] = None
        self._pinned.add(page)

    def on_hit(self, page: Hashable) -> None: ...

    def on_unpin(self, page: Hashable) -> None:
        self._pinned.remove(page)
        if page not in self._order:
            self._overdue[page] = None

    def on_pin(self, page: Hashable) -> None:
        self._pinned.add(page)
        self._overdue.pop(page, None)

    def on_remove(self, page: Hashable) -> None:
        self._order.pop(page, None)
        self._pinned.discard(page)
        self._overdue.pop(page, None)

    def pick(self) -> Hashable:
        for page in self._overdue:
            return page
        while self._order:
            page = next(iter(self._order))
            if page not in self._pinned:
                return page
            del self._order[page]  # passed over once, never looked at again: constant time on the whole
        raise IndexError("no page can be evicted: every cached page is held")

    def clone(self) -> "FirstInFirstOut":
        return type(self)(self.options)


class LeastFrequentlyUsed(EvictionPolicy):
    """Evicts the page with the fewest hits, and of equals the one unheld for longest; popularity ages.

    Arlitt, Cherkasova, Dilley, Friedrich and Jin, "Evaluating Content Management Techniques for Web Proxy Caches", 2000
    (LFU with dynamic aging): a page's rank is its count plus the cache's age, and the age is the rank of the page that
    was evicted last. So what was popular once is outlived after as many turnovers of the cache as it had hits, at most
    ``max_count``. Choose it for a few system prompts under a stream of prompts that never come again, which would flush
    them out of ``lru``.
    """

    class Options(ComponentOptions):
        max_count: Annotated[int, Field(ge=1)] = 16
        """Hits beyond it do not count (as the small counters of TinyLFU, Einziger et al., 2017)."""

    def __init__(self, options: Any = None, parts: object = None) -> None:
        super().__init__(options)
        self._age = 0
        self._counts: dict[Hashable, int] = {}
        self._ranks: dict[Hashable, int] = {}  # of the candidates
        self._by_rank: dict[int, OrderedDict[Hashable, None]] = {}
        self._heap: list[int] = []  # the keys of ``_by_rank``

    def on_insert(self, page: Hashable) -> None:
        self._counts[page] = 1

    def on_hit(self, page: Hashable) -> None:
        self._counts[page] = min(self._counts[page] + 1, self.options.max_count)

    def on_unpin(self, page: Hashable) -> None:
        # Ranked when it is given up and not when it is hit: of one sequence, the tail never outranks the head.
        rank = self._ranks[page] = self._age + self._counts[page]
        if rank not in self._by_rank:
            self._by_rank[rank] = OrderedDict()
            heapq.heappush(self._heap, rank)
        self._by_rank[rank][page] = None

    def on_pin(self, page: Hashable) -> None:
        del self._by_rank[self._ranks.pop(page)][page]

    def on_remove(self, page: Hashable) -> None:
        if page in self._ranks:
            evicted = page == self.pick()
            rank = self._ranks[page]
            self.on_pin(page)
            self._age = rank if evicted else self._age
        del self._counts[page]

    def pick(self) -> Hashable:
        while self._heap:
            for page in self._by_rank[self._heap[0]]:
                return page
            del self._by_rank[heapq.heappop(self._heap)]
        raise IndexError("no page can be evicted: every cached page is held")

    def clone(self) -> "LeastFrequentlyUsed":
        return type(self)(self.options)


class SegmentedLRU(EvictionPolicy):
    """Two segments, each in order of last use: pages that were hit are protected, and those that never were go first.

    Karedla, Love and Wherry, "Caching Strategies to Improve Disk System Performance", 1994. A full protected segment
    gives its oldest page back to the other one, for a second chance. Choose it where many prompts are seen once (scans,
    batch jobs) beside a set of prefixes that return and slowly change; it forgets old favourites sooner than ``lfu``.
    """

    class Options(ComponentOptions):
        protected: Annotated[float, Field(ge=0.0, le=1.0)] = 0.8
        """Greatest share of the cached pages, held ones counted, that is protected."""

    def __init__(self, options: Any = None, parts: object = None) -> None:
        super().__init__(options)
        self._was_hit: dict[Hashable, bool] = {}  # of every page, held ones too
        self._probation: OrderedDict[Hashable, None] = OrderedDict()  # candidates, oldest first
        self._protected: OrderedDict[Hashable, None] = OrderedDict()

    def on_insert(self, page: Hashable) -> None:
        self._was_hit[page] = False

    def on_hit(self, page: Hashable) -> None:
        self._was_hit[page] = True

    def on_unpin(self, page: Hashable) -> None:
        if not self._was_hit[page]:
            self._probation[page] = None
            return
        self._protected[page] = None
        if len(self._protected) > self.options.protected * len(self._was_hit):
            oldest, _ = self._protected.popitem(last=False)
            self._was_hit[oldest] = False
            self._probation[oldest] = None

    def on_pin(self, page: Hashable) -> None:
        segment = self._probation if page in self._probation else self._protected  # a hit may have come before
        del segment[page]

    def on_remove(self, page: Hashable) -> None:
        del self._was_hit[page]
        self._probation.pop(page, None)
        self._protected.pop(page, None)

    def pick(self) -> Hashable:
        for segment in (self._probation, self._protected):
            for page in segment:
                return page
        raise IndexError("no page can be evicted: every cached page is held")

    def clone(self) -> "SegmentedLRU":
        return type(self)(self.options)
