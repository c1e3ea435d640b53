"""The oracle of the KV managers' conformance kit: a fake cache that checks every read, and books of who holds what.

A slot of the fake cache holds a hash of the whole history that a real key and value would depend on: the cache key and
all tokens up to its position. The books are kept from the grants alone; they know nothing of a manager's insides.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from hotswap.core.interfaces.kvcache import CacheKey, CachePlan, CacheUsage, Fence, Grant

KEYS = (CacheKey(model_revision="r"), CacheKey(model_revision="r", salt="tenant"))
POISON = "poison"

Page = tuple[str, int]
"""(group, page id)."""


def slot_value(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 1) % (2**61 - 1)


@dataclass(eq=False)
class Life:
    """One request: what the device knows of it, and what the host does."""

    id: str
    key: CacheKey
    tokens: list[int]
    told: int
    """Tokens that the manager knows."""
    true: int
    """Tokens that the device has computed, sure ones only."""
    bound: int
    """The host's upper bound of ``true``, with everything in flight."""
    known: int = 0
    """Tokens that the host knows."""
    tables: dict[str, dict[int, int]] = field(default_factory=dict)
    device: dict[str, dict[int, int]] = field(default_factory=dict)
    left: set[Page] = field(default_factory=set)
    """Pages that have left a window: the manager may or may not hold them still."""
    flying: list[tuple[int, int, bool]] = field(default_factory=list)

    def history(self) -> list[int]:
        values, value = [], KEYS.index(self.key)
        for token in self.tokens:
            value = slot_value(value, token)
            values.append(value)
        return values

    def pages(self) -> set[Page]:
        return {(group, page) for group, table in self.tables.items() for page in table.values()}


@dataclass
class Step:
    """``rows``: (life, known tokens to compute, drafts, drafts that will be accepted)."""

    number: int
    grants: list[tuple[Life, Grant]] = field(default_factory=list)
    rows: list[tuple[Life, int, int, int]] = field(default_factory=list)
    fresh: set[Page] = field(default_factory=set)


class Geometry:
    """Page size, windows, and the pages that each group has."""

    def __init__(self, plan: CachePlan, windows: Mapping[str, int | None], page_size: int) -> None:
        self.plan = plan
        self.windows = windows
        self.page_size = page_size

    def first_seen(self, group: str, position: int) -> int:
        """The first position that a query at ``position`` sees."""
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1)

    def first_page(self, group: str, position: int) -> int:
        return self.first_seen(group, position) // self.page_size


