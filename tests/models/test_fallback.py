"""The transformers fallback: equal to transformers for whatever it takes, and a refusal at the start for the rest."""

import copy

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh
from hotswap.plugins.models.fallback import TransformersModel

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": 0, "eos_token_id": 1,
}
TWO_KINDS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "num_local_experts": 6, "moe_intermediate_size": 32}

RUNS = {
    "Apertus": {}, "Arcee": {}, "BioGpt": {}, "CodeGen": {"rotary_dim": 8}, "Cohere": {"logit_scale": 2.0},
    "Cohere2": TWO_KINDS, "Ernie4_5": {}, "Exaone4": TWO_KINDS, "Gemma": {"head_dim": 16},
    "Gemma2": {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, **TWO_KINDS},
    "Gemma3": {"head_dim": 16, **TWO_KINDS}, "Glm": {"head_dim": 16}, "Glm4": {"head_dim": 16},
    "GPT2": {}, "GPTBigCode": {}, "GPTJ": {"rotary_dim": 8}, "GPTNeoX": {},
    "Granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0}, "GraniteMoe": EXPERTS,
    "Helium": {"head_dim": 16}, "Llama": {}, "Nemotron": {}, "Olmo": {}, "Olmo2": {}, "Olmo3": TWO_KINDS,
    "Olmoe": EXPERTS, "OPT": {"init_std": 0.3}, "Persimmon": {}, "Phi": {}, "Phi3": {"sliding_window": 8},
    "Qwen2Moe": EXPERTS, "SeedOss": {}, "SmolLM3": {}, "StableLm": {}, "Starcoder2": {},
}


@pytest.fixture
def make(tmp_path):
    """A tiny random model of transformers, with its directory."""

    def make(family, **changes):
        architecture = architecture_of(family)
        torch.manual_seed(3)
        model = architecture(architecture.config_class(**SIZES | changes)).eval()
        model.set_attn_implementation("eager")
        model.save_pretrained(tmp_path / family)
        return model, tmp_path / family

    return make


@pytest.fixture
def load(reference):
    def load(directory, dtype=torch.float32, mesh=LOCAL_MESH):
        return reference.load_decoder(directory, dtype, mesh, TransformersModel)

    return load


def architecture_of(family):
    name = next(name for name in (f"{family}ForCausalLM", f"{family}LMHeadModel") if hasattr(transformers, name))
    return getattr(transformers, name)


def config_of(family, **changes):
    architecture = architecture_of(family)
    config = architecture.config_class(**SIZES | changes).to_dict()
    return {**config, "architectures": [architecture.__name__]}


@pytest.mark.parametrize("family", RUNS)
def test_logits_equal_transformers_whole_and_chunked(family, make, load, reference, ids):
    theirs, directory = make(family, **RUNS[family])
    ours = load(directory)
    expected = reference.transformers_logits(theirs, ids)
    for chunks in (None, [1, 7, 20, 1, 19]):
        torch.testing.assert_close(reference.logits_of(ours, ids, chunks), expected, atol=2e-4, rtol=0)


def test_what_layers_do_becomes_cache_groups(make, load):
    specs = load(make("Gemma2", **RUNS["Gemma2"])[1]).cache_specs()
    assert [(spec.group, spec.kind, spec.layers, spec.window) for spec in specs] == [
        ("window", "window", (0, 2), 8), ("full", "full", (1,), None)]
    assert [spec.bytes_per_token for spec in specs] == [2 * 2 * 2 * 16 * 4, 2 * 1 * 2 * 16 * 4]
    shapes = TransformersModel()
    shapes.build(config_of("Gemma2", **RUNS["Gemma2"]), LOCAL_MESH, torch.bfloat16, "cpu")
    shape = shapes.attention_shapes({"window": 16})["window"]
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.page_size) == (4, 2, 16, 16)
    assert (shape.scale, shape.window, shape.softcap) == (24**-0.5, 8, 2.0)


def test_a_window_that_never_hides_anything_is_none():
    specs = TransformersModel()
    specs.build(config_of("Starcoder2", sliding_window=128), LOCAL_MESH, torch.float32, "cpu")
    assert [(spec.group, spec.window) for spec in specs.cache_specs()] == [("full", None)]


