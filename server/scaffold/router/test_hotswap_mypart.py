"""The kit offers it engines, some of them away; then what is its own."""

from hotswap.core.testing.router import RouterSuite, candidates, request
from hotswap_mypart import MyPart


class TestMyPart(RouterSuite):
    balances = False  # two draws do not promise that a burst is spread to the last request

    def make_router(self) -> MyPart:
        return MyPart()

    def test_the_busier_of_two_is_left_alone(self) -> None:
        router = self.make_router()
        assert {router.pick(request(number), candidates(5, 1)) for number in range(20)} == {1}

    def test_the_busiest_of_many_is_never_taken(self) -> None:
        router = self.make_router()
        assert 2 not in {router.pick(request(number), candidates(1, 2, 9, 3)) for number in range(200)}