class FakeCache:
    """The device: carries out steps late and in order, and checks what each row reads."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._slots: dict[tuple[str, int, int], int | str] = {}

    def poison(self, pages: Set[Page]) -> None:
        for group, page in pages:
            for offset in range(self._geometry.page_size):
                self._slots[group, page, offset] = POISON

    def run(self, step: Step) -> list[list[int]]:
        """Returns the tokens sampled by each row."""
        for life, grant in step.grants:
            for group, (truncate_to, pages, first_live, copies) in grant.groups.items():
                table = {i: page for i, page in life.device[group].items() if first_live <= i < truncate_to}
                table.update(enumerate(pages, max(truncate_to, first_live)))
                life.device[group] = table
                for src, dst in copies:
                    for offset in range(self._geometry.page_size):
                        self._slots[group, dst, offset] = self._slots[group, src, offset]
        return [self._run_row(*row) for row in step.rows]

    def _run_row(self, life: Life, n: int, drafts: int, accepted: int) -> list[int]:
        start, sampled = life.true, []
        if start + n == len(life.tokens):
            for _ in range(accepted + 1):
                sampled.append(1 + life.history()[-1] // 7 % 2)
                life.tokens.append(sampled[-1])
        else:
            accepted = 0
        history, sure = life.history(), start + n + accepted
        for group in life.device:
            for position in range(start, start + n + drafts):
                value = history[position] if position < sure else "rejected draft"
                self._slots[self._slot(life, group, position)] = value
            for position in range(self._geometry.first_seen(group, start), sure):
                found = self._slots.get(self._slot(life, group, position))
                assert found == history[position], (
                    f"{life.id} reads position {position} of group {group} from page "
                    f"{self._slot(life, group, position)[1]}: "
                    f"{found if isinstance(found, str) else 'what another history wrote'}")
        life.true = sure
        return sampled

    def _slot(self, life: Life, group: str, position: int) -> tuple[str, int, int]:
        logical, offset = divmod(position, self._geometry.page_size)
        return group, life.device[group][logical], offset


@dataclass
class Fenced:
    """``pages`` are out of reach until all ``fences`` have passed; of ``perhaps`` that is not known."""

    fences: set[Fence]
    pages: set[Page]
    perhaps: set[Page] = field(default_factory=set)


class Books:
    """Who holds which pages, and what waits for which fences."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self.lives: dict[str, Life] = {}
        self.fenced: list[Fenced] = []

    def owned(self) -> set[Page]:
        return {page for life in self.lives.values() for page in life.pages()}

    def grant(self, life: Life, grant: Grant, shared: int, start: int, upto: int, step: Step) -> None:
        """Note a grant for tokens ``start .. upto - 1``. Its pages at logical page ``shared`` and beyond must be in
        nobody's use."""
        size = self._geometry.page_size
        busy = self.owned() | life.pages() | step.fresh | {page for entry in self.fenced for page in entry.pages}
        for group, (truncate_to, pages, first_live, _) in grant.groups.items():
            table = {i: page for i, page in life.tables[group].items() if first_live <= i < truncate_to}
            for logical, page in enumerate(pages, max(truncate_to, first_live)):
                sizes = self._geometry.plan.groups[group]
                assert 0 <= page < sizes.num_pages and page != sizes.dummy_page, f"{page} is no page of group {group}"
                if logical >= shared:
                    assert (group, page) not in busy, f"page {page} of {group} given to {life.id} while in use"
                    step.fresh.add((group, page))
                    busy.add((group, page))
                table[logical] = page
            life.tables[group] = table
            life.left = {(g, page) for g, page in life.left if g != group or page in table.values()}
        for group, table in life.tables.items():
            needed = range(self._geometry.first_page(group, start), -(-upto // size))
            missing = [logical for logical in needed if logical not in table]
            assert not missing, f"{life.id} was granted {upto} tokens, but group {group} lacks pages {missing}"
        step.grants.append((life, grant))

    def fork(self, parent: Life, grant: Grant, upto: int) -> set[Page]:
        """The pages that a fork copies from: none or the parent's partial page, per group."""
        sources = set()
        for group, told in grant.groups.items():
            copies = [src for src, _ in told.copies]
            logical, rest = divmod(upto, self._geometry.page_size)
            partial = [parent.tables[group][logical]] if rest else []
            assert copies == partial, f"fork at {upto} copies pages {copies} of group {group}, expected {partial}"
            sources |= {(group, src) for src in copies}
        return sources

    def advance(self, life: Life) -> None:
        """After a commit, pages that have left their window may be given up, and may not."""
        for group, table in life.tables.items():
            for logical in [i for i in table if i < self._geometry.first_page(group, life.true)]:
                life.left.add((group, table.pop(logical)))

    def cut(self, life: Life, upto: int, fences: set[Fence]) -> None:
        """After a shrink."""
        end = -(-upto // self._geometry.page_size)
        gone = {(group, table.pop(logical)) for group, table in life.tables.items()
                for logical in list(table) if logical >= end}
        self.wait(fences, gone)

    def release(self, life: Life, fences: set[Fence]) -> None:
        del self.lives[life.id]
        self.wait(fences, life.pages(), life.left - life.pages())

    def wait(self, fences: set[Fence], pages: set[Page], perhaps: Set[Page] = frozenset()) -> None:
        if fences:
            self.fenced.append(Fenced(set(fences), pages, set(perhaps)))

    def pass_fence(self, fence: Fence) -> None:
        for entry in self.fenced:
            entry.fences -= {f for f in entry.fences
                             if f == fence or isinstance(f, int) and isinstance(fence, int) and f < fence}
        self.fenced = [entry for entry in self.fenced if entry.fences]

    def save(self) -> Callable[[], None]:
        """Returns what puts the books back."""
        lives, fenced = dict(self.lives), [Fenced(set(e.fences), e.pages, e.perhaps) for e in self.fenced]
        states: list[tuple[Life, dict[str, Any]]] = [
            (life, {"bound": life.bound, "flying": list(life.flying), "left": set(life.left),
                    "tables": {group: dict(table) for group, table in life.tables.items()}})
            for life in lives.values()
        ]

        def restore() -> None:
            self.lives, self.fenced = lives, fenced
            for life, state in states:
                vars(life).update(state)
        return restore

    def compare(self, usage: CacheUsage) -> None:
        """Does a manager's usage agree with the books?"""
        owned, perhaps = self.owned(), {page for life in self.lives.values() for page in life.left}
        fenced = {page for entry in self.fenced for page in entry.pages}
        perhaps_fenced = {page for entry in self.fenced for page in entry.perhaps}
        assert usage.total == sum(sizes.num_pages - 1 for sizes in self._geometry.plan.groups.values()), usage
        assert usage.total == usage.held + usage.fenced + usage.cached + usage.free, f"{usage} does not add up"
        assert min(usage.held, usage.fenced, usage.cached, usage.free) >= 0, usage
        assert len(owned) <= usage.held <= len(owned | perhaps), f"{usage}, but requests hold {len(owned)} pages"
        low, high = len(fenced - owned - perhaps), len((fenced | perhaps_fenced) - owned)
        assert low <= usage.fenced <= high, f"{usage}, but {low} to {high} pages wait for a fence"
