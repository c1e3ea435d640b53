"""Eviction policies: which cached page that nobody holds goes first. Every call takes constant time."""

from collections import OrderedDict
from collections.abc import Hashable

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
