"""Pipeline parallelism: each stage holds some of the layers."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Annotated

from pydantic import Field, ValidationInfo, field_validator

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, ShardStrategy
from hotswap.plugins.parallel.tensor import NEEDS_RANKS


class PipelineParallel(ShardStrategy):
    """Layers over ``size`` stages, one behind the other (Huang et al., "GPipe", 2019). Choose it for devices with a
    slow link, or many of them: a step costs one transfer of hidden states a stage, and as many steps are in flight as
    there are stages, each with its share of the requests.

    Stages are cut where the most expensive one is cheapest, counted in weights that a token is multiplied with: those
    of each layer, and the output head's, which the last stage has. A request is in one step at a time.
    """

    class Options(ComponentOptions):
        size: Annotated[int, Field(ge=1)]
        """Stages; at most one a layer."""
        layers: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)] | None = None
        """Layers of each stage, first to last; by default counted."""

        @field_validator("layers")
        @classmethod
        def _one_count_a_stage(cls, layers: list[int] | None, info: ValidationInfo) -> list[int] | None:
            size = info.data.get("size")
            if layers is not None and size not in (None, len(layers)):
                raise ValueError(f"{layers} are {len(layers)} stages, but size is {size}; give one count a stage")
            return layers

    options: Options

    def describe(self) -> Description:
        why = "no stage but the last has the hidden states, nor a cache beside the target's, that it would draft from"
        staged = Requirement("speculator", "stages", why, "speculator.use, or give one stage")
        return Description(requires=(NEEDS_RANKS, staged) if self.options.size > 1 else (NEEDS_RANKS,))

    def layout(self, facts: ModelFacts, inner: RankPlan) -> RankPlan:
        size, total = self.options.size, facts.axes.get("layers")
        if total is None:
            raise ConfigError(
                f"{facts.architecture} names no layers to shard, so it runs on one rank; leave {self.name} out")
        if size > total:
            raise ConfigError(
                f"{size} stages cannot share the {total} layers of {facts.architecture}; give at most {total}", "size")
        wanted = self.options.layers
        if wanted is not None and sum(wanted) != total:
            raise ConfigError(
                f"{wanted} are {sum(wanted)} layers, but {facts.architecture} has {total} layers", "layers")
        costs = list(facts.layer_costs) or [1] * total
        counts = wanted or balanced(costs, facts.head_cost, size)
        dim = MeshDim(self.name, size, ("layers",), {"layers": (0, *accumulate(counts))})
        return replace(inner.wrapped(dim), depth=min(size, inner.depth or size), chained=inner.chained and size == 1)


def balanced(costs: Sequence[int], last: int, stages: int) -> list[int]:
    """How many of the neighbouring ``costs`` each of ``stages`` gets, at least one, such that the largest sum is as
    small as can be; the last stage bears ``last`` besides. The linear partition problem, by dynamic programming."""
    ends = [0, *accumulate(costs)]
    total = len(costs)
    best = {(0, 0): 0}
    cut: dict[tuple[int, int], int] = {}
    for stage in range(1, stages + 1):
        extra = last if stage == stages else 0
        for end in range(stage, total - (stages - stage) + 1):
            begins = [begin for begin in range(stage - 1, end) if (stage - 1, begin) in best]
            worst = {begin: max(best[stage - 1, begin], ends[end] - ends[begin] + extra) for begin in begins}
            cut[stage, end] = min(worst, key=lambda begin: worst[begin])
            best[stage, end] = worst[cut[stage, end]]
    counts, end = [], total
    for stage in range(stages, 0, -1):
        counts.append(end - cut[stage, end])
        end = cut[stage, end]
    return counts[::-1]
