"""What every eviction policy must do. The whole test file of a policy::

    class TestMine(EvictionPolicySuite):
        def make_policy(self) -> EvictionPolicy:
            return Mine()
"""

from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotswap.core.interfaces.kvcache import EvictionPolicy


class EvictionPolicySuite:
    """Subclass it and provide ``make_policy``."""

    machine_examples = 200
    """Random lives of pages per run of the suite."""

    def make_policy(self) -> EvictionPolicy:
        raise NotImplementedError("return a new, empty policy")

    def test_an_empty_policy_has_nothing_to_evict(self) -> None:
        with pytest.raises(IndexError):
            self.make_policy().pick()

    def test_a_held_page_is_never_picked(self) -> None:
        policy = self.make_policy()
        policy.on_insert("held")
        with pytest.raises(IndexError):
            policy.pick()
        policy.on_unpin("held")
        assert policy.pick() == "held"
        policy.on_hit("held")
        policy.on_pin("held")
        with pytest.raises(IndexError):
            policy.pick()

    def test_picking_changes_nothing_until_the_page_is_removed(self) -> None:
        policy = self.make_policy()
        for page in (1, 2):
            policy.on_insert(page)
            policy.on_unpin(page)
        first = policy.pick()
        assert policy.pick() == first
        policy.on_remove(first)
        assert policy.pick() == 3 - int(str(first))

    def test_a_clone_is_empty_and_apart(self) -> None:
        policy = self.make_policy()
        policy.on_insert(1)
        policy.on_unpin(1)
        clone = policy.clone()
        assert type(clone) is type(policy) and clone.options == policy.options
        with pytest.raises(IndexError):
            clone.pick()
        assert policy.pick() == 1

    def test_whatever_happens_every_candidate_is_picked_once_and_nothing_else(self) -> None:
        @settings(max_examples=self.machine_examples, deadline=None, derandomize=True, database=None)
        @given(st.lists(st.tuples(st.sampled_from(("insert", "unpin", "pin", "hit", "remove", "evict")),
                                  st.integers(0, 6)), max_size=60))
        def run(calls: list[tuple[str, int]]) -> None:
            policy, held, candidates = self.make_policy(), set[Hashable](), set[Hashable]()
            for call, page in calls:
                if call == "insert" and page not in held | candidates:
                    policy.on_insert(page)
                    held.add(page)
                elif call == "unpin" and page in held:
                    policy.on_unpin(page)
                    held.remove(page)
                    candidates.add(page)
                elif call in ("pin", "hit") and page in candidates:
                    if call == "hit":
                        policy.on_hit(page)
                    policy.on_pin(page)
                    candidates.remove(page)
                    held.add(page)
                elif call == "hit" and page in held:
                    policy.on_hit(page)
                elif call == "remove" and page in held | candidates:
                    policy.on_remove(page)
                    held.discard(page)
                    candidates.discard(page)
                elif call == "evict":
                    self._evict(policy, candidates)
            while candidates:
                self._evict(policy, candidates)
            self._evict(policy, candidates)

        run()

    def _evict(self, policy: EvictionPolicy, candidates: set[Hashable]) -> None:
        if not candidates:
            with pytest.raises(IndexError):
                policy.pick()
            return
        page = policy.pick()
        assert page in candidates, f"picked {page!r}, candidates are {candidates}"
        policy.on_remove(page)
        candidates.remove(page)
