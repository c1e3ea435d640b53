"""Rotary frequencies equal transformers', variant by variant and spelling by spelling."""

import pytest
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.modeling.rope import RopeConfig, RotaryEmbedding

ORIGINAL, LONGEST = 64, 256
SHORT, LONG = [1.0 + 0.05 * i for i in range(8)], [1.0 + 0.7 * i for i in range(8)]

VARIANTS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn with all options": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "beta_fast": 16.0,
        "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False},
    "yarn with attention factor": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL, "attention_factor": 1.3},
    "longrope": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG,
                 "original_max_position_embeddings": ORIGINAL},
    "longrope with factor": {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, "factor": 8.0,
                             "original_max_position_embeddings": ORIGINAL},
}


def hf_config(parameters, theta):
    # Where the variant states no original length, max_position_embeddings is that of pretraining.
    longest = LONGEST if "original_max_position_embeddings" in parameters else ORIGINAL
    return {
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "max_position_embeddings": longest,
        "rope_parameters": {**parameters, "rope_theta": theta},
    }


def theirs(config, positions):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(LlamaConfig(**config))
    cos, sin = rope(torch.zeros(1), torch.tensor([positions]))
    return cos[0, :, :8], sin[0, :, :8]


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("parameters", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("position", [0, ORIGINAL - 1, ORIGINAL, 2 * ORIGINAL])
def test_cos_and_sin_equal_transformers(parameters, theta, position):
    config = hf_config(parameters, theta)
    expected = theirs(config, [position])
    rope = RopeConfig.from_hf(config, 16, config["max_position_embeddings"])
    actual = rope.cos_sin(torch.tensor([position]))
    torch.testing.assert_close(actual, tuple(expected), atol=1e-5, rtol=0)
    if position < rope.context:
        tabled = RotaryEmbedding(rope, torch.float32, "cpu")(torch.tensor([position]))
        torch.testing.assert_close(tuple(t[:, 0] for t in tabled), tuple(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("length", [ORIGINAL, 2 * ORIGINAL + 1])
def test_the_length_of_a_text_can_be_given_as_transformers_takes_it(kind, length):
    config = hf_config(VARIANTS[kind], 10000.0)
    positions = torch.arange(length)
    rope = RopeConfig.from_hf(config, 16, config["max_position_embeddings"])
    actual = rope.cos_sin(positions, torch.full_like(positions, length))
    torch.testing.assert_close(actual, tuple(theirs(config, positions.tolist())), atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", VARIANTS)
def test_every_spelling_means_the_same(kind):
    parameters = dict(VARIANTS[kind])
    rope_type = parameters.pop("rope_type")
    old = {"rope_theta": 5e5, "rope_scaling": {"type": rope_type, **parameters}}
    newer = {"rope_theta": 5e5, "rope_scaling": {"rope_type": rope_type, **parameters}}
    newest = {"rope_parameters": {"rope_type": rope_type, "rope_theta": 5e5, **parameters}}
    positions = torch.tensor([0, 63, 64, 128])
    ropes = [RopeConfig.from_hf(config, 16, LONGEST) for config in (old, newer, newest)]
    first, *others = [rope.cos_sin(positions) for rope in ropes]
    assert all(torch.equal(first[i], other[i]) for other in others for i in (0, 1))


def test_scaling_is_not_a_no_op():
    positions = torch.tensor([ORIGINAL, 2 * ORIGINAL])
    plain = RopeConfig.from_hf(hf_config(VARIANTS["default"], 1e4), 16, LONGEST).cos_sin(positions)[0]
    for kind in VARIANTS.keys() - {"default"}:
        config = hf_config(VARIANTS[kind], 1e4)
        cos = RopeConfig.from_hf(config, 16, config["max_position_embeddings"]).cos_sin(positions)[0]
        assert (cos - plain).abs().max() > 1e-2, kind


@pytest.mark.parametrize("parameters, named", [
    ({"rope_type": "spiral"}, "spiral"),
    ({"type": "spiral"}, "spiral"),
    ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
    ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "expected 8"),
    ({"full_attention": {"rope_type": "default"}}, "per layer type"),
])
def test_an_unknown_or_incomplete_variant_is_refused(parameters, named):
    with pytest.raises(ConfigError, match=named):
        RopeConfig.from_hf({"rope_parameters": parameters}, 16, LONGEST)


@pytest.mark.parametrize("kind", [k for k in VARIANTS if k not in ("dynamic", "longrope", "longrope with factor")])
def test_logits_equal_transformers_beyond_the_original_length(kind, make_checkpoint, reference):
    config = hf_config(VARIANTS[kind], 10000.0)
    theirs, directory = make_checkpoint(**config)
    ids = torch.randint(0, 128, (config["max_position_embeddings"] - 2,)).tolist()
    torch.testing.assert_close(
        reference.logits_of(reference.load_decoder(directory), ids), reference.transformers_logits(theirs, ids),
        atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "longrope with factor"])
def test_logits_equal_transformers_token_by_token_where_length_matters(kind, make_checkpoint, reference):
    from transformers import DynamicCache

    theirs, directory = make_checkpoint(**hf_config(VARIANTS[kind], 10000.0))
    ids = torch.randint(0, 128, (ORIGINAL + 24,)).tolist()
    ours = reference.load_decoder(directory)
    cache, rows = DynamicCache(), []
    with torch.inference_mode():
        for start, stop in [(0, ORIGINAL - 4), *((i, i + 1) for i in range(ORIGINAL - 4, len(ids)))]:
            out = theirs(torch.tensor([ids[start:stop]]), cache=cache, use_cache=True)
            rows.append(out.logits[0])
    torch.testing.assert_close(reference.logits_of(ours, ids), torch.cat(rows), atol=1e-4, rtol=0)
