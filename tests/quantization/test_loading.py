"""A model is packed while it is loaded: one layer at a time, into less memory than bfloat16, on any mesh."""

import json
import tracemalloc
import weakref
from collections import Counter
from functools import partial
from itertools import accumulate

import pytest
import torch

from hotswap.core.errors import ComponentError, ModelLoadError
from hotswap.core.execution.builder import SharedModels, WorkerBuilder, builder_from
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.interfaces.parallel import MeshDim, RankPlan
from hotswap.core.interfaces.quantization import LinearWeight, Quantization, QuantizationSupport
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.linear import DenseLinear
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint
from hotswap.core.testing.dense import logits_of, on_ranks
from hotswap.core.testing.quantization import held_bytes, random_blocks
from hotswap.core.testing.rig import build

IDS = [3, 9, 4, 9, 2, 7, 7, 1, 12, 5, 8, 8, 0, 11, 3, 9]


def load(path, quantization, dtype=torch.float32, mesh=LOCAL_MESH):
    """The model, and the bytes that it says its weights take."""
    checkpoint, model = open_checkpoint(str(path), progress=False), build("model", "LlamaForCausalLM")
    model.build(checkpoint.config, mesh, dtype, "cpu")
    with checkpoint.weights() as weights:
        weights.quantization = quantization
        model.load(weights)
    return model, weights.num_bytes(dtype)


class Watching(Quantization):
    """Keeps layers dense; looks at what is given, and whether what was given before is gone."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks, self.given, self.names, self.heads, self.alive = blocks, [], [], [], 0

    def support(self):
        return QuantizationSupport(blocks=self.blocks)

    def pack(self, weight):
        self.alive = max(self.alive, sum(tensor() is not None for tensor in self.given))
        self.given += [weakref.ref(piece) for piece in weight.pieces if not weight.tied]
        self.names += weight.names
        self.heads.append(weight.head)
        return DenseLinear(weight)


@pytest.mark.parametrize("blocks", [(), ("Q4_1",)])
def test_no_layer_is_in_memory_as_it_is_stored_while_the_next_is_packed(make_gguf, blocks):
    watching = Watching(*blocks)
    load(make_gguf(), watching)
    assert watching.given and watching.alive == 0


def test_every_linear_layer_is_given_by_its_names_and_nothing_else(tmp_path):
    watching = Watching()
    load(tiny_checkpoint(tmp_path, LLAMA), watching)
    stored = {name.removesuffix(".weight") for name in open_checkpoint(str(tmp_path)).weights().names()}
    assert Counter(watching.names) == Counter(name for name in stored if "_proj" in name or name == "lm_head")
    assert watching.heads == [False] * (len(watching.heads) - 1) + [True]


@pytest.mark.parametrize("use", ["none", "int8", "int4", "gguf"])
def test_the_logits_are_those_of_the_dense_model_within_reason(make_gguf, use):
    path = make_gguf(tied=False)
    expected = logits_of(load(path, None)[0], IDS)
    for chunks in (None, [1] * len(IDS)):
        found = logits_of(load(path, build("quantization", use))[0], IDS, chunks)
        error = float((found - expected).norm() / expected.norm())
        assert error <= {"none": 1e-5, "int8": 0.06, "int4": 0.35, "gguf": 0.06}[use], f"{use}: {error:.3g}"


@pytest.mark.parametrize("use", ["int8", "gguf"])
def test_ranks_that_share_every_axis_give_what_one_gives(make_gguf, use):
    path = make_gguf()
    expected = logits_of(load(path, None)[0], IDS)

    def run(mesh):
        return logits_of(load(path, build("quantization", use), mesh=mesh)[0], IDS, mesh=mesh)

    for logits in on_ranks(RankPlan((MeshDim("two", 2, ("heads", "kv_heads", "mlp", "vocab")),)), run):
        assert (logits - expected).norm() / expected.norm() <= 0.06


@pytest.mark.parametrize("tied", [False, True])
def test_packed_weights_take_less_than_bfloat16_would(make_gguf, tied):
    """A tied head has a packed form beside the embedding's table, and that is counted."""
    path = make_gguf(tied=tied)
    _, dense = load(path, build("quantization", "none", prepack=False), torch.bfloat16)
    values = sum(torch.Size(open_checkpoint(str(path)).weights().shape(name)).numel()
                 for name in open_checkpoint(str(path)).weights().names())
    assert dense == 2 * values, "a tied head that is not packed shares the table"
    for use in ("int8", "int4", "gguf"):
        for kernels in ("auto", "torch"):  # torch's operators have two forms of 4-bit weights
            _, packed = load(path, build("quantization", use, kernels=kernels), torch.bfloat16)
            assert packed < dense, f"{use} by {kernels}: {packed} bytes, and bfloat16 takes {dense}"
    prepacked = load(path, build("quantization", "none"), torch.bfloat16)[1]
    table = 2 * LLAMA["vocab_size"] * 64
    assert dense + table * tied <= prepacked < 1.1 * dense, "a copy of a tied head, and some padding"


def test_a_head_is_kept_by_its_name_though_it_is_tied(tmp_path):
    path = tiny_checkpoint(tmp_path, LLAMA | {"tie_word_embeddings": True})
    model, _ = load(path, build("quantization", "int8", keep=["lm_head"]))
    assert model.lm_head.linear.weight is model.embedding.weight
    assert not isinstance(model.layers[0].out.linear, DenseLinear)


