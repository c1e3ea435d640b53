"""Random lives of requests against a KV manager, with an oracle that checks every read of a fake cache.

A slot of the fake cache holds a hash of the whole history that a real key and value would depend on: the cache key and
all tokens up to its position. The fake device runs late: what a plan decides happens when its step is collected, so a
page that is reused too early is seen. Pages newly given out are poisoned.

The oracle keeps its own books from the grants alone and knows nothing of a manager's insides.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotswap.core.interfaces.kvcache import (
    CacheConstraints,
    CacheKey,
    CacheSpec,
    Fence,
    Grant,
    KVCacheManager,
    Match,
)
from hotswap.core.interfaces.scheduler import Answer

MAX_LEN = 40
"""Tokens: two and a half pages of the largest size."""

KEYS = (CacheKey(model_revision="r"), CacheKey(model_revision="r", salt="tenant"))
GROUPS = (
    {"full": None}, {"full": None, "window": 6}, {"full": None, "narrow": 1, "wide": 13}, {"window": 3},
    {"full": None, "second": None},
)
ACTIONS = ("admit", "admit", "step", "step", "step", "suspend", "fork")
POISON = "poison"

Page = tuple[str, int]


def slot_value(previous: int, token: int) -> int:
    return (previous * 1_000_003 + token + 1) % (2**61 - 1)


def whole(method: Callable[..., None]) -> Callable[..., None]:
    """Marks the machine as broken while ``method`` runs, and for good where it raises."""

    @wraps(method)
    def run(self: "KVCacheMachine", *args: Any, **kwargs: Any) -> None:
        before, self.broken = self.broken, True
        method(self, *args, **kwargs)
        self.broken = before

    return run


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


class KVCacheMachine(RuleBasedStateMachine):
    """Subclasses, or the factory that makes them, set ``make_manager``."""

    make_manager: Callable[[], KVCacheManager]

    broken = True
    """A rule is under way, or has failed: the books need not agree, and to say so would hide the failure."""

    @initialize(
        groups=st.sampled_from(GROUPS), page_size=st.sampled_from((1, 2, 4, 16)), runs=st.sampled_from((1, 1, 2, 3)),
        odd=st.integers(0, 3), events=st.booleans(),
    )
    def configure(self, groups: dict[str, int | None], page_size: int, runs: int, odd: int, events: bool) -> None:
        self.windows = groups
        self.specs = [
            CacheSpec(group, (0,), 1, 8, 32, "full" if window is None else "window", window)
            for group, window in groups.items()
        ]
        num_pages = 1 + runs * -(-MAX_LEN // page_size) + odd
        self.limits = CacheConstraints(MAX_LEN, 8, page_size=page_size, num_pages=num_pages)
        self.kv = self.make_manager()
        self.plan_of = self.kv.configure(self.specs, num_pages * page_size * 32 * len(groups), self.limits)
        assert self.plan_of.groups.keys() == groups.keys(), "configure must plan every group"
        self.size = page_size
        self.offers = self.kv.describe().offers
        self.kv.keep_events(events)
        self.memory: dict[tuple[str, int, int], Any] = {}
        self.lives: dict[str, Life] = {}
        self.fenced: list[tuple[set[Fence], set[Page], set[Page]]] = []
        self.in_flight: deque[Step] = deque()
        self.submitted = self.names = 0
        self.transfers: set[str] = set()
        self.seen: list[list[int]] = [[1, 2, 1, 1, 2, 2, 1, 2, 1, 1] * 3]
        self.quiet = 0
        self.broken = False

    # ------------------------------------------------------------------ plans

    @rule(data=st.data(), fails=st.sampled_from((False, False, False, True)))
    @whole
    def plan(self, data: st.DataObject, fails: bool) -> None:
        if len(self.in_flight) >= 2:
            self.collect()
        self.quiet += 1
        self.kv.begin_plan()
        journal: list[Any] = []
        step, restore, before = Step(self.submitted + 1), self.save(), self.kv.usage()
        retry: Callable[[Step, list[Any]], Answer | None] | None = None
        for action in data.draw(st.lists(st.sampled_from(ACTIONS), min_size=2, max_size=5)):
            retry = getattr(self, f"do_{action}")(data, step, journal)
        if fails:
            for entry in reversed(journal):
                self.kv.undo(entry)
            restore()
            after = self.kv.usage()
            assert (after.held, after.fenced, after.cached + after.free) == (
                before.held, before.fenced, before.cached + before.free), f"undo left {after}, it was {before}"
            return
        self.submit(step)
        if retry is not None:
            # The last to ask was told LATER: once everything in flight has passed, it must fit.
            self.drain()
            self.kv.begin_plan()
            step = Step(self.submitted + 1)
            assert retry(step, []) is None, "LATER, but it did not fit once all fences had passed"
            self.submit(step)

    def do_admit(self, data: st.DataObject, step: Step, journal: list[Any]) -> Any:
        if len(self.lives) >= 5:
            return None
        seed = data.draw(st.sampled_from(self.seen))
        shared = data.draw(st.sampled_from((len(seed), len(seed), len(seed) * 2 // 3, len(seed) // 3, 0)))
        prompt = (seed[:shared] + data.draw(st.lists(st.integers(1, 2), max_size=6)) or [1])[:MAX_LEN - 4]
        self.seen = [*self.seen[-8:], prompt]
        key = data.draw(st.sampled_from((KEYS[0], KEYS[0], KEYS[1])))
        limit = data.draw(st.sampled_from((len(prompt) - 1,) * 5 + (0,)))
        match = self.match(prompt, key, limit, data.draw(st.sampled_from((0, 0, 1, 3))))
        left = len(prompt) - match.cached
        n = data.draw(st.sampled_from((left, left, left, 1 + left // 2, 1)).filter(lambda n: n <= left))
        drafts = data.draw(st.integers(0, 2)) if match.cached + n == len(prompt) else 0
        self.names += 1
        name = f"r{self.names}"

        def ask(step: Step, journal: list[Any], match: Match = match) -> Answer | None:
            life = Life(name, key, list(prompt), len(prompt), match.cached, match.cached, len(prompt),
                        {group: {} for group in self.windows}, {group: {} for group in self.windows})
            answer = self.reserve(life, match.cached + n + drafts, step, journal, match)
            if answer is None:
                self.lives[name] = life
                self.row(life, n, drafts, data.draw(st.integers(0, drafts)), step)
            return answer

        def again(step: Step, journal: list[Any]) -> Answer | None:
            return ask(step, journal, self.match(prompt, key, match.cached, 0))
        return again if ask(step, journal) is Answer.LATER else None

    def do_step(self, data: st.DataObject, step: Step, journal: list[Any]) -> Any:
        ready = [life for life in self.lives.values() if all(life is not row[0] for row in step.rows)
                 and self.ready(life)]
        if not ready:
            return None
        life = data.draw(st.sampled_from(ready))
        left = self.ready(life)
        n = data.draw(st.sampled_from((left, left, 1)))
        drafts = min(data.draw(st.integers(0, 3)), MAX_LEN - life.bound - n) if n == left else 0
        accepted = data.draw(st.integers(0, max(0, drafts)))

        def ask(step: Step, journal: list[Any]) -> Answer | None:
            answer = self.reserve(life, life.bound + n + drafts, step, journal)
            if answer is None:
                self.row(life, n, drafts, accepted, step)
            return answer

        def again(step: Step, journal: list[Any]) -> Answer | None:
            return ask(step, journal) if self.ready(life) >= n else None
        return again if ask(step, journal) is Answer.LATER else None

    def do_suspend(self, data: st.DataObject, step: Step, journal: list[Any]) -> None:
        planned = {row[0].id for row in step.rows}
        victims = [life for life in self.lives.values() if life.id not in planned]
        if victims:
            life = data.draw(st.sampled_from(victims))
            journal.append(self.give_up(life, {step.number}))
            self.seen = [*self.seen[-8:], life.tokens[:MAX_LEN - 4]]

    def do_fork(self, data: st.DataObject, step: Step, journal: list[Any]) -> None:
        parents = [life for life in self.lives.values() if "fork" in self.offers and 0 < life.true <= life.told]
        if not parents or len(self.lives) >= 5:
            return
        parent = data.draw(st.sampled_from(parents))
        most = min(parent.true, MAX_LEN - 3)
        upto = data.draw(st.sampled_from((most, most, most - 1, 1)))
        if upto < 1:
            return
        self.names += 1
        child = Life(f"r{self.names}", parent.key, parent.tokens[:upto + 1], upto, upto, upto, upto + 1,
                     {group: {} for group in self.windows}, {group: {} for group in self.windows})
        grant = self.kv.fork(parent.id, child.id, upto, step.number)
        if not isinstance(grant, Grant):
            assert grant is not Answer.GRANTED, "a granted fork must return its grant"
            return
        self.check_copies(parent, grant, upto)
        fork_step = Step(step.number)
        self.apply(child, grant, upto // self.size, upto, upto, fork_step)
        entries = [grant.entry]
        if self.reserve(child, upto + 1, fork_step, entries) is not None:
            self.kv.undo(grant.entry)
            return
        journal += entries
        sources = {(group, src) for group, told in grant.groups.items() for src, _ in told.copies}
        self.fenced.append(({step.number}, sources, set()))
        self.lives[child.id] = child
        step.grants += fork_step.grants
        step.fresh |= fork_step.fresh
        self.row(child, 1, 0, 0, step)

    def ready(self, life: Life) -> int:
        """Tokens that it could compute now: all that the host knows, or the one that is being sampled."""
        if life.bound + 1 >= MAX_LEN:
            return 0
        return 1 if any(samples for _, _, samples in life.flying) else life.known - life.bound

    def row(self, life: Life, n: int, drafts: int, accepted: int, step: Step) -> None:
        samples = life.bound + n >= life.known
        life.bound += n + drafts
        life.flying.append((n, drafts, samples))
        step.rows.append((life, n, drafts, accepted))

    def match(self, tokens: list[int], key: CacheKey, limit: int, tail: int) -> Match:
        before = self.kv.usage()
        match = self.kv.match(tokens, key, limit, tail)
        assert self.kv.usage() == before, "match must have no side effect"
        assert 0 <= match.cached <= max(0, limit), f"match returned {match.cached} tokens, the limit was {limit}"
        assert match.cached % self.size == 0, f"match returned {match.cached} tokens, not whole pages of {self.size}"
        assert match.cached == 0 or match.cached <= len(tokens) - tail, "match must leave the tail to be recomputed"
        return match

    def reserve(
        self, life: Life, upto: int, step: Step, journal: list[Any], match: Match | None = None
    ) -> Answer | None:
        """None: granted, and the books say so."""
        before = self.kv.usage()
        told = (match, life.key, life.tokens) if match is not None else ()
        grant = self.kv.reserve(life.id, upto, *told)
        if not isinstance(grant, Grant):
            assert grant in (Answer.LATER, Answer.NO), f"reserve answered {grant}"
            assert self.kv.usage() == before, f"{grant}, but pages were taken"
            assert grant is Answer.NO or self.fenced, "LATER, but no fence is pending"
            return grant
        shared = match.cached // self.size if match is not None else 0
        self.apply(life, grant, shared, life.true, upto, step)
        journal.append(grant.entry)
        return None

    # ------------------------------------------------------------------ the books

    def owned(self) -> set[Page]:
        return {page for life in self.lives.values() for page in life.pages()}

    def apply(self, life: Life, grant: Grant, shared: int, start: int, upto: int, step: Step) -> None:
        """Note a grant; pages at logical page ``shared`` and beyond must be in nobody's use."""
        busy = self.owned() | life.pages() | {page for _, pages, _ in self.fenced for page in pages} | step.fresh
        for group, (truncate_to, pages, first_live, _) in grant.groups.items():
            table = {i: page for i, page in life.tables[group].items() if first_live <= i < truncate_to}
            for logical, page in enumerate(pages, max(truncate_to, first_live)):
                sizes = self.plan_of.groups[group]
                assert 0 <= page < sizes.num_pages and page != sizes.dummy_page, f"{page} is no page of group {group}"
                if logical >= shared:
                    assert (group, page) not in busy, f"page {page} of {group} given to {life.id} while in use"
                    step.fresh.add((group, page))
                    busy.add((group, page))
                table[logical] = page
            life.tables[group] = table
            life.left = {(g, page) for g, page in life.left if g != group or page in table.values()}
        for group, table in life.tables.items():
            needed = range(self.first_page(group, start), -(-upto // self.size))
            missing = [logical for logical in needed if logical not in table]
            assert not missing, f"{life.id} was granted {upto} tokens, but group {group} lacks pages {missing}"
        step.grants.append((life, grant))

    def check_copies(self, parent: Life, grant: Grant, upto: int) -> None:
        for group, told in grant.groups.items():
            copies = [src for src, _ in told.copies]
            partial = [parent.tables[group][upto // self.size]] if upto % self.size else []
            assert copies == partial, f"fork at {upto} copies pages {copies} of group {group}, expected {partial}"

    def first_page(self, group: str, position: int) -> int:
        window = self.windows[group]
        return 0 if window is None else max(0, position - window + 1) // self.size

    def give_up(self, life: Life, fences: Iterable[Fence], retain: bool = True) -> Any:
        fences = set(fences)
        entry = self.kv.release(life.id, fences, retain)
        assert self.kv.release(life.id, fences, retain) is None, "a second release must be a no-op"
        del self.lives[life.id]
        if fences:
            self.fenced.append((fences, life.pages(), life.left - life.pages()))
        return entry

    def save(self) -> Callable[[], None]:
        """Returns what puts the books back."""
        lives = dict(self.lives)
        states = [(life, life.bound, list(life.flying), {g: dict(t) for g, t in life.tables.items()}, set(life.left))
                  for life in lives.values()]
        fenced = [(set(fences), pages, left) for fences, pages, left in self.fenced]

        def restore() -> None:
            self.lives, self.fenced = lives, fenced
            for life, bound, flying, tables, left in states:
                life.bound, life.flying, life.tables, life.left = bound, flying, tables, left
        return restore

    # ------------------------------------------------------------------ the device

    def submit(self, step: Step) -> None:
        self.submitted = step.number
        self.in_flight.append(step)
        for group, page in step.fresh:
            for offset in range(self.size):
                self.memory[group, page, offset] = POISON

    def run(self, step: Step) -> list[list[int]]:
        """Carry out one step; returns the tokens sampled by each row."""
        for life, grant in step.grants:
            for group, (truncate_to, pages, first_live, copies) in grant.groups.items():
                table = {i: page for i, page in life.device[group].items() if first_live <= i < truncate_to}
                table.update(enumerate(pages, max(truncate_to, first_live)))
                life.device[group] = table
                for src, dst in copies:
                    for offset in range(self.size):
                        self.memory[group, dst, offset] = self.memory[group, src, offset]
        return [self.run_row(*row) for row in step.rows]

    def run_row(self, life: Life, n: int, drafts: int, accepted: int) -> list[int]:
        start, sampled = life.true, []
        if start + n == len(life.tokens):
            for _ in range(accepted + 1):
                sampled.append(1 + life.history()[-1] // 7 % 2)
                life.tokens.append(sampled[-1])
        else:
            accepted = 0
        history = life.history()
        for group, table in life.device.items():
            for position in range(start, start + n + drafts):
                sure = position < start + n + accepted
                page, offset = table[position // self.size], position % self.size
                self.memory[group, page, offset] = history[position] if sure else "rejected draft"
            window = self.windows[group]
            for position in range(max(0, start - window + 1) if window else 0, start + n + accepted):
                value = self.memory.get((group, table[position // self.size], position % self.size))
                assert value == history[position], (
                    f"{life.id} reads position {position} of group {group} from page {table[position // self.size]}: "
                    f"{value if isinstance(value, str) else 'what another history wrote'}")
        life.true = start + n + accepted
        return sampled

    @precondition(lambda self: self.in_flight)
    @rule()
    @whole
    def collect(self) -> None:
        step = self.in_flight.popleft()
        for (life, *_), sampled in zip(step.rows, self.run(step), strict=True):
            life.flying.pop(0)
            if life.id not in self.lives:
                continue  # released while in flight: the row is void
            life.known += len(sampled)
            life.bound = life.true + sum(n + drafts for n, drafts, _ in life.flying)
            self.kv.commit(life.id, life.tokens[life.told:life.known], life.true)
            life.told = life.known
            for group, table in life.tables.items():
                for logical in [i for i in table if i < self.first_page(group, life.true)]:
                    life.left.add((group, table.pop(logical)))
        self.pass_fence(step.number)

    def pass_fence(self, fence: Fence) -> None:
        self.kv.on_fence(fence)
        for fences, _, _ in self.fenced:
            fences -= {f for f in fences if f == fence or isinstance(f, int) and isinstance(fence, int) and f < fence}
        self.fenced = [entry for entry in self.fenced if entry[0]]

    def drain(self) -> None:
        while self.in_flight:
            self.collect()
        while self.transfers:
            self.pass_fence(self.transfers.pop())

    # ------------------------------------------------------------------ between plans

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), retain=st.sampled_from((True, True, True, False)), transfer=st.sampled_from((False, False, True)))
    @whole
    def finish(self, data: st.DataObject, retain: bool, transfer: bool) -> None:
        life = data.draw(st.sampled_from(list(self.lives.values())))
        fences: set[Fence] = {self.submitted} if self.in_flight else set()
        if transfer:
            self.names += 1
            self.transfers.add(f"transfer {self.names}")
            fences.add(f"transfer {self.names}")
        self.give_up(life, fences, retain)

    @precondition(lambda self: self.transfers)
    @rule()
    def finish_transfer(self) -> None:
        self.pass_fence(self.transfers.pop())

    @precondition(lambda self: self.lives and "shrink" in self.offers)
    @rule(data=st.data())
    @whole
    def shrink(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(list(self.lives.values())))
        fences: set[Fence] = {self.submitted} if self.in_flight else set()
        self.kv.shrink(life.id, life.bound, fences)
        gone = set()
        for group, table in life.tables.items():
            for logical in [i for i in table if i >= -(-life.bound // self.size)]:
                gone.add((group, table.pop(logical)))
        if fences:
            self.fenced.append((fences, gone, set()))

    @precondition(lambda self: self.quiet > 3)
    @rule()
    @whole
    def reset(self) -> None:
        self.quiet = 0
        cached = self.kv.usage().cached
        assert self.kv.reset() == cached, "reset must return the number of pages that it dropped"
        assert self.kv.usage().cached == 0, "reset must leave nothing cached"
        assert self.match(self.seen[0], KEYS[0], len(self.seen[0]), 0).cached == 0, "a match after reset"

    @precondition(lambda self: "handover" in self.offers and self.quiet > 3)
    @rule()
    @whole
    def exchange(self) -> None:
        self.quiet = 0
        self.drain()
        before, successor = self.kv.usage(), self.make_manager()
        successor.configure(self.specs, 0, self.limits)
        successor.adopt(self.kv.handover())
        self.kv = successor
        assert self.kv.usage() == before, f"after the hand-over {self.kv.usage()}, before it {before}"

    @invariant()
    def books_agree(self) -> None:
        if not self.broken:
            self.compare_books()

    @whole
    def compare_books(self) -> None:
        self.kv.check()
        usage, owned = self.kv.usage(), self.owned()
        perhaps = {page for life in self.lives.values() for page in life.left}
        fenced = {page for _, pages, _ in self.fenced for page in pages}
        perhaps_fenced = {page for _, _, left in self.fenced for page in left}
        assert usage.total == sum(sizes.num_pages - 1 for sizes in self.plan_of.groups.values()), usage
        assert usage.total == usage.held + usage.fenced + usage.cached + usage.free, f"{usage} does not add up"
        assert len(owned) <= usage.held <= len(owned | perhaps), f"{usage}, but requests hold {len(owned)} pages"
        low, high = len(fenced - owned - perhaps), len((fenced | perhaps_fenced) - owned)
        assert low <= usage.fenced <= high, f"{usage}, but {low} to {high} pages wait for a fence"

    def teardown(self) -> None:
        """Everything that lived ends: every page must come back."""
        if self.broken:
            return
        self.drain()
        for life in list(self.lives.values()):
            self.give_up(life, ())
        self.kv.check()
        usage = self.kv.usage()
        assert (usage.held, usage.fenced) == (0, 0), f"all requests have ended, but {usage}"
