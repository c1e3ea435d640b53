"""The kit gives it toy engines that fill up, fail and do not start; then what is its own."""

from hotswap.core.testing.deployment import DeploymentSuite
from hotswap_mypart import MyPart


class TestMyPart(DeploymentSuite):
    def make_deployment(self) -> MyPart:
        return MyPart()

    def test_the_spare_is_idle_until_the_first_is_lost(self) -> None:
        fleet = self.started()
        fleet.add("before")
        assert [len(engine.live) for engine in fleet.engines] == [1, 0]
        fleet.engines[0].fail("device lost")
        fleet.add("after")
        assert fleet.engines[1].live == ["after"]
