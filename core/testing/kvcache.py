"""What every KV manager must do. The whole test file of a manager::

    class TestMine(KVCacheManagerSuite):
        def make_manager(self) -> KVCacheManager:
            return Mine()

Tests of what a manager does not offer are skipped. The heart is :mod:`hotswap.core.testing.kvcache_machine`: random
lives of requests over a fake cache in which every read is checked.
"""

import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.kvcache import (
    NOTHING,
    CacheConstraints,
    CacheKey,
    CacheSpec,
    Fence,
    Grant,
    KVCacheManager,
)
from hotswap.core.interfaces.scheduler import Answer
from hotswap.core.testing.kvcache_harness import KEY, LONGEST, PAGE, Harness, digests, prompt
from hotswap.core.testing.kvcache_machine import KVCacheMachine


class KVCacheManagerSuite:
    """Subclass it and provide ``make_manager``."""

    machine_examples = 100
    """Random lives per run of the suite; about 30 ms each."""

    def make_manager(self) -> KVCacheManager:
        raise NotImplementedError("return a new manager, not configured yet")

    def harness(self, usable: int = 8, needs: str = "", **windows: int | None) -> Harness:
        kv = self.make_manager()
        if needs and needs not in kv.describe().offers:
            pytest.skip(f"{type(kv).__name__} does not offer {needs}")
        return Harness(kv, usable, windows or {"full": None})

    # ------------------------------------------------------------------ random lives

    def test_random_lives_read_only_what_they_wrote(self) -> None:
        machine = type("Machine", (KVCacheMachine,), {"make_manager": staticmethod(self.make_manager)})
        run_state_machine_as_test(machine, settings=settings(
            max_examples=self.machine_examples, stateful_step_count=40, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False,
        ))

    # ------------------------------------------------------------------ configure

    def test_every_group_gets_pages_besides_its_dummy_page(self) -> None:
        plan = self.harness(full=None, window=6).plan
        assert plan.groups.keys() == {"full", "window"}
        assert all(sizes.page_size == PAGE and sizes.num_pages == 9 for sizes in plan.groups.values()), plan

    def test_the_page_size_is_one_that_the_attention_backend_allows(self) -> None:
        specs = [CacheSpec("full", (0,), 1, 8, 32)]
        for allowed, expected in ((None, 16), ((16, 32), 16), ((64, 256), 64), ((1,), 1)):
            plan = self.make_manager().configure(specs, 1 << 20, CacheConstraints(32, 4, page_sizes=allowed))
            assert plan.groups["full"].page_size == expected, f"{plan} for page sizes {allowed}"

    def test_a_page_size_that_the_attention_backend_refuses_is_an_error_that_lists_the_allowed(self) -> None:
        limits = CacheConstraints(32, 4, page_size=8, page_sizes=(16, 32))
        with pytest.raises(ConfigError, match="16, 32") as error:
            self.make_manager().configure([CacheSpec("full", (0,), 1, 8, 32)], 1 << 20, limits)
        assert error.value.path == "kvcache.block_size"

    def test_a_pool_smaller_than_one_request_is_an_error_with_three_numbers(self) -> None:
        specs = [CacheSpec("full", (0,), 1, 8, 32)]
        with pytest.raises(ConfigError) as caught:
            self.make_manager().configure(specs, 100 * 32, CacheConstraints(256, 4))
        message = str(caught.value)
        assert re.search(r"\b256\b.*\b3200 bytes\b", message), message
        # Pages needed and pages had, both without the dummy page or both with it.
        assert re.search(r"\b16 pages\b.*\b5\b|\b17 pages\b.*\b6\b", message), message

    # ------------------------------------------------------------------ reserve: all or nothing; LATER or NO

    def test_a_request_that_does_not_fit_gets_no_and_takes_nothing(self) -> None:
        h = self.harness(usable=8)
        h.start("a", prompt(1))
        h.start("b", prompt(2))
        before = h.kv.usage()
        assert h.ask("c", prompt(3)) is Answer.NO
        assert h.kv.usage() == before
        h.kv.check()

    def test_room_that_is_there_already_changes_nothing(self) -> None:
        h = self.harness()
        h.start("a", prompt(1, PAGE + 1))
        assert h.kv.reserve("a", 2 * PAGE) is NOTHING
        assert h.kv.reserve("a", PAGE) is NOTHING

    def test_fenced_pages_mean_later_and_their_fence_means_granted(self) -> None:
        h = self.harness(usable=8)
        h.start("a", prompt(1))
        h.start("b", prompt(2))
        h.kv.release("a", {3}, retain=False)
        assert h.kv.usage().fenced == 4
        assert h.ask("c", prompt(3)) is Answer.LATER
        h.kv.on_fence(2)
        assert h.ask("c", prompt(3)) is Answer.LATER
        h.kv.on_fence(3)
        assert isinstance(h.ask("c", prompt(3)), Grant)
        h.kv.check()

    def test_pages_wait_for_every_fence_that_their_release_names(self) -> None:
        h = self.harness(usable=4)
        h.run("a", prompt(1), fences={2, 5, "copy"}, retain=False)
        for fence in (5, "other"):
            h.kv.on_fence(fence)
            assert h.ask("b", prompt(2)) is Answer.LATER
        h.kv.on_fence("copy")
        assert isinstance(h.ask("b", prompt(2)), Grant)

    def test_a_later_step_implies_the_steps_before_it(self) -> None:
        h = self.harness(usable=4)
        h.run("a", prompt(1), fences={2}, retain=False)
        h.kv.on_fence(7)
        assert isinstance(h.ask("b", prompt(2)), Grant)

    def test_a_promise_is_kept_against_those_who_ask_afterwards(self) -> None:
        h = self.harness(usable=8)
        h.start("a", prompt(1))
        h.start("b", prompt(2))
        h.kv.release("a", {1}, retain=False)
        assert h.ask("first", prompt(3)) is Answer.LATER
        assert h.ask("second", prompt(4)) is Answer.NO, "the fenced pages are promised already"
        assert h.ask("first", prompt(3)) is Answer.LATER, "asking again replaces a promise, it does not add one"
        h.kv.release("b", {1}, retain=False)
        assert h.ask("second", prompt(4)) is Answer.LATER, "this plan's releases count"
        h.kv.check()

    def test_granted_leaves_room_for_earlier_promises(self) -> None:
        h = self.harness(usable=12)
        for i, request_id in enumerate("ab"):
            h.start(request_id, prompt(i))
        h.kv.release("a", {1}, retain=False)
        h.kv.release("b", {1}, retain=False)
        assert isinstance(h.ask("c", prompt(3)), Grant)
        assert h.ask("d", prompt(4)) is Answer.LATER
        assert h.ask("e", prompt(5)) is Answer.LATER
        assert h.ask("f", prompt(6)) is Answer.NO
        h.kv.on_fence(1)
        assert h.ask("f", prompt(6)) is Answer.NO, "there is room now, but it is promised to d and e"
        h.kv.begin_plan()
        assert isinstance(h.ask("f", prompt(6)), Grant), "a new plan begins without promises"

    def test_the_promise_of_a_released_request_is_void(self) -> None:
        h = self.harness(usable=4)
        h.run("a", prompt(1), fences={1}, retain=False)
        assert h.ask("b", prompt(2)) is Answer.LATER
        h.kv.release("b", ())
        assert h.ask("c", prompt(3)) is Answer.LATER

    # ------------------------------------------------------------------ release and undo

    def test_a_second_release_is_a_no_op(self) -> None:
        h = self.harness()
        h.start("a", prompt(1))
        assert h.kv.release("a", {1}) is not None
        before = h.kv.usage()
        assert h.kv.release("a", {2}) is None
        assert h.kv.release("never seen", ()) is None
        assert h.kv.usage() == before
        h.kv.on_fence(1)
        assert (h.held, h.kv.usage().fenced) == (0, 0)

    @pytest.mark.parametrize("fences", [{1}, ()])
    def test_undo_brings_back_what_a_plan_has_done(self, fences: Iterable[Fence]) -> None:
        h = self.harness(usable=8)
        h.start("a", prompt(1, PAGE))
        h.start("b", prompt(2))
        before = h.kv.usage()
        entries: list[Any] = []
        for step in ("suspend b", "grow a", "admit c"):
            if step == "suspend b":
                entries.append(h.kv.release("b", fences))
            else:
                grant = h.kv.reserve("a", 2 * PAGE) if step == "grow a" else h.ask("c", prompt(3))
                entries.append(grant.entry if isinstance(grant, Grant) else None)
        for entry in reversed(entries):
            h.kv.undo(entry)
        h.kv.check()
        after = h.kv.usage()
        assert (after.held, after.fenced) == (before.held, before.fenced)
        assert h.kv.reserve("b", LONGEST) is NOTHING, "b has its table again"

    def test_owners_names_who_holds_pages(self) -> None:
        h = self.harness()
        h.start("a", prompt(1))
        assert h.kv.owners() == {"a": h.held}
        h.kv.release("a", {1})
        assert h.kv.owners() == {}

    # ------------------------------------------------------------------ prefix reuse

    def test_an_exact_duplicate_still_computes_a_token(self) -> None:
        h = self.harness(needs="prefix_reuse")
        h.run("a", prompt(1))
        assert h.match(prompt(1)).cached == LONGEST - PAGE
        assert h.kv.match(prompt(1), KEY, 0).cached == 0, "limit 0: prompt logprobs need every position"

    def test_only_verified_full_pages_are_shared(self) -> None:
        h = self.harness(needs="prefix_reuse")
        h.ask("a", prompt(1))
        assert h.match(prompt(1)).cached == 0, "reserved is not computed"
        h.kv.commit("a", [], PAGE - 1)
        assert h.match(prompt(1)).cached == 0
        h.kv.commit("a", [], PAGE)
        assert h.match(prompt(1)).cached == PAGE
        h.kv.commit("a", [], 3 * PAGE - 1)
        assert h.match(prompt(1)).cached == 2 * PAGE

    def test_sharing_takes_no_page(self) -> None:
        h = self.harness(needs="prefix_reuse")
        h.start("a", prompt(1))
        before = h.held
        h.start("b", prompt(1))
        assert h.held == before + 1, "only the last page is b's own"
        h.kv.check()

    @pytest.mark.parametrize("part", ["model_revision", "dtype", "adapter", "salt"])
    def test_each_part_of_the_key_separates(self, part: str) -> None:
        h = self.harness(needs="prefix_reuse")
        h.run("a", prompt(1))
        other = CacheKey(**{**vars(KEY), part: "other"})
        assert h.match(prompt(1), other).cached == 0
        h.run("b", prompt(1), other)
        assert h.match(prompt(1), other).cached == h.match(prompt(1)).cached == LONGEST - PAGE

    def test_the_tail_is_left_to_be_recomputed(self) -> None:
        h = self.harness(needs="prefix_reuse")
        h.run("a", prompt(1))
        longer = prompt(1) + [5]
        assert [h.match(longer, tail=tail).cached for tail in (0, 1, 4, 5, 99)] == [16, 12, 12, 8, 0]

    def test_a_group_with_a_window_needs_only_the_pages_inside_it(self) -> None:
        h = self.harness(needs="prefix_reuse", full=None, window=5)
        h.start("a", prompt(1))
        match = h.match(prompt(1) + [5])
        assert match.cached == LONGEST, "the pages before the window have been given up, and are not needed"
        grant = h.kv.reserve("b", LONGEST + 1, match, KEY, prompt(1) + [5])
        assert isinstance(grant, Grant)
        assert [(told.first_live, len(told.pages)) for told in grant.groups.values()] == [(0, 5), (3, 2)]

    def test_a_match_that_is_out_of_date_is_not_granted(self) -> None:
        h = self.harness(usable=8, needs="prefix_reuse")
        h.run("a", prompt(1))
        match = h.match(prompt(1))
        h.start("b", prompt(2))
        h.start("c", prompt(3, 2 * PAGE))  # 6 of 8 pages: two of the four that a has left are gone
        if h.match(prompt(1)).cached == match.cached:
            pytest.skip("this manager evicts another page first")
        assert h.kv.reserve("d", LONGEST, match, KEY, prompt(1)) is Answer.LATER
        h.kv.check()

    def test_pages_of_a_poisoned_request_are_dropped(self) -> None:
        h = self.harness(usable=12, needs="prefix_reuse")
        h.run("a", prompt(1), retain=False)
        assert h.match(prompt(1)).cached == 0
        h.start("sound", prompt(2, 2 * PAGE))
        h.start("poisoned", prompt(2))
        h.kv.release("poisoned", (), retain=False)
        assert h.match(prompt(2)).cached == 2 * PAGE, "pages that another request computed and holds stay"

    def test_reset_forgets_cached_pages_and_keeps_held_ones(self) -> None:
        h = self.harness(usable=12, needs="prefix_reuse")
        h.run("a", prompt(1))
        h.start("b", prompt(2, LONGEST - 1))
        assert h.kv.reset() == 4
        assert (h.held, h.kv.usage().cached) == (4, 0)
        h.kv.commit("b", [7], LONGEST)
        assert h.match(prompt(1)).cached == h.match([*prompt(2, LONGEST - 1), 7, 8]).cached == 0
        h.kv.release("b", ())
        h.kv.check()

    def test_events_tell_what_enters_and_leaves_the_index(self) -> None:
        h = self.harness(usable=4, needs="prefix_reuse")
        h.run("unheard", prompt(1))
        assert h.kv.events() == []
        h.kv.keep_events(True)
        h.run("b", prompt(2))
        h.kv.reset()
        events = h.kv.events()
        assert {(event.page_size, event.group) for event in events} == {(PAGE, "full")}
        told = [(event.kind, key) for event in events for key in event.keys or [""]]
        assert [kind for kind, _ in told] == ["evicted"] * 4 + ["stored"] * 4 + ["reset"]
        for kind, seed in (("evicted", 1), ("stored", 2)):  # b has the pages that the other one had
            assert {key for told_kind, key in told if told_kind == kind} == {
                digest.hex() for digest in digests(prompt(seed))}, f"other keys than these are {kind}"
        assert h.kv.events() == [], "events are told once"

    # ------------------------------------------------------------------ tokens from elsewhere

    @pytest.mark.parametrize("windows", [{"full": None}, {"full": None, "window": 6}, {"window": 3}])
    @pytest.mark.parametrize("upto", [2 * PAGE, 2 * PAGE + 3])
    def test_pending_tokens_get_pages_that_nobody_else_can_find_before_they_are_verified(
        self, windows: dict[str, int | None], upto: int,
    ) -> None:
        h, tokens = self.harness(12, needs="tables", **windows), prompt(1)
        h.run("gone", tokens[: PAGE])
        cached = h.match(tokens).cached
        usage = h.kv.usage()
        match = h.match(tokens)._replace(pending=upto - cached)
        grant = h.kv.reserve("a", upto + 1, match, KEY, tokens)
        assert isinstance(grant, Grant)
        for group, table in h.kv.table("a").groups.items():
            window = windows[group]
            first = 0 if window is None else max(0, upto - window + 1) // PAGE
            assert table == grant.groups[group], "a table is a grant from nothing"
            assert table.first_live <= first, "pages inside the window of a query behind the pending tokens are missing"
            assert table.first_live + len(table.pages) > upto // PAGE
        assert h.match(tokens).cached == cached
        h.kv.check()
        h.kv.undo(grant.entry)
        assert h.kv.usage() == usage
        assert isinstance(h.kv.reserve("a", upto + 1, match, KEY, tokens), Grant)
        h.kv.commit("a", [], upto)
        if "prefix_reuse" in h.kv.describe().offers and "full" in windows:  # else what a shorter prefix needs is gone
            assert h.match(tokens).cached == 2 * PAGE
        h.kv.release("a", ())
        h.kv.check()

    # ------------------------------------------------------------------ fork and hand-over

    def test_a_fork_copies_the_partial_page_and_shares_the_rest(self) -> None:
        h = self.harness(needs="fork", full=None, window=5)
        h.start("a", prompt(1, 2 * PAGE + 1))
        before = h.held
        grant = h.kv.fork("a", "b", 2 * PAGE + 1, fence=1)
        assert isinstance(grant, Grant) and h.held == before + 2, "one page a group"
        for told in grant.groups.values():
            assert [destination for _, destination in told.copies] == [told.pages[-1]]
        h.kv.release("a", ())
        assert h.kv.usage().fenced == 2, "the sources of the copies stay until the fence"
        h.kv.on_fence(1)
        assert h.kv.usage().fenced == 0
        h.kv.check()

    def test_a_fork_at_a_page_boundary_copies_nothing(self) -> None:
        h = self.harness(needs="fork")
        h.start("a", prompt(1, 2 * PAGE))
        before = h.held
        grant = h.kv.fork("a", "b", 2 * PAGE, fence=1)
        assert isinstance(grant, Grant) and h.held == before
        assert grant.groups["full"].copies == ()

    def test_a_fork_whose_parent_has_moved_on_is_gone(self) -> None:
        h = self.harness(needs="fork", full=None, window=5)
        assert h.kv.fork("nobody", "b", 4, fence=1) is Answer.GONE
        h.start("a", prompt(1))
        assert h.kv.fork("a", "b", PAGE, fence=1) is Answer.GONE
        assert h.kv.fork("a", "b", LONGEST, fence=1) is not Answer.GONE

    def test_a_successor_finds_what_its_predecessor_had(self) -> None:
        h = self.harness(needs="handover")
        h.run("gone", prompt(1, 2 * PAGE))
        h.start("runs", prompt(2, 2 * PAGE + 1))
        hits = h.match(prompt(1)).cached, h.match(prompt(2)).cached
        successor = Harness(self.make_manager(), 8, {"full": None})
        successor.kv.adopt(h.kv.handover())
        successor.kv.check()
        assert successor.kv.usage() == h.kv.usage()
        assert (successor.match(prompt(1)).cached, successor.match(prompt(2)).cached) == hits
        assert successor.kv.reserve("runs", 3 * PAGE) is NOTHING
