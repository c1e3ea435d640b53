"""Tensor parallelism: each rank holds a part of every layer."""

from typing import Annotated

from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentOptions, Description, Requirement
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import MeshDim, RankPlan, ShardStrategy

AXES = ("heads", "kv_heads", "mlp", "expert_mlp", "vocab")

NEEDS_RANKS = Requirement(
    "executor", "ranks", "it shards the model over several ranks", "execution, or leave execution.use out")


class TensorParallel(ShardStrategy):
    """Heads, MLPs and vocabulary over ``size`` ranks (Shoeybi et al., "Megatron-LM", 2019). Choose it to divide a
    step's time and the weights over devices with a fast link: each layer costs two all-reduces of its hidden states.

    Query heads are divided evenly, key-value heads with the query heads that read them; where there are fewer of them
    than ranks, neighbours hold copies. MLPs and the vocabulary may have any size: parts differ by at most one.
    """

    class Options(ComponentOptions):
        size: Annotated[int, Field(ge=1)]
        """Ranks. It must divide the model's query heads, and divide or be a multiple of its key-value heads."""

    options: Options

    def describe(self) -> Description:
        return Description(offers=frozenset({"peers"}), requires=(NEEDS_RANKS,))

    def layout(self, facts: ModelFacts, inner: RankPlan) -> RankPlan:
        size, axes = self.options.size, facts.axes
        if "heads" not in axes:
            raise ConfigError(
                f"{facts.architecture} names no heads to shard, so it runs on one rank; leave {self.name} out")
        heads, kv_heads = axes["heads"], axes.get("kv_heads", axes["heads"])
        others = [axes[name] for name in AXES[2:] if name in axes]
        valid = [n for n in range(1, min([heads, *others]) + 1) if _fits(n, heads, kv_heads)]
        if size not in valid:
            raise ConfigError(
                f"{size} ranks cannot share the {heads} query heads and {kv_heads} key-value heads of "
                f"{facts.architecture}; sizes that work are {', '.join(map(str, valid))}", "size")
        return inner.wrapped(MeshDim(self.name, size, tuple(axis for axis in AXES if axis in axes)))


def _fits(size: int, heads: int, kv_heads: int) -> bool:
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
