"""The kit compares every layout with dense attention in float64, over pages full of NaN."""

from hotswap.core.testing.attention import AttentionSuite
from hotswap_mypart import MyPart


class TestMyPart(AttentionSuite):
    def make_backend(self) -> MyPart:
        return MyPart()

    def test_it_serves_every_case_of_the_kit(self) -> None:
        support = self.make_backend().support()
        assert support.windows and support.softcap
        assert len(self.cases()) > 20


class TestMyPartInPieces(TestMyPart):
    def make_backend(self) -> MyPart:
        return MyPart(MyPart.Options(max_queries=2))
