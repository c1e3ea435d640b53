"""A compressed trie of token sequences in whole pages; of each page it knows its id in every cache group."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import EvictionPolicy
from hotswap.core.interfaces.page_keys import TOKEN_BYTES, pack, page_digest
from hotswap.plugins.kvcache.index import CachingPool
from hotswap.plugins.kvcache.probes import Packed

NO_PAGE = 0
"""The dummy page's id stands for a page that a group with a window has lost."""


class Edge:
    """A run of pages without a branch, and what follows it. ``pages[g]``: its page ids in group number g.

    ``start`` counts the pages before it. A split gives the head to a new edge, so whoever remembers an edge and a depth
    finds the place again by going up; see :meth:`Trie.resolve`.
    """

    __slots__ = ("children", "digests", "live", "pages", "parent", "sealed", "start", "tokens")

    def __init__(self, parent: "Edge | None", start: int, groups: int) -> None:
        self.parent = parent
        self.start = start
        self.tokens = b""
        self.pages: list[list[int]] = [[] for _ in range(groups)]
        self.children: dict[bytes, Edge] = {}  # by the tokens of their first pages
        self.digests: list[bytes] = []  # of its first pages, as far as anybody has asked; a root's: its own
        self.live = True
        self.sealed = False  # has lost pages at its end: places behind it may be remembered, so that it must not grow

    def __len__(self) -> int:
        return len(self.pages[0])

    @property
    def end(self) -> int:
        return self.start + len(self.pages[0])


class Place(NamedTuple):
    """Of one page: its edge, or one below that which has been split, and how many pages stand before it."""

    edge: Edge
    depth: int


class TriePool(CachingPool[Place]):
    """The pages of one group. ``whole``: a sequence is of no use without all its pages in this group (no window)."""

    def __init__(self, group: str, num_pages: int, policy: EvictionPolicy, trie: "Trie", whole: bool) -> None:
        super().__init__(group, num_pages, policy)
        self.trie, self.whole, self.number = trie, whole, len(trie.pools)
        trie.pools.append(self)

    def enter(self, page: int, place: Place) -> None:
        """A held page enters the trie."""
        self.nodes[page] = place
        self.policy.on_insert(page)

    def leave(self, page: int) -> None:
        """The trie gives up its place."""
        if self.removed is not None:
            self.removed.append(self.trie.digest(self.nodes[page]))
        self._unlist(page)
        self.empty_idle(page)

    def forget(self, page: int) -> None:
        self.trie.remove(self, page)

    def _evict(self) -> int:
        page = self._pick()
        if self.whole:
            page = self.trie.leaf_below(self, page)
        self.trie.remove(self, page)
        self._leave_idle(page)  # it was empty for a moment
        return page


