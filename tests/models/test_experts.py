"""Mixture of experts: equal to transformers however tokens are routed, and whichever rank holds which expert."""

import json

import pytest
import torch

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh, Shard
from hotswap.core.modeling.operators import TORCH_OPERATORS
from hotswap.plugins.models.decoder import DecoderModel
from hotswap.plugins.models.decoder_config import DecoderConfig
from hotswap.plugins.models.experts import Experts

TOLERANCE = 1e-4

ODD = {"hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 36}
MODELS = {
    "mixtral": ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2}),
    "mixtral with window": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "mixtral, 7 experts, 3 a token, odd sizes": ("Mixtral", {"num_local_experts": 7, "num_experts_per_tok": 3, **ODD}),
    "mixtral with every expert on every token": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3}),
    "mixtral with one expert": ("Mixtral", {"num_local_experts": 1, "num_experts_per_tok": 1}),
    "qwen3": ("Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}),
    "qwen3, weights of a token scaled to 1": (
        "Qwen3Moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}),
    "qwen3, 7 experts, 3 a token, odd sizes": (
        "Qwen3Moe", {"num_experts": 7, "num_experts_per_tok": 3, **ODD, "moe_intermediate_size": 13}),
    "qwen3 with experts in every second layer": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 2}),
    "qwen3 with layers that have none": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0, 2]}),
    "qwen3 with window": (
        "Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                     "use_sliding_window": True, "sliding_window": 8}),
}


def loads(model):
    """Tokens of each expert, [L, E] of the layers that have experts."""
    return torch.stack(list(model.statistics().values()))


