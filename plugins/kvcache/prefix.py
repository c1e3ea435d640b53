"""Prefix reuse by a hash chain of full pages, one index a cache group (Kwon et al., 2023; vLLM's automatic prefix
caching)."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CachedPage,
    CacheKey,
    CachePlan,
    CacheSpec,
    KVState,
    Match,
)
from hotswap.core.interfaces.page_keys import pack, page_digest, unpack
from hotswap.plugins.kvcache.chain import Chain, ChainCache, Node
from hotswap.plugins.kvcache.index import IndexedPool
from hotswap.plugins.kvcache.probes import WAITING
from hotswap.plugins.kvcache.reuse import ReusingKVCache
from hotswap.plugins.kvcache.tables import NEVER, Table


class Hit(NamedTuple):
    """What :attr:`Match.opaque` holds: the pages found per group, and how many had left the indexes by then."""

    chain: Chain
    pages: tuple[list[int], ...]
    removals: int

    @property
    def tokens(self) -> list[int]:
        return self.chain.tokens

    @property
    def key(self) -> CacheKey:
        return self.chain.key


class PrefixKVCache(ReusingKVCache[IndexedPool]):
    """Finds the pages of a request's prefix that other requests have computed. The default.

    Pages enter the index when full and verified, under the digest of their tokens and all before them; a hit compares
    the tokens. Of a group with a window only the pages inside the window are needed.
    """

    digest = staticmethod(page_digest)

    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        plan = super().configure(specs, num_bytes, constraints)
        self._chains = ChainCache(constraints.max_running + WAITING, self._page_size, self.digest)
        return plan

    def _make_index(self, group: str, num_pages: int) -> IndexedPool:
        return IndexedPool(group, num_pages, self._policy.clone())

    # ------------------------------------------------------------------ match

    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        most = min(limit, len(tokens)) // self._page_size
        if most <= 0:
            return Match(0, 0)
        chain = self._chains.get(tokens, key)
        found = self._walk(chain, most) if self._full else most
        pages = self._fit_windows(chain, max(0, found * self._page_size - tail) // self._page_size)
        cached = pages * self._page_size
        nodes = chain.nodes
        hit = tuple([pool.pages[node.digest] for node in nodes[first + 1:pages + 1]]
                    for pool, first in zip(self._indexes, self._first_pages(cached), strict=True))
        there = found if self._full else pages
        coming = self._find_coming(chain.digest_of, cached, there, most, tail)
        return Match(cached, 0, Hit(chain, hit, self._removals()), coming)

    def _walk(self, chain: Chain, most: int) -> int:
        """How many leading pages, of at most ``most``, lie in every group that sees everything."""
        nodes = chain.nodes
        for page in range(most):
            if page + 1 == len(nodes):
                chain.grow(min(most, 2 * page + 1))  # not all at once: most requests miss early or hit far
            for pool in self._full:
                found = pool.find(nodes[page + 1])
                if found is None or not chain.unify(page, found[1]):
                    return page
        return most

    def _fit_windows(self, chain: Chain, pages: int) -> int:
        """The longest prefix of at most ``pages`` pages whose window lies in every group that has one."""
        chain.grow(pages)
        while pages and self._windows:
            missing = max(self._last_miss(chain, number, window, pages) for number, window in self._windows)
            if missing < 0:
                break
            pages = missing  # any longer prefix would need the missing page too
        return pages

    def _last_miss(self, chain: Chain, number: int, window: int, pages: int) -> int:
        """The last page inside the window of a query behind ``pages`` pages that is not in the index; -1: none."""
        pool = self._indexes[number]
        for page in range(pages - 1, self._first_page(pages * self._page_size, window) - 1, -1):
            found = pool.find(chain.nodes[page + 1])
            if found is None or not chain.unify(page, found[1]):
                return page
        return -1

    def _still_there(self, cached: int, hit: Hit) -> bool:
        end = cached // self._page_size
        return all(
            pool.nodes.get(page) is node
            for pool, pages in zip(self._indexes, hit.pages, strict=True)
            for page, node in zip(pages, hit.chain.nodes[end + 1 - len(pages):end + 1], strict=True)
        )

    def _own_chain(self, table: Table, cached: int, hit: Hit | None) -> Chain:
        """The table's chain: what the match has hashed need not be hashed again."""
        chain = hit.chain if hit is not None else None
        if chain is not None and chain.key == table.key:
            if chain.holds(table.tokens):
                return chain.copy(table.tokens, len(chain.nodes) - 1)
            if chain.tokens[:cached] == table.tokens[:cached]:
                return chain.copy(table.tokens, cached // self._page_size)
        if cached:
            raise ValueError(f"reserve with a match of {cached} tokens that was made for other tokens or another key")
        return Chain(table.tokens, table.key, self._page_size, self.digest)

    def _page_keys(self, table: Table, begin: int, end: int) -> list[Hashable]:
        chain: Chain = table.chain
        chain.grow(end)
        return [node.digest for node in chain.nodes[begin + 1:end + 1]]

    # ------------------------------------------------------------------ index

    def _publish(self, table: Table) -> int:
        if table.published == NEVER:
            return NEVER
        full = table.verified // self._page_size
        chain: Chain = table.chain
        chain.grow(full)
        for pool, first, pages in zip(self._indexes, table.first, table.pages, strict=True):
            stored = []
            for page in range(max(table.published, first), full):
                node = chain.nodes[page + 1]
                standing = pool.publish(pages[page - first], node)
                if standing is node:
                    stored.append(node.digest)
                else:
                    chain.unify(page, standing)
            self._tell("stored", pool, stored)
        table.published = full
        return (full + 1) * self._page_size

    def _retract(self, table: Table) -> None:
        """Also those pages that have left the table's window: nobody can say that they are sound."""
        if table.published == NEVER:
            return
        for pool, first, pages in zip(self._indexes, table.first, table.pages, strict=True):
            for page in range(table.inherited, table.published):
                found = pool.find(table.chain.nodes[page + 1])
                if found is None:
                    continue
                own = page >= first and pages[page - first] == found[0]
                if pool.holders[found[0]] == own:
                    pool.forget(found[0])

    def _clear(self) -> int:
        self._chains.clear()
        return sum(pool.reset() for pool in self._indexes)

    # ------------------------------------------------------------------ fork, hand-over, check

    def _forked(self, source: Table, upto: int, first: list[int], shared: Sequence[Sequence[int]]) -> Table:
        table = super()._forked(source, upto, first, shared)
        table.chain = source.chain.copy(table.tokens, upto // self._page_size)
        return table

    def handover(self) -> KVState:
        tables = super().handover().tables
        return KVState(tables, [
            CachedPage(pool.group, node.parent.digest, unpack(node.tokens), page)
            for pool in self._indexes for page, node in parents_first(pool.nodes) if node.parent is not None
        ])

    def adopt(self, state: KVState) -> None:
        super().adopt(state)
        known: dict[bytes, Node] = {}
        idle: list[tuple[IndexedPool, int, Node]] = []
        pools = {pool.group: pool for pool in self._indexes}
        for entry in state.cached:
            parent = known.get(entry.parent) or Node(None, entry.parent)
            tokens = pack(entry.tokens)
            node = Node(parent, self.digest(entry.parent, tokens), tokens)
            known.setdefault(node.digest, node)
            if not entry.page:
                continue
            pool = pools[entry.group]
            if pool.holders[entry.page]:
                pool.publish(entry.page, node)
            else:
                idle.append((pool, entry.page, node))
        for pool, page, node in reversed(idle):  # children become evictable before their parents
            pool.adopt_idle(page, node)
        for request_id, table in self._tables.items():
            table.chain = Chain(table.tokens, table.key, self._page_size, self.digest)
            self._advance(request_id, table)
            self._announce(request_id, table)

    def check(self) -> None:
        super().check()
        for pool in self._indexes:
            for page, node in pool.nodes.items():
                if pool.pages.get(node.digest) != page:
                    raise KVInvariantError(f"group {pool.group!r}: page {page} is indexed, but its digest leads to "
                                           f"page {pool.pages.get(node.digest)}")
                if node.parent is None or self.digest(node.parent.digest, node.tokens) != node.digest:
                    raise KVInvariantError(f"group {pool.group!r}: page {page} is indexed under another page's digest")
            if pool.pages.keys() != {node.digest for node in pool.nodes.values()}:
                raise KVInvariantError(f"group {pool.group!r}: digests lead to pages that are not indexed")
        self._check_content()

    def _check_content(self) -> None:
        """An indexed page that a table holds must stand for that table's tokens."""
        size = self._page_size
        for request_id, table in self._tables.items():
            for pool, first, pages in zip(self._indexes, table.first, table.pages, strict=True):
                for page, number in enumerate(pages, first):
                    node = pool.nodes.get(number)
                    if node is None:
                        continue
                    if (page + 1) * size > table.verified or node.tokens != pack(table.tokens[page * size:][:size]):
                        raise KVInvariantError(f"group {pool.group!r}: page {number}, logical page {page} of request "
                                               f"{request_id!r}, is indexed for tokens that are not its verified ones")


def parents_first(nodes: dict[int, Node]) -> list[tuple[int, Node]]:
    """(page, node) sorted by depth; as many steps as there are nodes, however long the chains."""
    depths: dict[int, int] = {}
    for node in nodes.values():
        path = []
        current: Node | None = node
        while current is not None and id(current) not in depths:
            path.append(current)
            current = current.parent
        depth = depths[id(current)] if current is not None else 0
        for above in reversed(path):
            depth += 1
            depths[id(above)] = depth
    return sorted(nodes.items(), key=lambda item: depths[id(item[1])])
