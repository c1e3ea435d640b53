"""An eviction policy: which page of the cache goes first where there is no room."""

from collections.abc import Hashable, Mapping
from itertools import islice
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.kvcache import EvictionPolicy


class MyPart(EvictionPolicy):
    """The page that was given up last goes first.

    Choose it ... (for prompts that come round in turn and do not all fit: the least recently used page is then the one
    that is needed next).
    """

    class Options(ComponentOptions):
        spared: Annotated[int, Field(ge=0)] = 0
        """So many of those that were given up last stay, as long as there are others."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.idle: dict[Hashable, None] = {}  # candidates, in the order in which they were given up

    def on_insert(self, page: Hashable) -> None:
        """A page can be reused from now on. It is held, and so no candidate yet."""

    def on_hit(self, page: Hashable) -> None:
        """A request has found the page: what a policy that counts hits would count."""

    def on_unpin(self, page: Hashable) -> None:
        """Nobody holds it any more: it may be evicted."""
        self.idle[page] = None

    def on_pin(self, page: Hashable) -> None:
        """It is held again: it may not."""
        del self.idle[page]

    def on_remove(self, page: Hashable) -> None:
        """It was evicted, or forgotten."""
        self.idle.pop(page, None)

    def pick(self) -> Hashable:
        """The page to evict. It stays a candidate until ``on_remove``."""
        for page in islice(reversed(self.idle), self.options.spared, None):
            return page
        for page in self.idle:
            return page
        raise IndexError("every cached page is held")

    def clone(self) -> "MyPart":
        """An empty one for another cache group."""
        return type(self)(self.options)