@pytest.mark.parametrize("family, config", MODELS.values(), ids=MODELS.keys())
def test_logits_equal_transformers_whole_and_chunked(family, config, make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(family, **config)
    ours = reference.load_decoder(directory)
    expected = reference.transformers_logits(theirs, ids)
    assert expected.abs().max() > 1, "logits this small prove nothing"
    torch.testing.assert_close(reference.logits_of(ours, ids), expected, atol=TOLERANCE, rtol=0)
    assert (loads(ours).sum(-1) == len(ids) * config["num_experts_per_tok"]).all()
    torch.testing.assert_close(reference.logits_of(ours, ids, [1, 7, 20, 1, 19]), expected, atol=TOLERANCE, rtol=0)


def rig(theirs, directory, signs):
    """Every token has a positive mean in every layer, and expert e scores it by ``signs[e]`` times that mean."""
    with torch.no_grad():
        theirs.model.embed_tokens.weight.add_(1)
        for layer in theirs.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.experts.down_proj.mul_(0.01)
            layer.post_attention_layernorm.weight.fill_(1)
            layer.mlp.gate.weight.copy_(torch.tensor(signs)[:, None])
    theirs.save_pretrained(directory)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_all_tokens_may_go_to_one_expert_and_none_to_others(family, make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(family, num_local_experts=5, num_experts_per_tok=1, moe_intermediate_size=24)
    rig(theirs, directory, [-1.0, -1.0, 1.0, -1.0, -1.0])
    ours = reference.load_decoder(directory)
    torch.testing.assert_close(
        reference.logits_of(ours, ids), reference.transformers_logits(theirs, ids), atol=TOLERANCE, rtol=0)
    assert loads(ours).tolist() == [[0, 0, len(ids), 0, 0]] * 3


def test_a_step_of_one_token_leaves_most_experts_idle(make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint("Mixtral", num_local_experts=8, num_experts_per_tok=2)
    ours = reference.load_decoder(directory)
    expected = reference.transformers_logits(theirs, ids[:1])
    torch.testing.assert_close(reference.logits_of(ours, ids[:1]), expected, atol=TOLERANCE, rtol=0)
    assert sorted(loads(ours)[0].tolist()) == [0] * 6 + [1, 1]


def test_no_token_at_all_is_an_empty_result():
    experts = lone_experts(count=4, top_k=2)
    empty = torch.empty(0, dtype=torch.int64)
    assert experts(torch.empty(0, 16), empty.view(0, 2), torch.empty(0, 2)).shape == (0, 16)


def test_a_token_depends_on_no_neighbour(make_checkpoint, reference, ids):
    _, directory = make_checkpoint("Mixtral", num_local_experts=8, num_experts_per_tok=2)
    model = reference.load_decoder(directory)
    changed = [*ids[:-1], (ids[-1] + 1) % 128]
    torch.testing.assert_close(
        reference.logits_of(model, ids)[:-1], reference.logits_of(model, changed)[:-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_bfloat16_stays_close_to_transformers(family, make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(family, num_local_experts=4, num_experts_per_tok=4, moe_intermediate_size=24)
    ours = reference.logits_of(reference.load_decoder(directory, torch.bfloat16), ids)
    expected = reference.transformers_logits(theirs, ids)
    assert torch.nn.functional.cosine_similarity(ours.float(), expected).min() > 0.999


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_the_fused_layout_of_transformers_is_read_too(family, make_checkpoint, reference, ids):
    config = {"num_local_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
    theirs, directory = make_checkpoint(family, save={"save_original_format": False}, **config)
    ours = reference.load_decoder(directory)
    torch.testing.assert_close(
        reference.logits_of(ours, ids), reference.transformers_logits(theirs, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("layout", ["published", "fused"])
@pytest.mark.parametrize("axes, shape", [
    ({"expert"}, (2, 2 * 24, 64)), ({"expert_mlp"}, (6, 2 * 8, 64)),
    ({"heads", "kv_heads", "mlp", "vocab", "expert"}, (2, 2 * 24, 64)),
    ({"heads", "kv_heads", "mlp", "vocab", "expert_mlp"}, (6, 2 * 8, 64)),
], ids=["experts", "inner sizes", "experts and the rest", "all inner sizes"])
def test_three_ranks_that_share_experts_equal_one(axes, shape, layout, make_checkpoint, threads, reference, ids):
    theirs, directory = make_checkpoint(
        "Qwen3Moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=2,
        vocab_size=129, num_attention_heads=6, num_key_value_heads=3,
        save={"save_original_format": layout == "published"})

    def work(mesh):
        model = reference.load_decoder(directory, mesh=mesh)
        assert model.layers[1].mlp.experts.gate_up.shape == shape
        return reference.logits_of(model, ids), loads(model)

    expected = reference.transformers_logits(theirs, ids)
    counts = []
    for logits, load in threads.on_ranks(3, axes, work):
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
        counts.append(load)
    whole = reference.load_decoder(directory)
    reference.logits_of(whole, ids)
    together = torch.cat(counts, 1) if "expert" in axes else counts[0]
    assert torch.equal(together, loads(whole)), "each token is worked on once, at the rank of its expert"


def test_ranks_with_tokens_of_their_own_exchange_them(make_checkpoint, threads, reference):
    _, directory = make_checkpoint("Mixtral", num_local_experts=6, num_experts_per_tok=2)
    tokens = torch.randn(12, 64, generator=torch.Generator().manual_seed(5)).split([7, 0, 5])
    expected = reference.load_decoder(directory).layers[0].mlp(torch.cat(tokens)).split([7, 0, 5])

    def work(mesh):
        mlp = reference.load_decoder(directory, mesh=mesh).layers[0].mlp
        assert len(mlp.experts.gate_up) == 2
        return mlp(tokens[mesh.rank])

    for y, whole in zip(threads.on_ranks(3, {"expert"}, work, threads.ExchangeMesh), expected, strict=True):
        torch.testing.assert_close(y, whole, atol=1e-5, rtol=0)


def lone_experts(count, top_k, hidden=16, size=32, seed=0, dtype=torch.float32, device="cpu"):
    config = DecoderConfig.from_hf({
        "architectures": ["MixtralForCausalLM"], "vocab_size": 8, "hidden_size": hidden, "intermediate_size": size,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": count,
        "num_experts_per_tok": top_k}).experts
    experts = Experts(config, hidden, LOCAL_MESH, dtype, device, TORCH_OPERATORS)
    generator = torch.Generator().manual_seed(seed)
    for weight in (experts.gate_up, experts.down):
        weight.copy_(torch.randn(weight.shape, generator=generator) * hidden**-0.5)
    return experts


def token_by_token(experts, x, chosen, weights):
    """The definition: each token through each of its experts."""
    y = torch.zeros_like(x)
    for t in range(len(x)):
        for expert, weight in zip(chosen[t].tolist(), weights[t], strict=True):
            gate, up = (experts.gate_up[expert] @ x[t]).chunk(2)
            y[t] += weight * (experts.down[expert] @ (torch.nn.functional.silu(gate) * up))
    return y


@pytest.mark.parametrize("grouped", [False, True], ids=["a loop over experts", "torch's grouped multiplication"])
@pytest.mark.parametrize("tokens, count, top_k", [(1, 1, 1), (1, 8, 2), (5, 7, 3), (64, 8, 8), (33, 16, 1)])
def test_sorted_batches_equal_the_definition(grouped, tokens, count, top_k):
    experts = lone_experts(count, top_k)
    experts.grouped = grouped
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 16, generator=generator)
    weights, chosen = torch.rand(tokens, count, generator=generator).topk(top_k)
    torch.testing.assert_close(
        experts(x, chosen, weights), token_by_token(experts, x, chosen, weights), atol=1e-4, rtol=1e-5)
    assert torch.equal(experts.load_counts, chosen.flatten().bincount(minlength=count))


@pytest.mark.parametrize("grouped", [False, True], ids=["a loop over experts", "torch's grouped multiplication"])
def test_rows_of_other_ranks_experts_add_nothing(grouped):
    class Second(Mesh):
        def shard(self, axis, total):
            return Shard(2, 2) if axis == "expert" else Shard(0, total)

    whole = lone_experts(4, 2)
    part = Experts(whole.config, 16, Second(), torch.float32, "cpu", TORCH_OPERATORS)
    part.gate_up.copy_(whole.gate_up[2:])
    part.down.copy_(whole.down[2:])
    part.grouped = grouped
    generator = torch.Generator().manual_seed(3)
    x, weights = torch.randn(9, 16, generator=generator), torch.rand(9, 2, generator=generator)
    chosen = torch.tensor([[0, 1], [2, 0], [3, 2], [1, 3], [0, 1], [0, 1], [2, 3], [1, 0], [3, 1]])
    here = (chosen >= 2).float()
    torch.testing.assert_close(
        part(x, chosen, weights), token_by_token(whole, x, chosen, weights * here), atol=1e-4, rtol=1e-5)
    assert part.load_counts.tolist() == [3, 4]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_records_experts_in_bfloat16_and_counts_their_tokens():
    """Replayed with other tokens and other experts than it was captured with; a read-back would end the capture."""
    experts = lone_experts(8, 2, hidden=64, dtype=torch.bfloat16, device="cuda")
    assert experts.grouped
    generator = torch.Generator().manual_seed(1)
    x = torch.zeros(32, 64, dtype=torch.bfloat16, device="cuda")
    chosen, weights = torch.zeros(32, 2, dtype=torch.int64, device="cuda"), torch.zeros(32, 2, device="cuda")
    with torch.inference_mode():
        for _ in range(2):
            experts(x, chosen, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = experts(x, chosen, weights)
        before = experts.load_counts.clone()
        x.copy_(torch.randn(x.shape, generator=generator))
        for tensor, values in zip((weights, chosen), torch.rand(32, 8, generator=generator).topk(2), strict=True):
            tensor.copy_(values)
        graph.replay()
    on_cpu = lone_experts(8, 2, hidden=64)
    on_cpu.gate_up, on_cpu.down = experts.gate_up.float().cpu(), experts.down.float().cpu()
    expected = token_by_token(on_cpu, x.float().cpu(), chosen.cpu(), weights.cpu())
    torch.testing.assert_close(y.float().cpu(), expected, atol=0.05, rtol=0.05)
    assert torch.equal((experts.load_counts - before).cpu(), chosen.cpu().flatten().bincount(minlength=8))


def test_facts_name_the_axes_that_the_model_has(make_checkpoint):
    def axes(family, **config):
        directory = make_checkpoint(family, num_experts_per_tok=2, moe_intermediate_size=24, **config)[1]
        return DecoderModel.facts(json.loads((directory / "config.json").read_text())).axes

    common = {"heads": 4, "kv_heads": 2, "vocab": 128, "layers": 3}
    assert axes("Mixtral", num_local_experts=4) == {**common, "expert": 4, "expert_mlp": 96}
    assert axes("Qwen3Moe", num_experts=6, mlp_only_layers=[1]) == {**common, "mlp": 96, "expert": 6, "expert_mlp": 24}
    assert axes("Qwen3Moe", num_experts=6, mlp_only_layers=[0, 1, 2]) == {**common, "mlp": 96}


def test_the_memory_of_a_step_is_that_of_its_widest_mlp():
    def width(**change):
        return DecoderModel.facts(VALID | {"intermediate_size": 96, "hidden_size": 16} | change).mlp_width

    assert width(mlp_only_layers=[0]) == 3 * 96
    assert width() == 3 * 2 * (8 + 16)
    assert width(num_hidden_layers=2, decoder_sparse_step=2) == 3 * 96


def test_steps_are_captured_where_experts_read_nothing_back():
    dense, aligned = VALID | {"architectures": ["Qwen3ForCausalLM"]}, VALID
    assert DecoderModel.facts(dense).capturable == ("float32", "bfloat16", "float16")
    assert DecoderModel.facts(aligned).capturable == ("bfloat16",)
    assert DecoderModel.facts(VALID | {"moe_intermediate_size": 12}).capturable == ()


@pytest.mark.parametrize("drop", ["experts.3.w2.weight", "gate.weight"])
def test_a_missing_expert_is_named(drop, make_checkpoint, reference):
    from safetensors.torch import load_file, save_file

    _, directory = make_checkpoint("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    del tensors[f"model.layers.1.block_sparse_moe.{drop}"]
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=f"missing: model.layers.1.block_sparse_moe.{drop}"):
        reference.load_decoder(directory)


VALID = {
    "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
    "moe_intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_experts": 4, "num_experts_per_tok": 2,
}


@pytest.mark.parametrize("change, named", [
    ({"num_experts_per_tok": 5}, "num_experts_per_tok: 5 experts a token were asked of 4"),
    ({"num_experts": 0}, "num_experts"),
    ({"num_local_experts": 8}, r"\[4, 8\]"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
])
def test_what_a_config_says_of_experts_is_honoured_or_refused_by_name(change, named):
    DecoderModel.facts(VALID)
    with pytest.raises(ConfigError, match=named):
        DecoderModel.facts(VALID | change)
