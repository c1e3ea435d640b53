"""What every shard strategy must do. The whole test file of a strategy::

    class TestMine(ShardStrategySuite):
        def make_strategy(self):
            return MyStrategy(MyStrategy.Options(size=2))

The heart is rank equality: a tiny model on the ranks that the strategy asks for, which are threads here, gives the
logits that it gives on one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.execution.worker import model_for
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, ShardStrategy
from hotswap.core.modeling.checkpoint import Checkpoint, open_checkpoint
from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint
from hotswap.core.testing.dense import ThreadMesh, loaded, logits_of, on_ranks

IDS = [3, 9, 4, 9, 2, 7, 7, 1, 12, 5]
INNER = MeshDim("other", 2, ("something else",))


class ShardStrategySuite:
    """Subclass it and provide ``make_strategy``."""

    config: dict[str, Any] = LLAMA
    """The model's, of which ``core/testing/checkpoints.py`` makes a checkpoint."""
    inner: RankPlan = RankPlan()
    """What stands behind the strategy in the list, for one that needs it."""
    tolerance = 1e-4

    def make_strategy(self) -> ShardStrategy:
        raise NotImplementedError("return a new instance of the strategy under test")

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        return open_checkpoint(str(tiny_checkpoint(tmp_path / "model", self.config)), progress=False)

    def facts(self, checkpoint: Checkpoint) -> ModelFacts:
        return model_for(checkpoint).facts(checkpoint.config)

    def test_its_plan_follows_from_the_facts_alone(self, checkpoint: Checkpoint) -> None:
        facts = self.facts(checkpoint)
        first, second = (self.make_strategy().layout(facts, self.inner) for _ in range(2))
        assert first == second

    def test_it_shards_axes_that_the_model_has_and_each_once(self, checkpoint: Checkpoint) -> None:
        facts = self.facts(checkpoint)
        plan = self.make_strategy().layout(facts, self.inner)
        sharded = [axis for dim in plan.dims for axis in dim.axes if dim not in self.inner.dims]
        sharded += plan.across.axes if plan.across else ()
        assert sharded, "it shards nothing"
        assert set(sharded) <= facts.axes.keys(), f"{facts.architecture} has {set(facts.axes)}, not all of {sharded}"
        assert len(sharded) == len(set(sharded)), f"an axis is in two dimensions: {plan.dims}"

    def test_what_stands_behind_it_keeps_its_size(self, checkpoint: Checkpoint) -> None:
        """Ranks may be added, or an axis of an inner dimension moved; none is taken away."""
        facts = self.facts(checkpoint)
        inner = RankPlan((*self.inner.dims, INNER), depth=3)
        try:
            plan = self.make_strategy().layout(facts, inner)
        except ConfigError:
            return  # it wants nothing behind it, and says so
        assert INNER in plan.dims, "a dimension of an inner strategy is gone"
        assert plan.world_size % inner.world_size == 0
        assert plan.depth is not None and plan.depth <= 3, "it has lifted an inner strategy's limit on the depth"

    def test_a_model_without_its_axes_is_refused_by_name(self) -> None:
        with pytest.raises(ConfigError, match="Bare"):
            self.make_strategy().layout(ModelFacts("Bare", 2, 8, 16, 64), self.inner)

    def test_all_ranks_together_give_what_one_gives(self, checkpoint: Checkpoint) -> None:
        plan = self.make_strategy().layout(self.facts(checkpoint), self.inner)
        if plan.across is not None:
            pytest.skip("it spans engines, which have requests of their own")

        def run(mesh: ThreadMesh) -> torch.Tensor:
            return logits_of(loaded(model_for(checkpoint), checkpoint, mesh), IDS, [4, 1, 5], mesh)

        expected = logits_of(loaded(model_for(checkpoint), checkpoint), IDS)
        found = [logits for logits in on_ranks(plan, run) if len(logits)]
        assert found, "no rank is in a last stage"
        for logits in found:
            torch.testing.assert_close(logits, expected, atol=self.tolerance, rtol=0)

    def test_every_rank_holds_a_part_and_no_rank_all(self, checkpoint: Checkpoint) -> None:
        plan = self.make_strategy().layout(self.facts(checkpoint), self.inner)
        if plan.world_size == 1:
            return

        def count(mesh: ThreadMesh) -> int:
            model = model_for(checkpoint)
            model.build(checkpoint.config, mesh, torch.float32, "cpu")
            with checkpoint.weights() as weights:
                model.load(weights)
            return weights.taken

        [whole], parts = on_ranks(RankPlan(), count), on_ranks(plan, count)
        assert max(parts) < whole, f"a rank holds {max(parts)} of {whole} values: nothing is sharded"
        assert sum(parts) >= whole, "values that no rank holds"
