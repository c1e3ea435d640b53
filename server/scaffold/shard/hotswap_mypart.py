"""A shard strategy: how one model spreads over ranks."""

from typing import Annotated

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, ShardStrategy

AXES = ("mlp", "vocab")


class MyPart(ShardStrategy):
    """MLPs and vocabulary over ``size`` ranks; attention, and its cache, whole on each of them.

    Choose it ... (where a model's heads cannot be divided by the number of devices: MLPs are most of the weights, and
    may be cut anywhere).
    """

    class Options(ComponentOptions):
        size: Annotated[int, Field(ge=1)] = 2
        """How many ranks."""

    def describe(self) -> Description:
        why = "it shards the model over several ranks"
        return Description(requires=(Requirement("executor", "ranks", why, "execution.use"),))

    def layout(self, facts: ModelFacts, inner: RankPlan) -> RankPlan:
        """Add a dimension around what the strategies behind this one ask for. No model knows of it: layers name their
        axes, and reduce where a contraction over a sharded one ends."""
        axes = tuple(axis for axis in AXES if axis in facts.axes)
        if not axes:
            raise ConfigError(f"{facts.architecture} has none of the axes {', '.join(AXES)}; leave {self.name} out")
        most = min(facts.axes[axis] for axis in axes)
        if self.options.size > most:
            raise ConfigError(f"{self.options.size} ranks cannot share {most} indices of {axes}", "size")
        return inner.wrapped(MeshDim(self.name, self.options.size, axes))