def test_longrope_is_served_as_far_as_no_text_changes_another(make, load, reference, ids):
    theirs, directory = make("Phi3", original_max_position_embeddings=50, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 3.0] * 4, "long_factor": [2.0, 9.0] * 4,
        "original_max_position_embeddings": 50})
    ours = load(directory)
    assert ours.facts(ours.config).max_position == 50
    expected = reference.transformers_logits(theirs, ids)
    torch.testing.assert_close(reference.logits_of(ours, ids), expected, atol=2e-4, rtol=0)
    with torch.inference_mode():  # a draft that lies beyond turns nobody's angles
        ours.forward(torch.tensor([1, 2]), torch.tensor([49, 50]), reference.PlainAttention(ours))
    torch.testing.assert_close(reference.logits_of(ours, ids), expected, atol=2e-4, rtol=0)


def test_facts_are_known_before_any_weight_is_read():
    facts = TransformersModel.facts(config_of("GPT2"))
    assert (facts.architecture, facts.num_layers, facts.hidden_size) == ("GPT2LMHeadModel", 3, 64)
    assert (facts.vocab_size, facts.max_position) == (128, 128)


@pytest.mark.parametrize("family", ["Gemma2", "GPT2", "Qwen2Moe"])
def test_bfloat16_stays_close_to_transformers(family, make, load, reference, ids):
    theirs, directory = make(family, **RUNS[family] | {"initializer_range": 0.05})
    ours = reference.logits_of(load(directory, torch.bfloat16), ids)
    assert ours.dtype == torch.float32
    similarity = torch.nn.functional.cosine_similarity(ours, reference.transformers_logits(theirs, ids))
    assert similarity.median() > 0.999  # a router may choose otherwise for a token
    assert similarity.min() > 0.9


def test_a_draft_beyond_the_last_position_is_computed_without_harm(make, load, reference):
    model = load(make("GPT2")[1])
    with torch.inference_mode():
        out = model.forward(torch.tensor([1, 2]), torch.tensor([127, 128]), reference.PlainAttention(model))
    assert out.isfinite().all()


@pytest.mark.parametrize(("family", "changes", "named"), [
    ("Bloom", {"n_layer": 3}, "BloomForCausalLM"),  # ALiBi: added to the mask
    ("Mpt", {}, "MptForCausalLM"),
    ("Falcon", {}, "does not go through transformers' interface"),
    ("GptOss", {}, "gives attention s_aux"),  # sinks
    ("DeepseekV3", {"n_routed_experts": 4}, "sizes 192, 192, 128"),  # latent attention
    ("Mamba", {}, "0 times"),
    ("Bert", {}, "neither causal over all tokens nor over a sliding window"),
    ("Llama4", {"pad_token_id": 0}, "Llama4ForCausalLM"),  # chunked attention
    ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, "Lfm2ForCausalLM"),  # a state of its own
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "depend on the longest text of a batch"),
])
def test_what_it_cannot_run_exactly_is_refused_by_name_before_weights(family, changes, named):
    with pytest.raises(ConfigError, match=named):
        TransformersModel.facts(config_of(family, **changes))


