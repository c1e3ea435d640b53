"""Page pools whose pages keep their content after their request has ended, until an empty page is needed."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from hotswap.core.interfaces.kvcache import EvictionPolicy
from hotswap.plugins.kvcache.chain import Node
from hotswap.plugins.kvcache.pool import PagePool

Place = TypeVar("Place")


class CachingPool(PagePool, Generic[Place]):
    """``policy`` chooses which cached page is evicted when none is empty. ``nodes`` says where in the index a page is.

    A subclass keeps the index: it must call ``policy.on_insert`` when a page enters it, and :meth:`_unlist` when one
    leaves it.
    """

    def __init__(self, group: str, num_pages: int, policy: EvictionPolicy) -> None:
        super().__init__(group, num_pages)
        self.policy = policy
        self.nodes: dict[int, Place] = {}
        self.removals = 0
        """How often a page has left the index; a match made at the same count still holds."""
        self.removed: list[bytes] | None = None
        """Digests that have left, where somebody listens."""

    @abstractmethod
    def forget(self, page: int) -> None:
        """Take ``page`` out of the index; if nobody uses it, it is empty from now on."""

    def is_indexed(self, page: int) -> bool:
        return page in self.nodes

    def is_idle(self, page: int) -> bool:
        """Nobody holds it and no fence guards it."""
        return not self.holders[page] and not self.fences[page]

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.policy.on_hit(page)
        self.hold(pages)

    def cache_idle(self, page: int) -> None:
        """An empty page, just entered in the index, holds a predecessor's content."""
        super()._leave_idle(page)
        self.policy.on_unpin(page)

    def empty_idle(self, page: int) -> None:
        """A page that has just left the index; if nobody uses it, it is empty from now on."""
        if self.is_idle(page):
            super()._enter_idle(page)

    def _unlist(self, page: int) -> Place:
        self.policy.on_remove(page)
        self.removals += 1
        return self.nodes.pop(page)

    def _pick(self) -> int:
        page = self.policy.pick()
        assert isinstance(page, int)
        return page

    def _enter_idle(self, page: int) -> None:
        if page in self.nodes:
            self.policy.on_unpin(page)
        else:
            super()._enter_idle(page)

    def _leave_idle(self, page: int) -> None:
        if page in self.nodes:
            self.policy.on_pin(page)
        else:
            super()._leave_idle(page)


class IndexedPool(CachingPool[Node]):
    """Full pages by the digest of their tokens."""

    def __init__(self, group: str, num_pages: int, policy: EvictionPolicy) -> None:
        super().__init__(group, num_pages, policy)
        self.pages: dict[bytes, int] = {}

    def find(self, node: Node) -> tuple[int, Node] | None:
        """The page stored under ``node``'s digest and its node, whose tokens the caller must still compare."""
        page = self.pages.get(node.digest)
        return None if page is None else (page, self.nodes[page])

    def publish(self, page: int, node: Node) -> Node:
        """Offer a held page. Returns the node that stands in the index, another one if the digest or page is taken."""
        if page in self.nodes:
            return self.nodes[page]
        taken = self.pages.get(node.digest)
        if taken is not None:
            return self.nodes[taken]
        self.pages[node.digest] = page
        self.nodes[page] = node
        self.policy.on_insert(page)
        return node

    def adopt_idle(self, page: int, node: Node) -> None:
        """A predecessor's cached page that no table holds."""
        if not self.holders[page] and self.publish(page, node) is node:
            self.cache_idle(page)

    def forget(self, page: int) -> None:
        self._unindex(page)
        self.empty_idle(page)

    def reset(self) -> int:
        """Empty the index. Returns how many of its pages nobody used."""
        before = self.empty
        for page in list(self.nodes):
            self.forget(page)
        return self.empty - before

    def _unindex(self, page: int) -> None:
        digest = self._unlist(page).digest
        del self.pages[digest]
        if self.removed is not None:
            self.removed.append(digest)

    def _evict(self) -> int:
        page = self._pick()
        self._unindex(page)  # before anybody gets the page
        return page
