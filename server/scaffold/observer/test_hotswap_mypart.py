"""The kit lets it watch a busy engine, whose decisions it must not change; then what is its own."""

import pytest

from hotswap.core.testing.observer import ObserverSuite
from hotswap_mypart import MyPart


class TestMyPart(ObserverSuite):
    def make_observer(self) -> MyPart:
        return MyPart()

    def test_a_slow_step_is_logged_and_a_fast_one_is_not(self, caplog: pytest.LogCaptureFixture) -> None:
        for duration in (0.9, 1.5):
            self.make_observer().hotswap_step_finished(requests=["a", "b"], duration=duration)
        assert [record.getMessage() for record in caplog.records] == ["a step of 2 requests took 1.50 s"]
