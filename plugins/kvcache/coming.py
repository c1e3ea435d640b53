"""Pages that running requests have yet to compute, so that others which begin alike can wait for them."""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from hotswap.core.errors import KVInvariantError


class Work(NamedTuple):
    """Logical pages ``first`` to ``end - 1`` are a request's to compute; ``keys``: of those that it has yet to."""

    first: int
    end: int
    keys: deque[Hashable]


class Run(NamedTuple):
    """Pages up to ``end``, not included, come from ``request``, which computes from page ``first`` on."""

    request: str
    first: int
    end: int


class ComingPages:
    """By key, the request that is to compute a page: the first that has announced it.

    A key stands for a page's tokens and all before them. It is a hint and need not be proof, since what has come is
    found by comparing tokens. An operation touches the pages of the request that it names.
    """

    def __init__(self) -> None:
        self._makers: dict[Hashable, str] = {}
        self._work: dict[str, Work] = {}

    def __bool__(self) -> bool:
        return bool(self._makers)

    def announce(self, request: str, first: int, end: int, keys: Sequence[Hashable]) -> None:
        """``request`` computes its logical pages ``first`` to ``end - 1``, the last of which, those of ``keys``, are
        still to come."""
        for key in keys:
            self._makers.setdefault(key, request)
        self._work[request] = Work(first, end, deque(keys))

    def arrived(self, request: str, upto: int) -> None:
        """It has computed all before logical page ``upto``."""
        if request in self._work:
            _, end, keys = self._work[request]
            while keys and end - len(keys) < upto:
                self._forget(request, keys.popleft())
            if not keys:
                del self._work[request]

    def withdraw(self, request: str) -> None:
        """It will compute nothing more."""
        if request in self._work:
            for key in self._work.pop(request).keys:
                self._forget(request, key)

    def clear(self) -> None:
        self._makers.clear()
        self._work.clear()

    def find(self, key: Callable[[int], Hashable], begin: int, end: int) -> Run | None:
        """Who is to compute logical page ``begin`` and those that follow, at most up to ``end``, not included. ``key``
        tells a page's."""
        maker = self._makers.get(key(begin))
        if maker is None:
            return None
        page = begin + 1
        while page < end and self._makers.get(key(page)) == maker:
            page += 1
        return Run(maker, self._work[maker].first, page)

    def _forget(self, request: str, key: Hashable) -> None:
        if self._makers.get(key) == request:
            del self._makers[key]

    def check(self, published: Callable[[str], int | None]) -> None:
        """KVInvariantError where a page is said to come that will not. ``published``: how many pages of a request have
        come, None where it holds no table."""
        for request, (_, end, keys) in self._work.items():
            if published(request) != end - len(keys):
                raise KVInvariantError(f"request {request!r}: pages from {end - len(keys)} on are said to come, but "
                                       f"{published(request)} have been published")
        strays = {maker for key, maker in self._makers.items()
                  if maker not in self._work or key not in self._work[maker].keys}
        if strays:
            raise KVInvariantError(f"pages are said to come from requests {sorted(strays)}, which do not compute them")
