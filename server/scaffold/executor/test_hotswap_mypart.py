"""The kit gives it toy workers that are slow, raise, refuse to start and die; then what is its own."""

from hotswap.core.testing.executor import ExecutorSuite
from hotswap_mypart import MyPart


class TestMyPart(ExecutorSuite):
    def make_executor(self) -> MyPart:
        return MyPart()

    def test_it_is_not_well_before_it_is_launched(self) -> None:
        assert self.make_executor().health() == "not launched"
