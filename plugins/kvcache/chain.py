"""Chains of page keys (``core/interfaces/page_keys.py``): one request's full pages, each hashed once."""

from collections.abc import Callable, Sequence

from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.page_keys import TOKEN_BYTES, key_digest, pack
from hotswap.plugins.kvcache.probes import Probes

Digest = Callable[[bytes, bytes], bytes]


class Node:
    """One page's tokens and all before them. ``tokens`` is empty for an anchor: what stands before it is known by its
    digest alone (a request's cache key, or a predecessor's page that was not handed over)."""

    __slots__ = ("digest", "parent", "tokens")

    def __init__(self, parent: "Node | None", digest: bytes, tokens: bytes = b"") -> None:
        self.parent = parent
        self.digest = digest
        self.tokens = tokens


def same_history(a: Node | None, b: Node | None) -> bool:
    """Do two nodes stand for the same tokens from the first on? Compares tokens, whatever the digests say."""
    while a is not b:
        if a is None or b is None or a.digest != b.digest or a.tokens != b.tokens and a.tokens and b.tokens:
            return False
        if not a.tokens or not b.tokens:
            return True
        a, b = a.parent, b.parent
    return True


class Chain:
    """The tokens of one request and the nodes of its full pages, as far as anybody has asked for them.

    ``nodes[0]`` is the anchor, ``nodes[i + 1]`` belongs to logical page i.
    """

    __slots__ = ("_digest", "_page_size", "key", "nodes", "tokens")

    def __init__(self, tokens: list[int], key: CacheKey, page_size: int, digest: Digest) -> None:
        self.tokens = tokens
        self.key = key
        self.nodes = [Node(None, key_digest(key))]
        self._page_size = page_size
        self._digest = digest

    def grow(self, pages: int) -> None:
        """Hash up to ``pages`` full pages."""
        nodes = self.nodes
        done = len(nodes) - 1
        if pages <= done:
            return
        packed = pack(self.tokens[done * self._page_size:pages * self._page_size])
        width = self._page_size * TOKEN_BYTES
        parent = nodes[-1]
        for begin in range(0, (pages - done) * width, width):
            piece = packed[begin:begin + width]
            parent = Node(parent, self._digest(parent.digest, piece), piece)
            nodes.append(parent)

    def digest_of(self, page: int) -> bytes:
        self.grow(page + 1)
        return self.nodes[page + 1].digest

    def unify(self, page: int, stored: Node) -> bool:
        """Use the index's node for logical page ``page`` if it stands for the same tokens; say whether it does.

        Afterwards the next page's comparison ends at its parent, instead of at the first page.
        """
        nodes = self.nodes
        if stored is not nodes[page + 1]:
            if not same_history(stored, nodes[page + 1]):
                return False
            nodes[page + 1] = stored
            if page + 2 < len(nodes):
                nodes[page + 2].parent = stored
        return True

    def holds(self, tokens: Sequence[int]) -> bool:
        """Are the pages hashed so far those of ``tokens``?"""
        hashed = (len(self.nodes) - 1) * self._page_size
        return list(tokens[:hashed]) == self.tokens[:hashed]

    def copy(self, tokens: list[int], pages: int) -> "Chain":
        """A chain over ``tokens`` that starts with the nodes of this one's first ``pages`` pages."""
        chain = Chain.__new__(Chain)
        chain.tokens, chain.key, chain._page_size, chain._digest = tokens, self.key, self._page_size, self._digest
        chain.nodes = self.nodes[:pages + 1]
        return chain


class ChainCache:
    """Chains of requests that wait, so that one that is probed in every plan is hashed once. Bounded."""

    def __init__(self, size: int, page_size: int, digest: Digest) -> None:
        self._page_size = page_size
        self._digest = digest
        self._chains: Probes[Chain] = Probes(size)

    def get(self, tokens: Sequence[int], key: CacheKey) -> Chain:
        chain = self._chains.get(
            tokens, lambda chain: chain.key == key and chain.holds(tokens),
            lambda: Chain(list(tokens), key, self._page_size, self._digest))
        chain.tokens[:] = tokens  # it may have grown
        return chain

    def clear(self) -> None:
        self._chains.clear()
