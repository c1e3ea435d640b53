"""The kit compares the texts of a tiny model with and without it, greedy and sampled; then what is its own."""

import numpy as np

from hotswap.core.interfaces.speculator import ProposeRow
from hotswap.core.testing.speculator import SpeculatorSuite
from hotswap_mypart import MyPart


class TestMyPart(SpeculatorSuite):
    def make_speculator(self) -> MyPart:
        return MyPart()

    def test_it_continues_as_the_last_time(self) -> None:
        tokens = np.array([7, 1, 2, 7, 3, 4, 5, 6, 7])
        assert self.make_speculator().propose([ProposeRow("r", tokens, slots=2)]).tokens == [[3, 4]]