def test_a_bias_is_counted_once(tmp_path):
    """It is taken from the checkpoint, and a packed layer counts what it keeps of it."""
    from safetensors.torch import load_file, save_file

    path = tiny_checkpoint(tmp_path, LLAMA | {"attention_bias": True, "mlp_bias": True})
    tensors = load_file(path / "model.safetensors")
    biases = {name.replace("weight", "bias"): x[:, 0].clone() for name, x in tensors.items() if "_proj" in name}
    save_file(tensors | biases, path / "model.safetensors", {"format": "pt"})
    _, num_bytes = load(path, build("quantization", "none", prepack=False))
    assert num_bytes == 4 * sum(tensor.numel() for tensor in (*tensors.values(), *biases.values()))
    for use in ("none", "int8"):
        model, num_bytes = load(path, build("quantization", use), torch.bfloat16)
        held = held_bytes([model.embedding, model.layers, model.norm, model.lm_head])
        assert num_bytes == pytest.approx(held, rel=0.02), use


def test_what_packing_takes_beside_the_layer_does_not_grow_like_it_in_floating_point(monkeypatch):
    """Rows are quantised some at a time: of 4 million weights there are never all in float32."""
    outputs, inputs, part = 2048, 2048, 1 << 17
    for module in ("core.modeling.linear", "plugins.quantization.kernel_linear", "plugins.quantization.torch_linear"):
        monkeypatch.setattr(f"hotswap.{module}.PART_VALUES", part)
    dense = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
    blocks = random_blocks("Q4_1", outputs, inputs)
    forms = [(use, kernels, dense) for use in ("int8", "int4") for kernels in ("auto", "torch")]
    forms += [("gguf", kernels, blocks) for kernels in ("auto", "torch")]
    for use, kernels, piece in forms:
        quantization = build("quantization", use, kernels=kernels)
        quantization.pack(LinearWeight(("warm",), (piece[:16],), None, torch.bfloat16, "cpu"))
        weight = LinearWeight(("a",), (piece,), None, torch.bfloat16, "cpu")
        packed, peak = with_peak(partial(quantization.pack, weight))
        own, on_the_way = outputs * inputs * 2, 40 * part  # numbers and scales that become the packed form; a part's
        assert peak <= packed.nbytes + own + on_the_way, (
            f"{use} by {kernels}: {peak / 1e6:.0f} MB for a form of {packed.nbytes / 1e6:.0f} MB")


def with_peak(make):
    """What ``make`` returns, and the most bytes that torch and numpy held meanwhile beyond what there was."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        tracemalloc.start()
        made = make()
        _, by_numpy = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    changes = [(event.start_ns(), event.nbytes()) for event in profile.profiler.kineto_results.events()
               if event.name() == "[memory]"]
    by_torch = max(accumulate(size for _, size in sorted(changes)))
    return made, by_torch + by_numpy


def test_a_head_that_is_written_twice_must_be_the_table(tmp_path):
    from safetensors.torch import load_file, save_file

    tied = LLAMA | {"tie_word_embeddings": True}
    file = tiny_checkpoint(tmp_path, tied) / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, file, {"format": "pt"})
    alone = load(tmp_path, None)
    assert alone[1] == 4 * sum(tensor.numel() for tensor in tensors.values()), "the second copy is not kept"
    save_file(tensors | {"lm_head.weight": table + 1}, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match="differs from model.embed_tokens.weight although its config ties them"):
        load(tmp_path, None)


def test_what_raises_while_it_packs_is_named(tmp_path):
    class Broken(Watching):
        def pack(self, weight):
            raise ValueError("no such luck")

    with pytest.raises(ComponentError, match="quantization 'Broken' raised in pack"):
        load(tiny_checkpoint(tmp_path), Broken())


def builder(path, quantization=None):
    checkpoint = open_checkpoint(str(path), progress=False)
    return WorkerBuilder(
        checkpoint, build("model", "LlamaForCausalLM"), build("attention", "torch"), build("speculator", "none"), [],
        WorkerSettings("float32", "cpu", 64, 64, 4), quantization=quantization)


def test_engines_share_a_model_only_where_it_is_packed_alike(tmp_path):
    path, shared = tiny_checkpoint(tmp_path), SharedModels(3)
    first, same, other, options = (
        shared.join(builder(path, build("quantization", use, **given)))
        for use, given in (("int8", {}), ("int8", {}), ("none", {}), ("int8", {"keep": ["lm_head"]})))
    assert same.model is first.model
    assert len({id(each.model) for each in (first, other, options)}) == 3


def test_a_worker_of_another_process_packs_alike(tmp_path):
    """Its weights' bytes are those that it reports."""
    ours = builder(tiny_checkpoint(tmp_path), build("quantization", "int8", keep=["*.down_proj"]))
    recipe = json.loads(json.dumps(ours.recipe().arguments))
    theirs = builder_from(recipe)
    assert theirs.quantization.ref == ours.quantization.ref
    reported = [each(RankPlan(), 0).report().weight_bytes for each in (ours, theirs, builder(tmp_path))]
    assert reported[0] == reported[1] < reported[2]