class Trie:
    """``roots`` are by the digest of what a cached value depends on besides the tokens (``key_digest``).

    A place has a page in every whole group, and in the others perhaps. Removing a page of a whole group removes its
    place and all that follow it, in every group; they could not be found any more.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.width = page_size * TOKEN_BYTES
        self.pools: list[TriePool] = []
        self.roots: dict[bytes, Edge] = {}

    # ------------------------------------------------------------------ look

    def find(self, root: bytes, tokens: Packed, most: int) -> list[list[int]]:
        """The page ids, per group, of the longest known beginning of ``tokens``, at most ``most`` pages."""
        found: list[list[int]] = [[] for _ in self.pools]
        edge, depth = self.roots.get(root), 0
        while edge is not None and depth < most:
            edge = edge.children.get(tokens.pages(depth, depth + 1))
            if edge is None:
                break
            count = self._common(edge, depth, tokens.pages(depth, min(edge.end, most)))
            for out, pages in zip(found, edge.pages, strict=True):
                out += pages[:count]
            depth += count
            if count < len(edge):
                break
        return found

    def resolve(self, place: Place) -> Place:
        """With the edge that has it now; the edge must be live."""
        edge, index = place
        while index < edge.start:
            assert edge.parent is not None
            edge = edge.parent
        return Place(edge, index)

    def digest(self, place: Place) -> bytes:
        """The key of the page there: see ``core/interfaces/page_keys.py``."""
        edge, index = self.resolve(place)
        path = [edge]
        while path[-1].parent is not None and len(path[-1].digests) < len(path[-1]):
            path.append(path[-1].parent)
        previous = b""
        for above in reversed(path):
            for page in range(len(above.digests), len(above)):
                before = above.digests[-1] if above.digests else previous
                above.digests.append(page_digest(before, above.tokens[page * self.width:(page + 1) * self.width]))
            previous = above.digests[-1]
        return edge.digests[index - edge.start]

    def parent_digest(self, place: Place) -> bytes:
        edge, index = self.resolve(place)
        if index > edge.start:
            return self.digest(Place(edge, index - 1))
        assert edge.parent is not None
        return edge.parent.digests[0] if edge.parent.parent is None else self.digest(Place(edge.parent, index - 1))

    def edges(self) -> Iterator[Edge]:
        """All but the roots, parents before children."""
        ahead = [child for root in self.roots.values() for child in root.children.values()]
        while ahead:
            edge = ahead.pop()
            yield edge
            ahead += edge.children.values()

    def places(self, edge: Edge) -> Iterator[tuple[int, bytes, tuple[int, ...]]]:
        """(logical page, its tokens, its ids per group) of every page of an edge."""
        for index, pages in enumerate(zip(*edge.pages, strict=True)):
            yield edge.start + index, edge.tokens[index * self.width:(index + 1) * self.width], pages

    # ------------------------------------------------------------------ grow

    def insert(
        self, root: bytes, known: Place | None, tokens: Sequence[int], upto: int, first: Sequence[int],
        own: Sequence[Sequence[int]],
    ) -> tuple[Place, list[list[int]]]:
        """Make the first ``upto`` pages of ``tokens`` known. ``own[g]`` are pages that hold them from logical page
        ``first[g]`` on; they are taken where the trie has none. ``known``: where an earlier call for the same tokens
        has ended.

        Returns where this one has ended, and per group the logical pages that were taken.
        """
        taken: list[list[int]] = [[] for _ in self.pools]
        edge, depth = self._back_to(known) or (self._root(root), 0)
        while depth < upto:
            if depth == edge.end:
                child = edge.children.get(self._pack(tokens, depth, depth + 1))
                if child is None:
                    break
                edge = child
            count = self._common(edge, depth, self._pack(tokens, depth, min(edge.end, upto)))
            self._offer(edge, range(depth, depth + count), first, own, taken)
            depth += count
            if depth < edge.end:
                break
        if depth < upto:
            edge = self._branch(edge, depth, tokens)
            edge.tokens += self._pack(tokens, depth, upto)
            for pages in edge.pages:
                pages += [NO_PAGE] * (upto - depth)
            self._offer(edge, range(depth, upto), first, own, taken)
            self._trim(edge)
        return Place(edge, upto), taken

    def _root(self, root: bytes) -> Edge:
        edge = self.roots.get(root)
        if edge is None:
            edge = self.roots[root] = Edge(None, 0, len(self.pools))
            edge.digests = [root]
        return edge

    def _back_to(self, known: Place | None) -> Place | None:
        """A place that was reached once, if it still stands for the same tokens."""
        if known is None or not known.edge.live:
            return None
        edge, depth = known
        while depth <= edge.start and edge.parent is not None:
            edge = edge.parent
        return Place(edge, depth) if depth <= edge.end else None

    def _offer(
        self, edge: Edge, places: range, first: Sequence[int], own: Sequence[Sequence[int]], taken: list[list[int]],
    ) -> None:
        for pool, begin, pages, there, new in zip(self.pools, first, own, edge.pages, taken, strict=True):
            for index in range(max(begin, places.start), places.stop):
                page = pages[index - begin]
                if page != NO_PAGE and there[index - edge.start] == NO_PAGE:
                    there[index - edge.start] = page
                    pool.enter(page, Place(edge, index))
                    new.append(index)

    def _branch(self, edge: Edge, depth: int, tokens: Sequence[int]) -> Edge:
        """An edge that ends at ``depth``, below or equal to ``edge``, and may grow."""
        if depth < edge.end:
            edge = self._split(edge, depth)
        if edge.parent is not None and not edge.children and not edge.sealed:
            return edge
        child = edge.children[self._pack(tokens, depth, depth + 1)] = Edge(edge, depth, len(self.pools))
        return child

    def _split(self, edge: Edge, depth: int) -> Edge:
        """The head of ``edge`` becomes an edge of its own, which is returned."""
        assert edge.parent is not None
        count = depth - edge.start
        head = Edge(edge.parent, edge.start, len(self.pools))
        head.tokens, edge.tokens = edge.tokens[:count * self.width], edge.tokens[count * self.width:]
        head.digests, edge.digests = edge.digests[:count], edge.digests[count:]
        for upper, lower in zip(head.pages, edge.pages, strict=True):
            upper += lower[:count]
            del lower[:count]
        head.parent.children[head.tokens[:self.width]] = head  # type: ignore[union-attr]
        head.children[edge.tokens[:self.width]] = edge
        edge.parent, edge.start = head, depth
        return head

    # ------------------------------------------------------------------ shrink

    def leaf_below(self, pool: TriePool, page: int) -> int:
        """``page``, which nobody holds, or one behind it that nobody holds either and that nothing hangs on.

        Where all the last ones are held (by requests that computed a beginning twice), it is ``page`` itself.
        """
        edge, index = self.resolve(pool.nodes[page])
        ahead = [edge]
        while ahead:
            below = ahead.pop()
            ahead += below.children.values()
            last = below.pages[pool.number][-1]
            if not below.children and pool.is_idle(last) and below.end > index:
                return last
        return page

    def remove(self, pool: TriePool, page: int) -> None:
        """Take a page out; with it, where it is of a whole group, all that cannot be found without it."""
        edge, index = self.resolve(pool.nodes[page])
        if pool.whole:
            self._cut(edge, index)
        else:
            pool.leave(page)
            edge.pages[pool.number][index - edge.start] = NO_PAGE
            self._trim(edge)

    def _cut(self, edge: Edge, index: int) -> None:
        """Remove the place ``index`` of ``edge`` and all that follow."""
        ahead = [(edge, index - edge.start)]
        while ahead:
            below, begin = ahead.pop()
            ahead += [(child, 0) for child in below.children.values()]
            for pool, pages in zip(self.pools, below.pages, strict=True):
                for page in pages[begin:]:
                    if page != NO_PAGE:
                        pool.leave(page)
            below.live = below is edge
        edge.children = {}
        self._shorten(edge, index - edge.start)

    def _shorten(self, edge: Edge, count: int) -> None:
        """Keep the first ``count`` pages of an edge that nothing follows."""
        parent = edge.parent
        assert parent is not None
        if not count:
            edge.live = False
            del parent.children[edge.tokens[:self.width]]
            if parent.parent is None and not parent.children:
                parent.live = False
                del self.roots[parent.digests[0]]
            return
        edge.sealed = True
        edge.tokens = edge.tokens[:count * self.width]
        del edge.digests[count:]
        for pages in edge.pages:
            del pages[count:]

    def _trim(self, edge: Edge) -> None:
        """Remove places at the end of a branch that no group has a page for."""
        while edge.parent is not None and not edge.children:
            count = len(edge)
            while count and not any(pages[count - 1] for pages in edge.pages):
                count -= 1
            if count == len(edge):
                return
            self._shorten(edge, count)
            edge = edge.parent

    # ------------------------------------------------------------------ check

    def check(self) -> None:
        """KVInvariantError where edges, places and pages do not agree."""
        listed = [0 for _ in self.pools]
        for edge in self.edges():
            where = f"edge of {len(edge)} pages behind {edge.start}"
            parent = edge.parent
            if parent is None or edge.start != parent.end or parent.children.get(edge.tokens[:self.width]) is not edge:
                raise KVInvariantError(f"{where}: its parent does not lead to it")
            lengths = {len(pages) * self.width for pages in edge.pages}
            if not edge.live or not edge.tokens or lengths != {len(edge.tokens)}:
                raise KVInvariantError(f"{where}: {len(edge.tokens)} bytes of tokens, live: {edge.live}")
            for pool, pages in zip(self.pools, edge.pages, strict=True):
                missing = [edge.start + i for i, page in enumerate(pages) if page == NO_PAGE]
                if pool.whole and missing:
                    raise KVInvariantError(f"{where}: group {pool.group!r} lacks logical pages {missing}")
                wrong = [page for i, page in enumerate(pages, edge.start) if page != NO_PAGE and (
                    page not in pool.nodes or self.resolve(pool.nodes[page]) != Place(edge, i))]
                if wrong:
                    raise KVInvariantError(f"{where}: pages {wrong} of group {pool.group!r} are listed elsewhere")
                listed[pool.number] += len(pages) - len(missing)
            if not edge.children and not any(pages[-1] for pages in edge.pages):
                raise KVInvariantError(f"{where}: ends with a place that has no page")
        for pool, count in zip(self.pools, listed, strict=True):
            if len(pool.nodes) != count:
                raise KVInvariantError(f"group {pool.group!r}: {len(pool.nodes)} pages are listed, {count} are reached")

    # ------------------------------------------------------------------ small things

    def _pack(self, tokens: Sequence[int], begin: int, end: int) -> bytes:
        return pack(tokens[begin * self.page_size:end * self.page_size])

    def _common(self, edge: Edge, depth: int, wanted: bytes) -> int:
        """How many pages from ``depth``, a place of ``edge``, on are those of ``wanted``, which does not go beyond."""
        begin, width = (depth - edge.start) * self.width, self.width
        there = edge.tokens[begin:begin + len(wanted)]
        if wanted == there:
            return len(wanted) // width
        return next(i // width for i in range(0, len(wanted), width) if wanted[i:i + width] != there[i:i + width])
