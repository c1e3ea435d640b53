"""Random lives of requests against a KV manager, with an oracle that checks every read of a fake cache.

The device runs late: what a plan decides happens when its step is collected, so that a page which is reused too early
is seen. See :mod:`hotswap.core.testing.kvcache_oracle` for what is checked.
"""

from collections import deque
from collections.abc import Callable
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
from hotswap.core.testing.kvcache_oracle import KEYS, Books, FakeCache, Geometry, Life, Step

MAX_LEN = 40
"""Tokens: two and a half pages of the largest size."""

GROUPS = (
    {"full": None}, {"full": None, "window": 6}, {"full": None, "narrow": 1, "wide": 13}, {"window": 3},
    {"full": None, "second": None},
)
ACTIONS = ("admit", "admit", "step", "step", "step", "suspend", "fork")


def whole(method: Callable[..., None]) -> Callable[..., None]:
    """Marks the machine as broken while ``method`` runs, and for good where it raises."""

    @wraps(method)
    def run(self: "KVCacheMachine", *args: Any, **kwargs: Any) -> None:
        before, self.broken = self.broken, True
        method(self, *args, **kwargs)
        self.broken = before

    return run


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
        plan = self.kv.configure(self.specs, num_pages * page_size * 32 * len(groups), self.limits)
        assert plan.groups.keys() == groups.keys(), "configure must plan every group"
        self.size = page_size
        self.offers = self.kv.describe().offers
        self.kv.keep_events(events)
        geometry = Geometry(plan, groups, page_size)
        self.books, self.device = Books(geometry), FakeCache(geometry)
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
        step, restore, before = Step(self.submitted + 1), self.books.save(), self.kv.usage()
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
        if len(self.books.lives) >= 5:
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
            life = Life(name, key, list(prompt), len(prompt), match.cached, match.cached, len(prompt), self.empty(),
                        self.empty())
            answer = self.reserve(life, match.cached + n + drafts, step, journal, match)
            if answer is None:
                self.books.lives[name] = life
                self.row(life, n, drafts, data.draw(st.integers(0, drafts)), step)
            return answer

        def again(step: Step, journal: list[Any]) -> Answer | None:
            return ask(step, journal, self.match(prompt, key, match.cached, 0))
        return again if ask(step, journal) is Answer.LATER else None

    def do_step(self, data: st.DataObject, step: Step, journal: list[Any]) -> Any:
        ready = [life for life in self.books.lives.values() if all(life is not row[0] for row in step.rows)
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
        victims = [life for life in self.books.lives.values() if life.id not in planned]
        if victims:
            life = data.draw(st.sampled_from(victims))
            journal.append(self.give_up(life, {step.number}))
            self.seen = [*self.seen[-8:], life.tokens[:MAX_LEN - 4]]

    def do_fork(self, data: st.DataObject, step: Step, journal: list[Any]) -> None:
        parents = [life for life in self.books.lives.values() if "fork" in self.offers and 0 < life.true <= life.told]
        if not parents or len(self.books.lives) >= 5:
            return
        parent = data.draw(st.sampled_from(parents))
        most = min(parent.true, MAX_LEN - 3)
        upto = data.draw(st.sampled_from((most, most, most - 1, 1)))
        if upto < 1:
            return
        self.names += 1
        child = Life(f"r{self.names}", parent.key, parent.tokens[:upto + 1], upto, upto, upto, upto + 1, self.empty(),
                     self.empty())
        grant = self.kv.fork(parent.id, child.id, upto, step.number)
        if not isinstance(grant, Grant):
            assert grant is not Answer.GRANTED, "a granted fork must return its grant"
            return
        sources = self.books.fork(parent, grant, upto)
        fork_step = Step(step.number)
        self.books.grant(child, grant, upto // self.size, upto, upto, fork_step)
        entries = [grant.entry]
        if self.reserve(child, upto + 1, fork_step, entries) is not None:
            self.kv.undo(grant.entry)
            return
        journal += entries
        self.books.wait({step.number}, sources)
        self.books.lives[child.id] = child
        step.grants += fork_step.grants
        step.fresh |= fork_step.fresh
        self.row(child, 1, 0, 0, step)

    def give_up(self, life: Life, fences: set[Fence], retain: bool = True) -> Any:
        entry = self.kv.release(life.id, fences, retain)
        assert self.kv.release(life.id, fences, retain) is None, "a second release must be a no-op"
        self.books.release(life, fences)
        return entry

    def submit(self, step: Step) -> None:
        self.submitted = step.number
        self.in_flight.append(step)
        self.device.poison(step.fresh)

    def empty(self) -> dict[str, dict[int, int]]:
        return {group: {} for group in self.windows}

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
        if match.coming is not None:
            self.check_coming(match, tokens, key, limit, tail)
        return match

    def check_coming(self, match: Match, tokens: list[int], key: CacheKey, limit: int, tail: int) -> None:
        """Whoever waits for it must not wait in vain: the other one computes these tokens, and has yet to."""
        assert match.coming is not None
        (request, upto), maker = match.coming, self.books.lives.get(match.coming.request)
        assert maker is not None, f"tokens are said to come from {request}, which holds no pages"
        assert match.cached < upto <= limit, f"{upto} tokens are coming, {match.cached} are there, the limit is {limit}"
        assert (maker.key, maker.tokens[:upto]) == (key, tokens[:upto]), f"{request} computes other tokens"
        assert maker.true < upto + tail + self.size, f"{upto} tokens are coming from {request}, which has computed them"

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
            assert grant is Answer.NO or self.books.fenced, "LATER, but no fence is pending"
            return grant
        shared = match.cached // self.size if match is not None else 0
        self.books.grant(life, grant, shared, life.true, upto, step)
        journal.append(grant.entry)
        return None

    @precondition(lambda self: self.in_flight)
    @rule()
    @whole
    def collect(self) -> None:
        step = self.in_flight.popleft()
        for (life, *_), sampled in zip(step.rows, self.device.run(step), strict=True):
            life.flying.pop(0)
            if life.id not in self.books.lives:
                continue  # released while in flight: the row is void
            life.known += len(sampled)
            life.bound = life.true + sum(n + drafts for n, drafts, _ in life.flying)
            self.kv.commit(life.id, life.tokens[life.told:life.known], life.true)
            life.told = life.known
            self.books.advance(life)
        self.pass_fence(step.number)

    def pass_fence(self, fence: Fence) -> None:
        self.kv.on_fence(fence)
        self.books.pass_fence(fence)

    def drain(self) -> None:
        while self.in_flight:
            self.collect()
        while self.transfers:
            self.pass_fence(self.transfers.pop())

    # ------------------------------------------------------------------ between plans

    @precondition(lambda self: self.books.lives)
    @rule(data=st.data(), retain=st.sampled_from((True, True, False)), transfer=st.sampled_from((False, False, True)))
    @whole
    def finish(self, data: st.DataObject, retain: bool, transfer: bool) -> None:
        life = data.draw(st.sampled_from(list(self.books.lives.values())))
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

    @precondition(lambda self: self.books.lives and "shrink" in self.offers)
    @rule(data=st.data())
    @whole
    def shrink(self, data: st.DataObject) -> None:
        life = data.draw(st.sampled_from(list(self.books.lives.values())))
        fences: set[Fence] = {self.submitted} if self.in_flight else set()
        self.kv.shrink(life.id, life.bound, fences)
        self.books.cut(life, life.bound, fences)

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
        self.books.compare(self.kv.usage())

    def teardown(self) -> None:
        """Everything that lived ends: every page must come back."""
        if self.broken:
            return
        self.drain()
        for life in list(self.books.lives.values()):
            self.give_up(life, set())
        self.kv.check()
        usage = self.kv.usage()
        assert (usage.held, usage.fenced) == (0, 0), f"all requests have ended, but {usage}"
