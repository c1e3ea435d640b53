"""The kit runs random lives of pages past it; then what is its own."""

from hotswap.core.testing.eviction import EvictionPolicySuite
from hotswap_mypart import MyPart


class TestMyPart(EvictionPolicySuite):
    def make_policy(self) -> MyPart:
        return MyPart()

    def test_the_page_that_was_given_up_last_goes_first(self) -> None:
        policy = self.make_policy()
        for page in ("a", "b", "c"):
            policy.on_insert(page)
        for page in ("b", "c", "a"):
            policy.on_unpin(page)
        assert policy.pick() == "a"

    def test_what_is_spared_goes_once_nothing_else_is_left(self) -> None:
        policy = MyPart(MyPart.Options(spared=1)).clone()
        for page in ("a", "b"):
            policy.on_insert(page)
            policy.on_unpin(page)
        assert policy.pick() == "a"
        policy.on_remove("a")
        assert policy.pick() == "b"
