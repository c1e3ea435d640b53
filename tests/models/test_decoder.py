"""Each family equals transformers' implementation, whatever its config turns on, whole or in chunks."""

import json

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.plugins.models.decoder import DecoderModel

TOLERANCE = 1e-4

FAMILIES = {
    "llama": ("Llama", {}),
    "llama with tied head": ("Llama", {"tie_word_embeddings": True}),
    "llama with attention bias": ("Llama", {"attention_bias": True}),
    "llama with MLP bias": ("Llama", {"mlp_bias": True}),
    "llama with all heads its own": ("Llama", {"num_key_value_heads": 4}),
    "llama with one shared head": ("Llama", {"num_key_value_heads": 1}),
    "llama with wide heads": ("Llama", {"head_dim": 32}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "mistral with window": ("Mistral", {"sliding_window": 8}),
    "mistral with window beyond the context": ("Mistral", {"sliding_window": 4096}),
    "qwen2": ("Qwen2", {"head_dim": 16}),
    "qwen2 with tied head": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows from layer 1": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    "qwen2 with layer types": (
        "Qwen2", {"use_sliding_window": True, "sliding_window": 8,
                  "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3": ("Qwen3", {}),
    "qwen3 with wide heads": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("family, config", FAMILIES.values(), ids=FAMILIES.keys())
def test_logits_equal_transformers_whole_and_chunked(family, config, make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(family, **config)
    ours = reference.load_decoder(directory)
    expected = reference.transformers_logits(theirs, ids)
    assert expected.abs().max() > 1, "logits this small prove nothing"
    torch.testing.assert_close(reference.logits_of(ours, ids), expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(reference.logits_of(ours, ids, [1, 7, 20, 1, 19]), expected, atol=TOLERANCE, rtol=0)


def test_a_sharded_checkpoint_equals_a_single_file(make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint(save={"max_shard_size": "60KB"})
    assert len(list(directory.glob("*.safetensors"))) > 2
    torch.testing.assert_close(
        reference.logits_of(reference.load_decoder(directory), ids), reference.transformers_logits(theirs, ids),
        atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_close_to_transformers(make_checkpoint, reference, ids):
    theirs, directory = make_checkpoint()
    ours = reference.logits_of(reference.load_decoder(directory, torch.bfloat16), ids)
    assert ours.dtype == torch.bfloat16
    expected = reference.transformers_logits(theirs, ids)
    assert torch.nn.functional.cosine_similarity(ours.float(), expected).min() > 0.999


def test_a_later_token_changes_no_earlier_logits(make_checkpoint, reference, ids):
    _, directory = make_checkpoint("Mistral", sliding_window=8)
    model = reference.load_decoder(directory)
    changed = [*ids[:-1], (ids[-1] + 1) % 128]
    assert torch.equal(reference.logits_of(model, ids)[:-1], reference.logits_of(model, changed)[:-1])


def test_layers_with_and_without_window_are_two_cache_groups(make_checkpoint, reference):
    _, directory = make_checkpoint("Qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    model = reference.load_decoder(directory)
    full, window = model.cache_specs()
    assert (full.group, full.kind, full.layers, full.window) == ("full", "full", (0,), None)
    assert (window.group, window.kind, window.layers, window.window) == ("window", "window", (1, 2), 8)
    assert window.bytes_per_token == 2 * full.bytes_per_token == 2 * 2 * 2 * 16 * 4
    shapes = model.attention_shapes({"full": 16, "window": 32})
    assert (shapes["window"].window, shapes["window"].page_size, shapes["full"].heads) == (8, 32, 4)


def test_facts_come_from_the_config_alone(make_checkpoint):
    _, directory = make_checkpoint()
    facts = DecoderModel.facts(json.loads((directory / "config.json").read_text()))
    assert (facts.architecture, facts.num_layers, facts.max_position) == ("LlamaForCausalLM", 3, 128)
    assert facts.axes == {"heads": 4, "kv_heads": 2, "mlp": 96, "vocab": 128, "layers": 3}


VALID = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 2,
}


@pytest.mark.parametrize("change, named", [
    ({"architectures": ["OtherForCausalLM"]}, "OtherForCausalLM"),
    ({"vocab_size": None}, "vocab_size"),
    ({"num_attention_heads": 0}, "num_attention_heads"),
    ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ({"hidden_act": "gelu"}, "hidden_act"),
    ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ({"rope_scaling": {"type": "spiral"}}, "spiral"),
    ({"rope_scaling": {"type": "linear"}}, "factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
])
def test_what_a_config_asks_for_is_honoured_or_refused_by_name(change, named):
    DecoderModel.facts(VALID)
    with pytest.raises(ConfigError, match=named):
        DecoderModel.facts(VALID | change)
