"""The pages of one cache group: who holds each, which are empty, and counts that never need a scan.

A page is in one of four states, by two counts::

    holders > 0                  held     by that many tables
    holders == 0, fences > 0     fenced   a step or transfer in flight may still read or write it
    both 0, indexed              cached   reusable, and evicted when an empty page is needed
    both 0, not indexed          empty    never given out yet, or recycled

Every operation touches the named pages only, whatever the size of the pool.
"""

from collections.abc import Sequence

from hotswap.core.errors import KVInvariantError


class PagePool:
    """Pages ``1 .. num_pages - 1`` of ``group``; page 0 is the dummy page and is never given out."""

    def __init__(self, group: str, num_pages: int) -> None:
        self.group = group
        self.num_pages = num_pages
        self.held = 0
        self.fenced = 0
        self.promised = 0
        """Pages that requests answered LATER in this plan are waiting for."""
        # One entry for each page that was ever given out: an untouched pool of a million pages costs nothing.
        self.holders = [0]
        self.fences = [0]
        self._recycled: dict[int, None] = {}  # a stack from which any page can be removed at once

    @property
    def total(self) -> int:
        return self.num_pages - 1

    @property
    def empty(self) -> int:
        return len(self._recycled) + self.num_pages - len(self.holders)

    def room(self, need: int, pins: Sequence[int] = ()) -> tuple[bool, bool]:
        """Do ``need`` pages fit besides ``pins``, pages that will be held: now; once all fences have passed and all
        promises are kept."""
        unheld = [page for page in pins if not self.holders[page]]
        idle = sum(not self.fences[page] for page in unheld)
        vacant = self.num_pages - 1 - self.held
        return need + idle <= vacant - self.fenced, need + len(unheld) + self.promised <= vacant

    def take(self, count: int) -> list[int]:
        """``count`` pages with no content, held once each; evicts where none is empty. Ask :meth:`room` first."""
        holders, recycled, pages = self.holders, self._recycled, []
        for _ in range(count):
            if recycled:
                page, _ = recycled.popitem()
                holders[page] = 1
            elif len(holders) < self.num_pages:
                page = len(holders)
                holders.append(1)
                self.fences.append(0)
            else:
                page = self._evict()
                holders[page] = 1
            pages.append(page)
        self.held += count
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        """Undo a :meth:`take`: the next take returns the same pages in the same order."""
        for page in reversed(pages):
            if self.holders[page] != 1:
                raise KVInvariantError(
                    f"undo of page {page} of group {self.group!r}, which is held {self.holders[page]} times, not once: "
                    "entries must be undone last in, first out"
                )
            self.holders[page] = 0
            self._recycled[page] = None
        self.held -= len(pages)

    def hold(self, pages: Sequence[int]) -> None:
        """One more table holds each of ``pages``, with its content."""
        for page in pages:
            if not self.holders[page]:
                self.held += 1
                if self.fences[page]:
                    self.fenced -= 1
                else:
                    self._leave_idle(page)
            self.holders[page] += 1

    def share(self, pages: Sequence[int]) -> None:
        """:meth:`hold`, because of a hit in the index."""
        self.hold(pages)

    def drop(self, pages: Sequence[int]) -> None:
        """A table gives up ``pages``, last first, so that what hangs on others is evicted before them."""
        for page in reversed(pages):
            if self._unhold(page):
                if self.fences[page]:
                    self.fenced += 1
                else:
                    self._enter_idle(page)

    def fence(self, pages: Sequence[int]) -> None:
        """A table gives up ``pages``; each stays out of reach until a :meth:`pass_fence`."""
        for page in pages:
            self.fences[page] += 1
            if self._unhold(page):
                self.fenced += 1

    def unfence(self, pages: Sequence[int]) -> None:
        """Undo a :meth:`fence`."""
        self.hold(pages)
        for page in pages:
            self.fences[page] -= 1

    def guard(self, pages: Sequence[int]) -> None:
        """Keep held ``pages`` out of reach until a :meth:`pass_fence`, even if their holders give them up."""
        for page in pages:
            self.fences[page] += 1

    def pass_fence(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self.fences[page] -= 1
            if not self.fences[page] and not self.holders[page]:
                self.fenced -= 1
                self._enter_idle(page)

    def open_up_to(self, last: int) -> None:
        """Count pages up to ``last`` as given out once and empty again, so that tables of a predecessor can
        :meth:`hold` theirs."""
        for page in range(last, len(self.holders) - 1, -1):
            self._recycled[page] = None
        missing = last + 1 - len(self.holders)
        self.holders += [0] * missing
        self.fences += [0] * missing

    def recycled(self) -> list[int]:
        """Pages given out before and empty now."""
        return list(self._recycled)

    def is_indexed(self, page: int) -> bool:
        return False

    def _unhold(self, page: int) -> bool:
        """Does nobody hold ``page`` any more?"""
        left = self.holders[page] - 1
        if left < 0:
            raise KVInvariantError(f"page {page} of group {self.group!r} is given up by a table, but no table holds it")
        self.holders[page] = left
        if left:
            return False
        self.held -= 1
        return True

    def _evict(self) -> int:
        raise KVInvariantError(
            f"group {self.group!r} has no page left: {self.held} held, {self.fenced} fenced of {self.total}"
        )

    def _enter_idle(self, page: int) -> None:
        self._recycled[page] = None

    def _leave_idle(self, page: int) -> None:
        del self._recycled[page]
