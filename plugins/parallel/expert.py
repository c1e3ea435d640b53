"""Expert parallelism: each rank holds some of the experts."""

from dataclasses import replace

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import Description, Requirement
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import Across, RankPlan, ShardStrategy
from hotswap.plugins.parallel.tensor import NEEDS_RANKS


class ExpertParallel(ShardStrategy):
    """Whole experts on ranks that are there already (after Lepikhin et al., "GShard", 2020). Choose it for mixtures of
    many small experts: each rank multiplies whole matrices of its experts and not slices of all.

    Before `tensor` in the list: on the ranks that share a layer. All see the same tokens, and what their experts add is
    summed where the slices' sums would have been. Behind `data` with nothing else: over the engines, each of which has
    its own requests, cache and attention. Tokens are sent to their experts' ranks and back, and a step of one engine is
    a step of all; one that dies ends the others. Choose that where the experts need the memory of many devices, and
    replicas of the attention serve more requests than slices of it would.
    """

    def describe(self) -> Description:
        why = "it spreads experts over ranks that are there already"
        remedy = f"parallel: name it behind data, [{{use: data, replicas: 2}}, {self.name}], or before tensor, " \
            f"[{self.name}, {{use: tensor, size: 2}}]"
        return Description(requires=(NEEDS_RANKS, Requirement(("shard", "deployment"), "peers", why, remedy)))

    def layout(self, facts: ModelFacts, inner: RankPlan) -> RankPlan:
        count = facts.axes.get("expert")
        if count is None:
            raise ConfigError(f"{facts.architecture} has no experts; leave {self.name} out")
        sharing = [index for index, dim in enumerate(inner.dims) if "expert_mlp" in dim.axes]
        if not sharing and inner.world_size == 1:
            return replace(inner, across=Across(self.name, ("expert",), count))
        if not sharing:
            raise ConfigError(
                f"{self.name} spreads experts over the ranks that share a layer, and there are none; name it before "
                "tensor: parallel: [expert, {use: tensor, size: 2}]")
        dim = inner.dims[sharing[-1]]
        if dim.size > count:
            raise ConfigError(
                f"{dim.size} ranks cannot share the {count} experts of {facts.architecture}; at most {count} can")
        axes = (*(axis for axis in dim.axes if axis != "expert_mlp"), "expert")
        dims = tuple(replace(each, axes=axes) if each is dim else each for each in inner.dims)
        return replace(inner, dims=dims)
