"""Prefix reuse by a compressed trie of tokens (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
Programs", 2024: RadixAttention)."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import CacheConstraints, CachedPage, CacheKey, CachePlan, CacheSpec, KVState, Match
from hotswap.core.interfaces.page_keys import key_digest, pack, page_digest, unpack
from hotswap.plugins.kvcache.probes import WAITING, Packed, Probes
from hotswap.plugins.kvcache.reuse import ReusingKVCache
from hotswap.plugins.kvcache.tables import NEVER, Table
from hotswap.plugins.kvcache.trie import NO_PAGE, Place, Trie, TriePool


class Hit(NamedTuple):
    """What :attr:`Match.opaque` holds: the pages found per group and their places, and how many had left by then."""

    tokens: list[int]
    key: CacheKey
    pages: tuple[list[int], ...]
    places: tuple[list[Place], ...]
    removals: int


class Thread:
    """A table's way through the trie: its root, and the place that its own pages have reached."""

    __slots__ = ("known", "root")

    def __init__(self, root: bytes, known: Place | None) -> None:
        self.root = root
        self.known = known


class RadixKVCache(ReusingKVCache[TriePool]):
    """Finds shared prefixes in a trie whose edges are runs of whole pages, one trie for all cache groups.

    The same hits as ``prefix``, found by comparing tokens instead of hashing them. Choose it for long shared prefixes
    with many branches (few-shot prompts, agents, trees of thought): what goes first is always a leaf, so that no page
    is kept that cannot be found any more, whatever the eviction policy. Where an inner page is all that can go (those
    behind it are held by requests that computed the same beginning at the same time), the pages behind it leave the
    index with it, and their holders publish them again when they grow.
    """

    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        self._probes: Probes[Packed] = Probes(constraints.max_running + WAITING)
        return super().configure(specs, num_bytes, constraints)

    def _adopt_plan(self, plan: CachePlan, specs: Sequence[CacheSpec]) -> None:
        self._trie = Trie(next(iter(plan.groups.values())).page_size)
        self._whole = {spec.group for spec in specs if spec.window is None}
        super()._adopt_plan(plan, specs)

    def _make_index(self, group: str, num_pages: int) -> TriePool:
        return TriePool(group, num_pages, self._policy.clone(), self._trie, group in self._whole)

    # ------------------------------------------------------------------ match

    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        most = min(limit, len(tokens)) // self._page_size
        if most <= 0:
            return Match(0, 0)
        packed = self._probes.get(tokens, lambda packed: packed.tokens == tokens, lambda: self._packed(list(tokens)))
        root = key_digest(key)
        found = self._trie.find(root, packed, most)
        pages = self._fit_windows(found, max(0, len(found[0]) * self._page_size - tail) // self._page_size)
        cached = pages * self._page_size
        coming = self._find_coming(lambda page: (root, packed.hint(page)), cached, len(found[0]), most, tail)
        if not pages:
            return Match(0, 0, None, coming)
        hit = tuple(own[first:pages] for own, first in zip(found, self._first_pages(cached), strict=True))
        places = tuple([pool.nodes[page] for page in own] for pool, own in zip(self._indexes, hit, strict=True))
        return Match(cached, 0, Hit(packed.tokens, key, hit, places, self._removals()), coming)

    def _packed(self, tokens: list[int]) -> Packed:
        return Packed(tokens, self._page_size)

    def _fit_windows(self, found: Sequence[Sequence[int]], pages: int) -> int:
        """The longest prefix of at most ``pages`` pages whose window lies in every group that has one."""
        while pages and self._windows:
            missing = -1
            for number, window in self._windows:
                first = self._first_page(pages * self._page_size, window)
                holes = [page for page in range(max(first, missing + 1), pages) if found[number][page] == NO_PAGE]
                missing = max([missing, *holes])
            if missing < 0:
                break
            pages = missing  # any longer prefix would need the missing page too
        return pages

    def _still_there(self, cached: int, hit: Hit) -> bool:
        return all(
            pool.nodes.get(page) is place
            for pool, pages, places in zip(self._indexes, hit.pages, hit.places, strict=True)
            for page, place in zip(pages, places, strict=True)
        )

    def _own_chain(self, table: Table, cached: int, hit: Hit | None) -> Thread:
        if hit is None and cached:
            raise ValueError(f"reserve with a match of {cached} tokens that this manager has not found")
        if hit is not None and (hit.key != table.key or hit.tokens[:cached] != table.tokens[:cached]):
            raise ValueError(f"reserve with a match of {cached} tokens that was made for other tokens or another key")
        return Thread(key_digest(table.key), None)

    def _page_keys(self, table: Table, begin: int, end: int) -> list[Hashable]:
        packed, root = self._packed(table.tokens), table.chain.root
        return [(root, packed.hint(page)) for page in range(begin, end)]

    # ------------------------------------------------------------------ index

    def _publish(self, table: Table) -> int:
        if table.published == NEVER:
            return NEVER
        full = table.verified // self._page_size
        thread: Thread = table.chain
        thread.known, taken = self._trie.insert(
            thread.root, thread.known, table.tokens, full, table.first, table.pages)
        table.published = full
        if self._events is not None:
            for pool, new in zip(self._indexes, taken, strict=True):
                self._tell("stored", pool, [self._trie.digest(Place(thread.known.edge, page)) for page in new])
        return (full + 1) * self._page_size

    def _retract(self, table: Table) -> None:
        """From the first page that is this request's alone on: what hangs on it was computed from it. Of a group with a
        window, also those pages that have left it: nobody can say that they are sound."""
        if table.published == NEVER:
            return
        found = self._trie.find(table.chain.root, self._packed(table.tokens), table.published)
        for number in sorted(range(len(found)), key=lambda number: self._indexes[number].whole):
            pool, first, pages = self._indexes[number], table.first[number], table.pages[number]
            for index in range(table.inherited, len(found[number])):
                page = found[number][index]
                own = index >= first and pages[index - first] == page
                if (own or index < first) and page in pool.nodes and pool.holders[page] == own:
                    pool.forget(page)

    def _clear(self) -> int:
        before = sum(pool.empty for pool in self._indexes)
        for pool in self._indexes:
            for page in list(pool.nodes):
                pool.leave(page)
        self._trie.roots.clear()
        self._probes.clear()
        return sum(pool.empty for pool in self._indexes) - before

    # ------------------------------------------------------------------ fork, hand-over, check

    def _forked(self, source: Table, upto: int, first: list[int], shared: Sequence[Sequence[int]]) -> Table:
        table = super()._forked(source, upto, first, shared)
        thread: Thread = source.chain
        known = thread.known
        if known is not None:
            known = Place(known.edge, min(known.depth, upto // self._page_size))
        table.chain = Thread(thread.root, known)
        return table

    def handover(self) -> KVState:
        return KVState(super().handover().tables, [
            CachedPage(pool.group, self._trie.parent_digest(Place(edge, index)), unpack(tokens), page)
            for edge in self._trie.edges() for index, tokens, pages in self._trie.places(edge)
            for pool, page in zip(self._indexes, pages, strict=True)
            # Of a place that no group has a page for, the first one tells what stands there.
            if page != NO_PAGE or pool.number == 0 and not any(pages)
        ])

    def adopt(self, state: KVState) -> None:
        super().adopt(state)
        entries: dict[bytes, CachedPage] = {}
        pages: dict[bytes, dict[str, int]] = {}
        for entry in state.cached:
            digest = page_digest(entry.parent, pack(entry.tokens))
            entries[digest] = entry
            pages.setdefault(digest, {})
            if entry.page != NO_PAGE:
                pages[digest][entry.group] = entry.page
        roots = {key_digest(table.key) for table in self._tables.values()}
        parents = {entry.parent for entry in entries.values()}
        for digest in [digest for digest in entries if digest not in parents]:  # in order: the order of a set is drawn
            path = []
            while digest in entries:
                path.append(digest)
                digest = entries[digest].parent
            self._adopt_path(digest, [(entries[key].tokens, pages[key]) for key in reversed(path)], digest in roots)
        for pool in self._indexes:
            for page in reversed([page for page in pool.nodes if not pool.holders[page]]):
                pool.cache_idle(page)  # those behind others become evictable before them
        for request_id, table in self._tables.items():
            table.chain = Thread(key_digest(table.key), None)
            self._advance(request_id, table)
            self._announce(request_id, table)

    def _adopt_path(self, root: bytes, path: Sequence[tuple[tuple[int, ...], dict[str, int]]], begins: bool) -> None:
        """A leaf of the predecessor's and all before it, as far as every whole group has their pages. ``begins``: it
        is the beginning of a sequence; else what stands before it was not handed over, and nobody can find it."""
        tokens = [token for piece, _ in path for token in piece]
        there = len(self._trie.find(root, self._packed(tokens), len(path))[0])  # from another leaf's path
        own: list[list[int]] = [[] for _ in self._indexes]
        count = 0
        for count, (_, pages) in enumerate(path, 1):
            for pool, out in zip(self._indexes, own, strict=True):
                page = pages.get(pool.group, NO_PAGE)
                # A held page is published by its holder, where it belongs.
                usable = page not in pool.nodes and (begins or not pool.holders[page])
                out.append(page if usable else NO_PAGE)
            if count > there and not all(own[pool.number][-1] for pool in self._full):
                count -= 1
                break
        if count:
            self._trie.insert(root, None, tokens, count, [0] * len(own), own)

    def check(self) -> None:
        super().check()
        self._trie.check()
        size = self._page_size
        for request_id, table in self._tables.items():
            found = self._trie.find(table.chain.root, self._packed(table.tokens), table.verified // size)
            for pool, first, pages, there in zip(self._indexes, table.first, table.pages, found, strict=True):
                for index, page in enumerate(pages, first):
                    if page in pool.nodes and (index >= len(there) or there[index] != page):
                        raise KVInvariantError(f"group {pool.group!r}: page {page}, logical page {index} of request "
                                               f"{request_id!r}, is listed for tokens that are not its verified ones")