@pytest.mark.parametrize(("change", "named"), [
    ({"architectures": ["NobodyForCausalLM"]}, "no causal language model 'NobodyForCausalLM'"),
    ({"architectures": ["NobodyForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling.Nobody"}}, "never run"),
    ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
    ({"architectures": None}, "None"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
    ({"vocab_size": "many"}, "vocab_size"),
])
def test_a_config_that_is_no_decoders_is_refused_by_name(change, named):
    config = config_of("Olmo")
    TransformersModel.facts(config)
    with pytest.raises(ConfigError, match=named):
        TransformersModel.facts(config | change)


def test_a_model_of_more_than_text_is_refused():
    config = transformers.Gemma3Config().to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    with pytest.raises(ConfigError, match="more than a decoder of text"):
        TransformersModel.facts(config)


def test_a_mesh_of_several_ranks_is_refused_and_no_axis_offered():
    class Half(Mesh):
        alone = False

    assert TransformersModel.facts(config_of("Olmo")).axes == {}
    with pytest.raises(ConfigError, match="parallel: .*runs whole on one device"):
        TransformersModel().build(config_of("Olmo"), Half(), torch.float32, "cpu")


def without(tensors):
    del tensors["model.layers.1.mlp.up_proj.weight"]


def with_another(tensors):
    tensors["lm_head.bias"] = torch.full((128,), 5.0)


def misshaped(tensors):
    tensors["model.norm.weight"] = torch.ones(63)


@pytest.mark.parametrize(("damage", "named"), [
    (without, "missing: model.layers.1.mlp.up_proj.weight"), (with_another, "unexpected: lm_head.bias"),
    (misshaped, r"model.norm.weight has shape \(63,\), the config promises \(64,\)"),
])
def test_every_tensor_is_accounted_for(damage, named, make, load, capsys):
    _, directory = make("Olmo2")
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors")
    capsys.readouterr()
    with pytest.raises(ModelLoadError, match=named):
        load(directory)
    assert capsys.readouterr() == ("", ""), "the error says it all"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stored", ["none", "same", "another"])
def test_the_head_is_the_right_one_or_the_start_ends(tied, stored, make, load):
    _, directory = make("Olmo2", tie_word_embeddings=tied)
    tensors = load_file(directory / "model.safetensors")
    embedding, _ = tensors["model.embed_tokens.weight"], tensors.pop("lm_head.weight", None)
    heads = {"same": embedding.clone(), "another": embedding.flip(0).contiguous()}
    if stored in heads:
        tensors["lm_head.weight"] = heads[stored]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if stored == "none" and not tied:
        with pytest.raises(ModelLoadError, match=r"missing: lm_head\.weight"):
            load(directory)
        return
    rows = torch.randn(3, 64)
    model = load(directory)
    with torch.inference_mode():
        model.forward(torch.tensor([1]), torch.tensor([0]), lambda layer, q, k, v: q)
        torch.testing.assert_close(model.head(rows), rows @ heads.get(stored, embedding).T)


def test_tensors_may_lack_the_prefix_of_the_whole_model(make, load, reference, ids):
    """As GPT-2 itself is published, with the buffers that its exporter added."""
    theirs, directory = make("GPT2")
    tensors = load_file(directory / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    torch.testing.assert_close(
        reference.logits_of(load(directory), ids), reference.transformers_logits(theirs, ids), atol=2e-4, rtol=0)


def test_pickled_weights_are_not_read(make, load):
    _, directory = make("Olmo")
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="pickled weights are not read"):
        load(directory)


def positions_ignored(forward):
    def planted(self, *args, position_ids=None, **kwargs):
        return forward(self, *args, position_ids=torch.zeros_like(position_ids), **kwargs)

    return planted


def state_kept(forward):
    def planted(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        self.seen = getattr(self, "seen", 0) + out.last_hidden_state.abs().mean()
        out.last_hidden_state = out.last_hidden_state + self.seen
        return out

    return planted


def tokens_mixed(forward):
    def planted(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        out.last_hidden_state = out.last_hidden_state + 0.2 * out.last_hidden_state.roll(1, 1)
        return out

    return planted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fault", [positions_ignored, state_kept, tokens_mixed])
def test_a_class_that_does_not_keep_requests_apart_is_found_at_the_start(fault, dtype, make, load, monkeypatch):
    _, directory = make("Olmo", initializer_range=0.15)
    load(directory, dtype)
    monkeypatch.setattr(transformers.OlmoModel, "forward", fault(transformers.OlmoModel.forward))
    with pytest.raises(ConfigError, match="differ from those of transformers alone"):
        load(directory, dtype)


def test_two_models_in_one_process_do_not_meet(make, load, reference, ids):
    (theirs, directory), (others, other) = make("GPT2"), make("Olmo")
    first, second = load(directory), load(other)
    for model, alone in ((second, others), (first, theirs), (second, others)):
        torch.testing.assert_close(
            reference.logits_of(model, ids), reference.transformers_logits(alone, ids), atol=2e-4, rtol=0)


def test_building_leaves_no_trace_in_transformers(make, load):
    before = copy.copy(transformers.AttentionInterface._global_mapping)
    load(make("Olmo")[1])
    assert set(transformers.AttentionInterface._global_mapping) - set(before) <= {"hotswap"}
    assert torch.get_default_dtype() == torch.float32
