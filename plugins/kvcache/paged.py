"""Pages of a fixed size, given out one by one as a request grows, without an index (Kwon et al., 2023)."""

from collections.abc import Iterable, Sequence
from functools import partial

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.component import Description
from hotswap.core.interfaces.kvcache import Fence, Grant, KVState, TableState
from hotswap.core.interfaces.scheduler import Answer
from hotswap.plugins.kvcache.fences import Batch
from hotswap.plugins.kvcache.sizing import pages_for
from hotswap.plugins.kvcache.tables import Table, TableKVCache


class PagedKVCache(TableKVCache):
    """Pages without a prefix index. Choose it where no requests share a prefix, or to measure what the index brings.

    Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023.
    """

    def describe(self) -> Description:
        return Description(offers=super().describe().offers | {"fork", "shrink", "handover"})

    def fork(self, parent: str, child: str, upto: int, fence: Fence) -> Grant | Answer:
        if self._promises:
            self._withdraw(child)
        if child in self._tables:
            raise ValueError(f"fork into request {child!r}, which has pages already")
        source = self._tables.get(parent)
        if source is None:
            return Answer.GONE
        first = self._first_pages(upto)
        if any(have > need for have, need in zip(source.first, first, strict=True)):
            return Answer.GONE
        if upto > source.verified:
            return Answer.LATER  # the parent has not got there yet; nothing to promise
        full = upto // self._page_size
        shared = [pages[begin - have:full - have] for pages, begin, have in
                  zip(source.pages, first, source.first, strict=True)]
        table = self._forked(source, upto, first, shared)
        partial_page = pages_for(upto, self._page_size) - full  # 1: its content is copied, as both will write to it
        answer = self._answer(child, [partial_page] * len(self._pools), shared)
        if answer is not Answer.GRANTED:
            return answer
        sources = [pages[full - have:full - have + partial_page] for pages, have in
                   zip(source.pages, source.first, strict=True)]
        copies = []
        for pool, pages, src in zip(self._pools, table.pages, sources, strict=True):
            pool.hold(pages)
            pool.guard(src)
            destination = pool.take(partial_page)
            pages += destination
            copies.append(tuple(zip(src, destination, strict=True)))
        batch = self._fences.add([fence] if partial_page else (), sources)
        groups = self._enter(child, table, full + partial_page, copies)
        return Grant(groups, partial(self._undo_fork, child, table, shared, batch))

    def _forked(self, source: Table, upto: int, first: list[int], shared: Sequence[Sequence[int]]) -> Table:
        table = Table(source.key, source.tokens[:upto], first, [list(pages) for pages in shared], upto)
        table.inherited = table.published = upto // self._page_size
        return table

    def _undo_fork(self, child: str, table: Table, shared: Sequence[Sequence[int]], batch: Batch | None) -> None:
        self._undo_admit(child, table, shared)
        if batch is not None:
            self._fences.cancel(batch)
            for pool, pages in zip(self._pools, batch.pages, strict=True):
                pool.pass_fence(pages)

    def shrink(self, request_id: str, upto: int, fences: Iterable[Fence]) -> None:
        table = self._tables[request_id]
        end = max(pages_for(max(upto, table.verified), self._page_size), *table.first)
        if end >= table.end:
            return
        tails = [pages[end - first:] for pages, first in zip(table.pages, table.first, strict=True)]
        for pages, first in zip(table.pages, table.first, strict=True):
            del pages[end - first:]
        self._set_end(table, end)
        self._give_up(tails, fences)

    def handover(self) -> KVState:
        if self._fences:
            waits = sorted({str(fence) for batch in self._fences.batches() for fence in batch.waits})
            raise KVInvariantError(f"hand-over while pages wait for fences {waits}; drain the engine first")
        groups = [pool.group for pool in self._pools]
        return KVState({
            request_id: TableState(
                first_live=dict(zip(groups, table.first, strict=True)),
                pages={group: list(pages) for group, pages in zip(groups, table.pages, strict=True)},
                tokens=list(table.tokens), verified=table.verified, key=table.key,
            )
            for request_id, table in self._tables.items()
        })

    def adopt(self, state: KVState) -> None:
        self._require_adoptable(state)
        for pool in self._pools:
            held = [page for table in state.tables.values() for page in table.pages[pool.group]]
            cached = [entry.page for entry in state.cached if entry.group == pool.group]
            pool.open_up_to(max([0, *held, *cached]))
        for request_id, told in state.tables.items():
            first = [told.first_live[pool.group] for pool in self._pools]
            table = Table(told.key, list(told.tokens), first, [list(told.pages[pool.group]) for pool in self._pools],
                          told.verified)
            for pool, pages in zip(self._pools, table.pages, strict=True):
                pool.hold(pages)
            self._enter(request_id, table, first[0] + len(table.pages[0]))

    def _require_adoptable(self, state: KVState) -> None:
        """Refuse before anything has changed, so that the predecessor can go on."""
        groups = {pool.group: pool for pool in self._pools}
        if self._tables or self._fences:
            raise KVInvariantError(f"only an unused manager can adopt; this one holds {sorted(self._tables)}")
        for request_id, table in state.tables.items():
            if table.pages.keys() != groups.keys():
                raise KVInvariantError(f"request {request_id!r} has pages in groups {sorted(table.pages)}, "
                                       f"this manager has groups {sorted(groups)}")
        named = [(group, page) for table in state.tables.values() for group in table.pages
                 for page in table.pages[group]] + [(entry.group, entry.page) for entry in state.cached if entry.page]
        for group, page in named:
            if group not in groups or not 1 <= page < groups[group].num_pages:
                raise KVInvariantError(f"page {page} of group {group!r} is none of this manager's")
