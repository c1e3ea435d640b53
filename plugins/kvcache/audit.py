"""Counts a pool's pages again from the tables and fences that name them, and says where the books differ."""

from collections import Counter
from collections.abc import Mapping, Sequence

from hotswap.core.errors import KVInvariantError
from hotswap.plugins.kvcache.fences import Batch
from hotswap.plugins.kvcache.pool import PagePool


def check_pools(
    pools: Sequence[PagePool], tables: Mapping[str, Sequence[Sequence[int]]], batches: Sequence[Batch]
) -> None:
    """Raises KVInvariantError that names the group, the pages, and the requests and fences that name these pages."""
    for number, pool in enumerate(pools):
        by_request = {request_id: list(pages[number]) for request_id, pages in tables.items()}
        by_batch = [(sorted(map(str, batch.waits)), list(batch.pages[number])) for batch in batches]
        _check_pool(pool, by_request, by_batch)


def _check_pool(pool: PagePool, tables: Mapping[str, list[int]], fenced: list[tuple[list[str], list[int]]]) -> None:
    holders = Counter(page for pages in tables.values() for page in pages)
    fences = Counter(page for _, pages in fenced for page in pages)
    known = range(1, len(pool.holders))

    def complain(pages: list[int], what: str) -> None:
        if pages:
            owners = sorted(request_id for request_id, own in tables.items() if not set(pages).isdisjoint(own))
            waits = sorted({fence for names, own in fenced for fence in names if not set(pages).isdisjoint(own)})
            raise KVInvariantError(
                f"group {pool.group!r}: pages {pages[:20]} {what}; requests that hold them: {owners or 'none'}, "
                f"fences that they wait for: {waits or 'none'}"
            )

    complain([page for page in [*holders, *fences] if page not in known], "are in use, but were never given out")
    complain([page for page in known if pool.holders[page] > holders[page]], "are leaked: counted as held too often")
    complain([page for page in known if pool.holders[page] < holders[page]], "are counted as held too rarely")
    complain([page for page in known if pool.fences[page] != fences[page]], "wait for other fences than are counted")
    recycled = set(pool.recycled())
    idle = {page for page in known if not holders[page] and not fences[page]}
    complain(sorted(recycled - idle), "are free and in use at once")
    complain(sorted(page for page in recycled if pool.is_indexed(page)), "are free and in the index at once")
    complain(sorted(page for page in idle - recycled if not pool.is_indexed(page)),
             "are leaked: neither free, nor in the index, nor in use")
    counts = len(holders), len(fences.keys() - holders.keys())
    if (pool.held, pool.fenced) != counts:
        raise KVInvariantError(f"group {pool.group!r}: counted {pool.held} held and {pool.fenced} fenced pages, "
                               f"but there are {counts[0]} and {counts[1]}")
