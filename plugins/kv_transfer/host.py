"""A tier of host memory behind the cache: pages of requests that have ended, and of those that are suspended."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.config.schema import Bytes
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.kv_transfer import (
    NOTHING_KEPT,
    REUSE,
    SWAP,
    Attachment,
    Kept,
    KVTransfer,
    Saving,
    TransferLayout,
    TransferWorker,
)
from hotswap.core.interfaces.kvcache import CacheKey, Grant
from hotswap.core.interfaces.page_keys import page_digest
from hotswap.core.interfaces.scheduler import LATER, Answer, SuspendMode
from hotswap.core.request import Request
from hotswap.plugins.kv_transfer.slots import SlotStore
from hotswap.plugins.kv_transfer.work import Moves, Record, Work
from hotswap.plugins.kvcache.chain import Chain, ChainCache

CHAINS = 64
"""Prompts that wait and whose keys are remembered."""

COUNTERS = ("hits", "hit_tokens", "swaps_out", "swaps_in", "swaps_refused", "saved_bytes", "loaded_bytes", "failed")
"""Requests that found tokens here, and those tokens; suspended requests saved, brought back, and not saved for want of
room; bytes that every rank copied; transfers that failed."""


class HostTierOptions(ComponentOptions):
    memory: Bytes = 2**30
    """Bytes of host memory for pages, on each rank."""
    swap: bool = True
    """Whether suspended requests may be saved here instead of being computed again."""
    reuse: bool = True
    """Whether the pages of requests that have ended are kept for others with the same prefix."""
    overlap: bool = False
    """Copy beside the steps; a request starts once its pages have arrived. Else within a step, before its rows."""
    swap_overhead: Annotated[int, Field(ge=0)] = 64
    """Where it is left open how a request is suspended: what a swap costs by itself, in tokens computed in its time."""
    swap_rate: Bytes = 2**20
    """Likewise: bytes that are moved in the time in which one token is computed."""


class HostTier(KVTransfer):
    """Keeps pages in host memory: a second tier of the prefix cache, and where suspended requests are swapped to.

    Choose it where prompts come back after the cache has forgotten them, or where requests are suspended whose prompts
    cost more to compute than to copy. Pages are written when a request ends or is suspended, under the keys of the
    prefix cache, and the least recently used go first. How a request is suspended, where the scheduler leaves it open:
    it is swapped if computing its tokens again takes longer than moving their pages out and in, ``tokens >
    swap_overhead + 2 * bytes / swap_rate``.

    So do vLLM's offloading connectors and SGLang's HiCache; swapping is of Kwon et al., "Efficient Memory Management
    for Large Language Model Serving with PagedAttention", 2023.
    """

    Options = HostTierOptions
    digest = staticmethod(page_digest)

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._store = SlotStore(0)
        self._records: dict[str, Record] = {}
        self._leaving: list[Record] = []  # consumed in this plan, which may be undone yet
        self._works: dict[str, Work] = {}
        self._arriving: set[bytes] = set()  # keys of pages that are being saved for others
        self._saves: list[tuple[str, Any]] = []
        self._loads: list[tuple[str, int, Any]] = []
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._names = 0

    def describe(self) -> Description:
        why = "it copies the pages of requests that end or are suspended"
        return Description(
            frozenset({REUSE, SWAP} if self.options.swap else {REUSE}), (Requirement("kvcache", "tables", why),))

    def worker(self) -> TransferWorker:
        from hotswap.plugins.kv_transfer.copies import HostTierWorker  # torch

        return HostTierWorker(self.options.overlap)

    def configure(self, layout: TransferLayout) -> Any:
        sizes = {share.page_size for share in layout.plan.groups.values()}
        if len(sizes) != 1:
            raise ConfigError(
                f"the host tier keeps pages of one size, the cache groups have {sorted(sizes)}", "kv_transfer")
        self._page_size = sizes.pop()
        self._group_bytes = {spec.group: spec.bytes_per_token * self._page_size for spec in layout.specs}
        self._page_bytes = sum(self._group_bytes.values())
        slots = self.options.memory // self._page_bytes
        if not slots:
            raise ConfigError(
                f"{self.options.memory} bytes hold no page of {self._page_bytes} bytes; give at least that",
                "kv_transfer.memory")
        self._windows = {spec.group: spec.window for spec in layout.specs if spec.window is not None}
        self._whole = [spec.group for spec in layout.specs if spec.window is None]
        self._store = SlotStore(slots)
        self._chains = ChainCache(CHAINS, self._page_size, self.digest)
        return {"slots": slots}

    # ------------------------------------------------------------------ what lies here

    def lookup(
        self, request: Request, tokens: Sequence[int], cached: int, limit: int, tail: int = 0,
    ) -> int | Answer:
        record = self._records.get(request.id)
        if record is not None:
            if not record.ready:
                return LATER
            if (found := self._of_record(record, limit, tail)) > 0:
                return found
        return self._reusable(tokens, request.cache_key, cached, limit, tail)

    def _of_record(self, record: Record, limit: int, tail: int) -> int:
        assert record.computed is not None
        upto = min(record.computed, limit)
        if tail:
            upto = max(0, upto - tail) // self._page_size * self._page_size
        return upto if self._reaches_back(record, upto) else 0

    def _reaches_back(self, record: Record, upto: int) -> bool:
        """A shorter prefix may need pages that had left the window when the request was suspended."""
        return all(record.first[group] <= self._first_page(group, upto) for group in record.first)

    def _reusable(self, tokens: Sequence[int], key: CacheKey, cached: int, limit: int, tail: int) -> int:
        size = self._page_size
        begin, most = cached // size, min(limit, len(tokens)) // size
        if most <= begin:
            return 0
        chain = self._chains.get(tokens, key)
        found = self._walk(chain, begin, most) if self._whole else most
        return self._fit_windows(chain, begin, max(0, found * size - tail) // size) * size

    def _walk(self, chain: Chain, begin: int, most: int) -> int:
        """How many leading pages, of at most ``most``, lie in the cache (the first ``begin``) or here, for every group
        that sees everything."""
        chain.grow(begin)
        for page in range(begin, most):
            if page + 1 == len(chain.nodes):
                chain.grow(min(most, 2 * page + 1))  # not all at once: most requests miss early or hit far
            if self._store.find(chain, page, self._whole) is None:
                return page
        return most

    def _fit_windows(self, chain: Chain, begin: int, pages: int) -> int:
        """The longest prefix of at most ``pages`` pages whose windows lie in the cache or here."""
        chain.grow(pages)
        while pages > begin and self._windows:
            missing = max(self._last_miss(chain, group, begin, pages) for group in self._windows)
            if missing < 0:
                break
            pages = missing  # any longer prefix would need the missing page too
        return pages

    def _last_miss(self, chain: Chain, group: str, begin: int, pages: int) -> int:
        first = max(begin, self._first_page(group, pages * self._page_size))
        misses = (page for page in range(pages - 1, first - 1, -1) if self._store.find(chain, page, [group]) is None)
        return next(misses, -1)

    def _first_page(self, group: str, position: int) -> int:
        """The first logical page that a query at ``position`` sees."""
        window = self._windows.get(group)
        return 0 if window is None else max(0, position - window + 1) // self._page_size

    # ------------------------------------------------------------------ in

    def attach(
        self, request: Request, tokens: Sequence[int], table: Grant, cached: int, upto: int,
    ) -> Attachment:
        record = self._records.pop(request.id, None)
        if record is not None:
            self._leaving.append(record)
        if upto <= cached:
            return Attachment(partial(self._undo_attach, request.id, record, None, {}))
        swapped = record is not None and record.ready and upto <= self._of_record(record, upto, 0)
        chain = None if swapped else self._chains.get(tokens, request.cache_key)
        brought = record.slots if record is not None else {}
        name, work, moves = self._name(), Work(), Moves()
        first = {group: max(change.first_live, self._first_page(group, upto), cached // self._page_size)
                 for group, change in table.groups.items()}
        for page in range(min(first.values()), -(-upto // self._page_size)):
            groups = [group for group in first if first[group] <= page]
            slot = self._store.find(chain, page, groups) if chain is not None else brought.get(page)
            assert slot is not None and slot.groups.issuperset(groups), f"page {page} of {request.id} is not here"
            self._store.pin(slot)
            work.slots.append(slot)
            moves.add(table, groups, page, slot)
        counts = {"swaps_in": 1} if swapped else {"hits": 1, "hit_tokens": upto - cached}
        counts["loaded_bytes"] = self._bytes(moves)
        self._counts.update(counts)
        self._works[name] = work
        self._loads.append((name, cached, moves.by_group))
        return Attachment(
            partial(self._undo_attach, request.id, record, name, counts), name if self.options.overlap else None)

    def _undo_attach(self, request_id: str, record: Record | None, name: str | None, counts: Mapping[str, int]) -> None:
        if name is not None:
            self._loads.pop()
            self._counts.subtract(counts)
            self._store.unpin(self._works.pop(name).slots)
        if record is not None:
            self._leaving.remove(record)
            self._records[request_id] = record

    # ------------------------------------------------------------------ out

    def save(
        self, request: Request, tokens: Sequence[int], table: Grant, bound: int, mode: SuspendMode,
    ) -> Saving | None:
        first = {group: change.first_live for group, change in table.groups.items()}
        pages = range(min(first.values()), -(-bound // self._page_size))
        cost = self.options.swap_overhead + 2 * len(pages) * self._page_bytes / self.options.swap_rate
        if not pages or mode is SuspendMode.AUTO and bound <= cost:
            return None
        chain = Chain(list(tokens), request.cache_key, self._page_size, self.digest)
        chain.grow(len(tokens) // self._page_size)
        record = Record(request.id, first)
        name, work, moves = self._name(), Work(record=record), Moves()
        for page in pages:
            groups = [group for group, change in table.groups.items() if 0 <= page - first[group] < len(change.pages)]
            slot = self._store.find(chain, page, groups) if page + 1 < len(chain.nodes) else None
            if slot is not None:
                self._store.pin(slot)
            elif (slot := self._store.take()) is not None:
                self._store.pin(slot)  # once for the record, once for the copy
                work.slots.append(slot)
                work.fills[slot.number] = frozenset(groups)
                moves.add(table, groups, page, slot)
            else:
                self._abandon(work, record)
                self._counts["swaps_refused"] += 1
                return None
            record.slots[page] = slot
        counts = {"swaps_out": 1, "saved_bytes": self._bytes(moves)}
        self._counts.update(counts)
        self._records[request.id], self._works[name] = record, work
        self._saves.append((name, moves.by_group))
        return Saving(partial(self._undo_save, request.id, name, counts), name)

    def _undo_save(self, request_id: str, name: str, counts: Mapping[str, int]) -> None:
        self._saves.pop()
        self._counts.subtract(counts)
        self._abandon(self._works.pop(name), self._records.pop(request_id))

    def _abandon(self, work: Work, record: Record) -> None:
        self._store.unpin(work.slots)
        self._store.unpin(record.slots.values())

    def suspended(self, request: Request, tokens: Sequence[int], computed: int) -> None:
        record = self._records.get(request.id)
        if record is None:
            return
        record.computed = computed
        chain = Chain(list(tokens[:computed]), request.cache_key, self._page_size, self.digest)
        full = computed // self._page_size
        chain.grow(full)
        record.nodes = {page: chain.nodes[page + 1] for page in record.slots if page < full}
        end = -(-computed // self._page_size)
        self._store.unpin([record.slots.pop(page) for page in list(record.slots) if page >= end])
        if not computed:
            del self._records[request.id]
        elif record.saved:
            self._publish(record)

    def _publish(self, record: Record) -> None:
        for page, node in record.nodes.items() if record.shared else ():
            if record.slots[page].node is None:
                self._store.publish(record.slots[page], node)

    def finished(self, request: Request, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        full = len(tokens) // self._page_size
        if not self.options.reuse or not full:
            return NOTHING_KEPT
        chain = Chain(list(tokens), request.cache_key, self._page_size, self.digest)
        chain.grow(full)
        name, work, moves, known = self._name(), Work(), Moves(), []
        for page in range(min(change.first_live for change in table.groups.values()), full):
            node = chain.nodes[page + 1]
            groups = [group for group, change in table.groups.items() if change.first_live <= page]
            if (slot := self._store.find(chain, page, groups)) is not None:
                self._store.pin(slot)
                known.append(slot)
            elif node.digest not in self._arriving:
                if (slot := self._store.take()) is None:
                    break
                work.slots.append(slot)
                work.fills[slot.number], work.nodes[slot.number] = frozenset(groups), node
                self._arriving.add(node.digest)
                moves.add(table, groups, page, slot)
        self._store.unpin(known)  # used just now, and not to be evicted for their own end
        if not work.slots:
            return NOTHING_KEPT
        self._counts["saved_bytes"] += self._bytes(moves)
        self._works[name] = work
        self._saves.append((name, moves.by_group))
        return Kept(name)

    def forget(self, request: Request) -> None:
        self._drop(request.id)

    def _drop(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            record.shared = False
            self._store.unpin(record.slots.values())

    # ------------------------------------------------------------------ with the worker halves

    def undo(self, entry: Any) -> None:
        entry()

    def message(self, step_id: int) -> Any:
        for record in self._leaving:
            self._store.unpin(record.slots.values())
        self._leaving.clear()
        if not (self._saves or self._loads):
            return None
        message = {"save": self._saves, "load": self._loads}
        self._saves, self._loads = [], []
        return message

    @property
    def pending(self) -> bool:
        return bool(self._works)

    def ended(self, name: str, tokens: int | None) -> None:
        work = self._works.pop(name)
        self._arriving.difference_update(node.digest for node in work.nodes.values())
        if tokens is not None:
            self._failed(work)
        else:
            for slot in work.slots:
                slot.groups = work.fills.get(slot.number, slot.groups)
                if (node := work.nodes.get(slot.number)) is not None:
                    self._store.publish(slot, node)
            if work.record is not None:
                work.record.saved = True
                if work.record.ready:
                    self._publish(work.record)
        self._store.unpin(work.slots)

    def _failed(self, work: Work) -> None:
        """What it wrote was never to be found. What it read is not found again: it would fail again."""
        self._counts["failed"] += 1
        if work.record is not None and self._records.get(work.record.request) is work.record:
            self._drop(work.record.request)
        for slot in work.slots:
            self._store.retract(slot)

    def _name(self) -> str:
        self._names += 1
        return f"{self.name}-{self._names}"

    def _bytes(self, moves: Moves) -> int:
        return sum(self._group_bytes[group] * pages for group, pages in moves.pages.items())

    # ------------------------------------------------------------------ what is where

    def reset(self) -> int:
        for work in self._works.values():
            work.nodes.clear()
        for record in (*self._records.values(), *self._leaving):
            record.shared = False
        self._arriving.clear()
        self._chains.clear()
        return self._store.reset()

    def counters(self) -> Mapping[str, int]:
        return {**self._counts, "evicted": self._store.evictions}

    def check(self) -> None:
        held = [*(work.slots for work in self._works.values()),
                *(record.slots.values() for record in (*self._records.values(), *self._leaving))]
        self._store.check(Counter(slot.number for slots in held for slot in slots))

    def leaks(self) -> Mapping[str, int]:
        return {"slots": self._store.in_use} if self._store.in_use else {}
