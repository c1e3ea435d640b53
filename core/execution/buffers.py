"""What the worker remembers of its requests: tokens, true lengths and page tables, in arrays with a slot a request.

A step's inputs are gathered from these arrays, so that the host needs to send neither tokens nor slots.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hotswap.core.execution.layout import IntArray, spread
from hotswap.core.interfaces.kvcache import CachePlan, Grant, GroupGrant, GroupPlan
from hotswap.core.interfaces.messages import NewRequest


@dataclass(slots=True)
class Resident:
    """A request with a worker's slot. ``error``: why it failed; it then stays, untouched, until the host drops it."""

    new: NewRequest
    slot: int
    error: str | None = None


class PageTable:
    """One cache group's tables: ``pages`` [slots, P] int32, the dummy page wherever there is none of the request's;
    ``ends`` [slots]: logical pages up to the last one."""

    def __init__(self, plan: GroupPlan, slots: int, max_tokens: int) -> None:
        self.page_size, self.dummy_page = plan.page_size, plan.dummy_page
        self.pages = np.full((slots, -(-max_tokens // plan.page_size)), plan.dummy_page, np.int32)
        self.ends = np.zeros(slots, np.int64)

    def clear(self, slot: int) -> None:
        self.pages[slot, : self.ends[slot]] = self.dummy_page
        self.ends[slot] = 0

    def apply(self, slot: int, change: GroupGrant) -> None:
        begin = max(change.truncate_to, change.first_live)
        end = begin + len(change.pages)
        row = self.pages[slot]
        row[: change.first_live] = self.dummy_page
        row[begin:end] = change.pages
        row[end : self.ends[slot]] = self.dummy_page
        self.ends[slot] = end

    def grow(self) -> None:
        self.pages = np.concatenate([self.pages, np.full_like(self.pages, self.dummy_page)])
        self.ends = np.concatenate([self.ends, np.zeros_like(self.ends)])


class RequestTable:
    """``tokens`` [slots, max_tokens] int32: known tokens, behind which a step writes its drafts. ``known`` and
    ``computed`` [slots]: the true counts; the groups ``lagging`` are ``lag`` tokens behind. ``max_tokens`` is the
    longest request with its drafts. ``version`` is another one whenever a request has come, gone or failed."""

    def __init__(self, plan: CachePlan, slots: int, max_tokens: int, lagging: Iterable[str] = ()) -> None:
        self.version = 0
        self.tokens = np.zeros((slots, max_tokens), np.int32)
        self.known = np.zeros(slots, np.int64)
        self.computed = np.zeros(slots, np.int64)
        self.lag = np.zeros(slots, np.int64)
        self._lagging = frozenset(lagging)
        self.tables = {group: PageTable(share, slots, max_tokens) for group, share in plan.groups.items()}
        self._residents: dict[str, Resident] = {}
        self._free = list(range(slots))

    def __len__(self) -> int:
        return len(self._residents)

    def __iter__(self) -> Iterator[str]:
        """The requests that are here."""
        return iter(self._residents)

    def get(self, request: str) -> Resident | None:
        return self._residents.get(request)

    def add(self, new: NewRequest) -> None:
        """A request that is here already begins anew."""
        self.remove(new.id)
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._residents[new.id] = Resident(new, slot)
        self.version += 1
        self.tokens[slot, : len(new.tokens)] = new.tokens
        self.known[slot], self.computed[slot], self.lag[slot] = len(new.tokens), 0, 0

    def remove(self, request: str) -> bool:
        """Whether it was here."""
        resident = self._residents.pop(request, None)
        if resident is None:
            return False
        for table in self.tables.values():
            table.clear(resident.slot)
        self._free.append(resident.slot)
        self.version += 1
        return True

    def resume(self, request: str, computed: int) -> None:
        """``computed`` tokens will lie in the pages that this step grants. A request that is not here is let be."""
        resident = self._residents.get(request)
        if resident is not None:
            self.computed[resident.slot], self.lag[resident.slot] = computed, 0
            for table in self.tables.values():
                table.clear(resident.slot)

    def grant(self, request: str, grant: Grant) -> None:
        """Change the page tables of a request; one that is not here is let be. Page copies are the caller's."""
        resident = self._residents.get(request)
        if resident is not None:
            for group, change in grant.groups.items():
                self.tables[group].apply(resident.slot, change)

    def fail(self, requests: Iterable[str], error: str) -> None:
        self.version += 1
        for request in requests:
            resident = self._residents.get(request)
            if resident is not None:
                resident.error = error

    def lengths(self, request: str) -> dict[str, int]:
        """The true computed length, per group. The groups of the model advance together, those of the speculator may be
        behind."""
        slot = self._residents[request].slot
        computed, lag = int(self.computed[slot]), int(self.lag[slot])
        return {group: computed - lag if group in self._lagging else computed for group in self.tables}

    def append(self, slots: IntArray, kept: Sequence[Sequence[int]]) -> None:
        """Each slot's kept tokens become known."""
        counts, known = np.array(list(map(len, kept)), np.int64), self.known[slots]
        where = spread(counts)
        self.tokens[slots[where.rows], where.positions(known)] = list(chain.from_iterable(kept))
        self.known[slots] = known + counts

    def page_rows(
        self, slots: IntArray, longest: int, groups: Iterable[str],
    ) -> Mapping[str, tuple[IntArray, int]]:
        """Of each of ``groups``, the tables [R, P] that reach ``longest`` tokens, and the page size: copies, since a
        step in flight must not see what the next one changes."""
        tables = {group: self.tables[group] for group in groups}
        return {
            group: (table.pages[slots, : -(-longest // table.page_size)], table.page_size)
            for group, table in tables.items()
        }

    def check_room(self, slots: IntArray, lengths: IntArray, groups: Iterable[str]) -> None:
        """Raise where a row would write beyond its pages, into the dummy page: the host has granted too little."""
        for group in groups:
            table = self.tables[group]
            short = table.ends[slots] * table.page_size < lengths
            if short.any():
                row = short.argmax()
                raise AssertionError(
                    f"row {row} reaches {lengths[row]} tokens, but its {table.ends[slots[row]]} pages of group "
                    f"{group!r} hold {table.ends[slots[row]] * table.page_size}")

    def _grow(self) -> None:
        """Twice as many slots. The host may hold more requests than planned for while some await their drop."""
        size = len(self.known)
        self.tokens = np.concatenate([self.tokens, np.zeros_like(self.tokens)])
        self.known = np.concatenate([self.known, np.zeros_like(self.known)])
        self.computed = np.concatenate([self.computed, np.zeros_like(self.computed)])
        self.lag = np.concatenate([self.lag, np.zeros_like(self.lag)])
        for table in self.tables.values():
            table.grow()
        self._free.extend(range(size, 2 * size))
