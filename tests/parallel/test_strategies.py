"""What strategies ask for, from the model's facts alone: sizes that work, stages by cost, whose axis is whose."""

from itertools import combinations

import pytest

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import Across, MeshDim, RankPlan
from hotswap.plugins.parallel.expert import ExpertParallel
from hotswap.plugins.parallel.mesh import coordinates, groups, over_engines, shard
from hotswap.plugins.parallel.pipeline import PipelineParallel, balanced
from hotswap.plugins.parallel.tensor import TensorParallel


def facts(heads=8, kv_heads=2, layers=4, mlp=32, vocab=100, **more):
    axes = {"heads": heads, "kv_heads": kv_heads, "layers": layers, "mlp": mlp, "vocab": vocab, **more.pop("axes", {})}
    return ModelFacts("Made", layers, 64, vocab, 512, axes, **more)


def tensor(size):
    return TensorParallel(TensorParallel.Options(size=size))


def pipeline(size, layers=None):
    return PipelineParallel(PipelineParallel.Options(size=size, layers=layers))


@pytest.mark.parametrize("heads, kv_heads, valid", [
    (9, 3, "1, 3, 9"),  # SmolLM2-135M
    (40, 40, "1, 2, 4, 5, 8, 10, 20, 40"), (40, 8, "1, 2, 4, 8, 40"), (28, 4, "1, 2, 4, 28"),
    (12, 4, "1, 2, 4, 12"),  # six ranks of two heads would need two of the four key-value heads each
])
def test_sizes_that_work_are_those_whose_ranks_hold_the_heads_they_read(heads, kv_heads, valid):
    made = facts(heads, kv_heads, mlp=1000, vocab=1000)
    works = []
    for size in range(1, heads + 2):
        try:
            dim = tensor(size).layout(made, RankPlan()).dims[0]
        except ConfigError as error:
            assert error.path == "size"
            assert f"{size} ranks cannot share the {heads} query heads and {kv_heads} key-value heads" in error.message
            assert error.message.endswith(f"sizes that work are {valid}")
            continue
        works.append(size)
        for rank in range(size):
            queries, keys = shard(dim, rank, "heads", heads), shard(dim, rank, "kv_heads", kv_heads)
            read = {head * kv_heads // heads for head in range(queries.start, queries.stop)}
            assert read == set(range(keys.start, keys.stop))
    assert ", ".join(map(str, works)) == valid


@pytest.mark.parametrize("total, size", [(161, 2), (161, 4), (7, 7), (129, 8), (10, 3)])
def test_parts_of_an_axis_lie_side_by_side_and_differ_by_one_at_most(total, size):
    parts = [shard(MeshDim("tensor", size, ("vocab",)), place, "vocab", total) for place in range(size)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == total
    assert max(part.count for part in parts) - min(part.count for part in parts) <= 1


def test_a_vocabulary_smaller_than_the_ranks_is_no_size_that_works():
    with pytest.raises(ConfigError, match="sizes that work are 1, 2, 4$"):
        tensor(8).layout(facts(8, 8, vocab=5), RankPlan())


@pytest.mark.parametrize("strategy, path", [
    (tensor(2), "tensor"), (pipeline(2), "pipeline"), (ExpertParallel(), "expert")])
def test_a_model_without_the_axis_is_refused_by_name(strategy, path):
    with pytest.raises(ConfigError, match="Bare"):
        strategy.layout(ModelFacts("Bare", 2, 8, 16, 64), RankPlan())


def test_more_stages_than_layers_are_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"5 stages cannot share the 4 layers of Made; give at most 4") as caught:
        pipeline(5).layout(facts(layers=4), RankPlan())
    assert caught.value.path == "size"


@pytest.mark.parametrize("layers", [[1, 2], [2, 3]])
def test_given_layers_must_be_those_of_the_model(layers):
    with pytest.raises(ConfigError, match=r"Made has 4 layers") as caught:
        pipeline(2, layers).layout(facts(layers=4), RankPlan())
    assert caught.value.path == "layers"
    assert pipeline(2, [3, 1]).layout(facts(layers=4), RankPlan()).dims[0].cuts == {"layers": (0, 3, 4)}


def test_the_stages_of_smollm2_weigh_its_head_as_eight_layers():
    layer = 2 * 576 * (9 + 3) * 64 + 3 * 576 * 1536
    made = facts(layers=30, layer_costs=(layer,) * 30, head_cost=49152 * 576)
    assert pipeline(2).layout(made, RankPlan()).dims[0].cuts == {"layers": (0, 19, 30)}
    assert pipeline(3).layout(made, RankPlan()).dims[0].cuts == {"layers": (0, 12, 25, 30)}


@pytest.mark.parametrize("costs, last, stages", [
    ([1] * 7, 0, 3), ([5, 1, 1, 1, 1, 1], 4, 3), ([3, 1, 4, 1, 5, 9, 2, 6], 5, 4), ([1, 2], 100, 2), ([4], 1, 1)])
def test_no_other_cut_has_a_cheaper_dearest_stage(costs, last, stages):
    def dearest(counts):
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        sums = [sum(costs[begin:end]) for begin, end in zip(ends, ends[1:], strict=False)]
        sums[-1] += last
        return max(sums)

    found = balanced(costs, last, stages)
    assert len(found) == stages and sum(found) == len(costs) and min(found) >= 1
    every = [
        [end - begin for begin, end in zip((0, *cut), (*cut, len(costs)), strict=True)]
        for cut in combinations(range(1, len(costs)), stages - 1)]
    assert dearest(found) == min(map(dearest, every))


def test_a_pipeline_bounds_the_depth_by_its_stages_and_keeps_a_request_in_one_step():
    plan = pipeline(3).layout(facts(), tensor(2).layout(facts(), RankPlan()))
    assert (plan.depth, plan.chained, plan.world_size) == (3, False, 6)
    one = pipeline(1).layout(facts(), RankPlan())
    assert (one.depth, one.chained) == (1, True)
    assert tensor(2).layout(facts(), RankPlan()).depth is None


def test_neighbours_in_number_are_neighbours_in_the_innermost_dimension():
    plan = pipeline(2).layout(facts(), tensor(2).layout(facts(), RankPlan()))
    assert [coordinates(plan, rank) for rank in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert groups(plan, [1]) == [(0, 1), (2, 3)]
    assert groups(plan, [0]) == [(0, 2), (1, 3)]


def test_experts_take_the_place_of_their_inner_axis_on_the_ranks_of_tensor():
    made = facts(axes={"expert": 6, "expert_mlp": 24})
    inner = tensor(2).layout(made, RankPlan())
    assert inner.dims[0].axes == ("heads", "kv_heads", "mlp", "expert_mlp", "vocab")
    plan = ExpertParallel().layout(made, inner)
    assert plan.dims[0].axes == ("heads", "kv_heads", "mlp", "vocab", "expert")
    assert plan.world_size == 2


def test_experts_without_ranks_to_lie_on_lie_on_the_engines():
    plan = ExpertParallel().layout(facts(axes={"expert": 6, "expert_mlp": 24}), RankPlan())
    assert plan.across == Across("ExpertParallel", ("expert",), 6)
    assert plan.world_size == 1 and plan.chained
    whole = over_engines(plan, 2)
    assert whole.dims == (MeshDim("ExpertParallel", 2, ("expert",)),)
    assert [shard(whole.dims[0], place, "expert", 6).start for place in (0, 1)] == [0, 3]


def test_experts_need_ranks_to_lie_on_and_one_each():
    made = facts(axes={"expert": 3, "expert_mlp": 24})
    with pytest.raises(ConfigError, match="name it before tensor"):
        ExpertParallel().layout(made, pipeline(2).layout(made, RankPlan()))
    with pytest.raises(ConfigError, match="4 ranks cannot share the 3 experts"):
        ExpertParallel().layout(made, tensor(4).layout(made, RankPlan()))
