"""The kit runs a tiny model on the ranks it asks for, and compares them with one; then what is its own."""

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import RankPlan
from hotswap.core.testing.shard import ShardStrategySuite
from hotswap_mypart import MyPart


class TestMyPart(ShardStrategySuite):
    def make_strategy(self) -> MyPart:
        return MyPart(MyPart.Options(size=3))

    def test_more_ranks_than_there_is_to_share_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="3 ranks cannot share 2"):
            self.make_strategy().layout(ModelFacts("Small", 2, 8, 16, 64, {"mlp": 2}), RankPlan())
