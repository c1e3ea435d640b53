"""One contiguous run of pages a request, as long as the longest context: the baseline before paging."""

from collections.abc import Sequence
from dataclasses import replace

from hotswap.core.interfaces.kvcache import CacheConstraints, CachePlan, CacheSpec
from hotswap.plugins.kvcache.pool import PagePool
from hotswap.plugins.kvcache.sizing import pages_for, plan_pages
from hotswap.plugins.kvcache.tables import TableKVCache


class RunPool(PagePool):
    """Gives out runs of ``run`` pages with consecutive ids. A run is given up as a whole, last page first, so that the
    top of the stack is always the first page of a run."""

    def __init__(self, group: str, num_pages: int, run: int) -> None:
        super().__init__(group, num_pages)
        self._run = run

    def take(self, count: int) -> list[int]:
        pages = [page for _ in range(count // self._run) for page in self._take_run()]
        self.held += len(pages)
        return pages

    def _take_run(self) -> range:
        fresh = not self._recycled
        first = len(self.holders) if fresh else next(reversed(self._recycled))
        pages = range(first, first + self._run)
        if fresh:
            self.holders += [1] * self._run
            self.fences += [0] * self._run
        for page in () if fresh else pages:
            del self._recycled[page]
            self.holders[page] = 1
        return pages


class ContiguousKVCache(TableKVCache):
    """Reserves the full context for each request at its first reserve, and never grows. Choose it as the baseline of a
    comparison, or where all requests are about as long as the context. Windows are not used: a run is kept whole.

    So did the servers before paging, e.g. Yu et al., "Orca: A Distributed Serving System for Transformer-Based
    Generative Models", 2022.
    """

    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        plan = plan_pages(specs, num_bytes, constraints)
        self._run = pages_for(constraints.max_model_len, next(iter(plan.groups.values())).page_size)
        whole = {group: replace(sizes, num_pages=1 + (sizes.num_pages - 1) // self._run * self._run)
                 for group, sizes in plan.groups.items()}
        self._adopt_plan(CachePlan(whole), [replace(spec, window=None) for spec in specs])
        return CachePlan(whole)

    def _new_pool(self, group: str, num_pages: int) -> PagePool:
        return RunPool(group, num_pages, self._run)

    def _wanted(self, upto: int) -> int:
        if upto > self._run * self._page_size:
            raise ValueError(f"reserve of {upto} tokens, but requests have at most {self._run * self._page_size}; "
                             "the engine must not plan past max_model_len")
        return self._run
