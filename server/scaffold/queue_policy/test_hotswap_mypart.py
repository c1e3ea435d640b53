"""The kit runs the stock scheduler in its order, and holds its keys to what they promise; then what is its own."""

from hotswap.core.testing.queue_policy import QueuePolicySuite, View
from hotswap_mypart import MyPart


class TestMyPart(QueuePolicySuite):
    def make_policy(self) -> MyPart:
        return MyPart()

    def test_a_short_request_comes_first_until_the_long_one_has_waited(self) -> None:
        policy = self.make_policy()
        long = View("long", sequence=0, arrival=0.0, prompt_length=500)
        soon = View("soon", sequence=1, arrival=1.0, prompt_length=10)
        late = View("late", sequence=2, arrival=9.0, prompt_length=10)
        assert min(long, soon, late, key=lambda view: policy.key(view, now=9.0)) is soon
        assert min(long, late, key=lambda view: policy.key(view, now=9.0)) is long
