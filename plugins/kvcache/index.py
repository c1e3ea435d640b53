"""A page pool with an index: full pages by the digest of their tokens, found again after their request has ended."""

from collections.abc import Sequence

from hotswap.core.interfaces.kvcache import EvictionPolicy
from hotswap.plugins.kvcache.chain import Node
from hotswap.plugins.kvcache.pool import PagePool


class IndexedPool(PagePool):
    """``policy`` chooses which cached page is evicted when none is empty."""

    def __init__(self, group: str, num_pages: int, policy: EvictionPolicy) -> None:
        super().__init__(group, num_pages)
        self.policy = policy
        self.pages: dict[bytes, int] = {}
        self.nodes: dict[int, Node] = {}
        self.removals = 0
        """How often a page has left the index; a match made at the same count still holds."""
        self.removed: list[bytes] | None = None
        """Digests that have left, where somebody listens."""

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
            super()._leave_idle(page)
            self.policy.on_unpin(page)

    def forget(self, page: int) -> None:
        """Take ``page`` out of the index; if nobody uses it, it is empty from now on."""
        self._unindex(page)
        if not self.holders[page] and not self.fences[page]:
            super()._enter_idle(page)

    def reset(self) -> int:
        """Empty the index. Returns how many of its pages nobody used."""
        before = self.empty
        for page in list(self.nodes):
            self.forget(page)
        return self.empty - before

    def is_indexed(self, page: int) -> bool:
        return page in self.nodes

    def share(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.policy.on_hit(page)
        self.hold(pages)

    def _unindex(self, page: int) -> None:
        digest = self.nodes.pop(page).digest
        del self.pages[digest]
        self.policy.on_remove(page)
        self.removals += 1
        if self.removed is not None:
            self.removed.append(digest)

    def _evict(self) -> int:
        page = self.policy.pick()
        assert isinstance(page, int)
        self._unindex(page)  # before anybody gets the page
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
