"""What cannot be packed is refused before a weight is read, and what is chosen by itself is said."""

import pytest
import torch

from hotswap.core.config import load_config
from hotswap.core.config.check import check_config
from hotswap.core.engine.build import build_engine
from hotswap.core.errors import ConfigError
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.packing import check_quantization
from hotswap.core.registry import Registry
from hotswap.core.testing.checkpoints import LLAMA, tiny_checkpoint
from hotswap.core.testing.rig import build
from hotswap.plugins.quantization import torch_support
from hotswap.plugins.quantization.kernel_linear import no_kernels
from hotswap.plugins.quantization.none import no_bfloat16_kernels


def refusal(path, **sections):
    config = load_config({
        "model": {"path": str(path)}, "device": "cpu", "dtype": "float32", "kvcache": {"num_blocks": 8},
        "max_model_len": 32, "scheduler": {"max_batch_tokens": 32, "max_running": 2}, **sections}, environ={})
    with pytest.raises(ConfigError) as refused:
        build_engine(config, progress=False)
    return str(refused.value)


def test_blocks_that_there_are_not_cannot_be_kept(tmp_path, make_gguf):
    told = refusal(tiny_checkpoint(tmp_path / "m"), quantization="gguf")
    assert told.startswith("quantization: quantization:gguf keeps the quantised blocks of a GGUF file, and ")
    assert "has none; choose another quantization, or a .gguf file that is quantised" in told
    assert "has none" in refusal(make_gguf("F32", "F32"), quantization="gguf")


def test_a_model_whose_layers_are_not_ours_is_refused(tmp_path):
    model = tiny_checkpoint(tmp_path)
    told = refusal(model, quantization="int8", model={"path": str(model), "use": "transformers"})
    assert "quantization:int8 requires 'packed_weights' of the model" in told
    offers = "model:transformers (model) offers any_architecture"
    assert f"{offers}. Change the quantization, or the model component." in told


@pytest.mark.parametrize("use", ["int8", "int4", "gguf"])
@pytest.mark.parametrize(("key", "value"), [("dtype", "float16"), ("device", "cuda")])
def test_a_dtype_or_a_device_for_which_there_is_nothing_is_found_by_the_check(use, key, value):
    config = load_config({"model": "m", "quantization": use, key: value}, environ={}).config
    with pytest.raises(ConfigError, match=f"{key}.*quantization:{use} does not take '{value}'"):
        check_config(config, Registry())


def test_a_dtype_that_follows_from_the_checkpoint_is_refused_at_the_start(tmp_path):
    checkpoint = open_checkpoint(str(tiny_checkpoint(tmp_path)), progress=False)
    with pytest.raises(ConfigError) as refused:
        check_quantization(build("quantization", "int8"), checkpoint, None, "cpu", "float16", "speculator.quantization")
    assert str(refused.value) == (
        "speculator.quantization: quantization:int8 does not take the dtype 'float16', but float32, bfloat16. Change "
        "it, or speculator.quantization.")


def test_a_draft_model_has_a_quantization_of_its_own_which_is_checked(tmp_path):
    model = tiny_checkpoint(tmp_path / "m")
    told = refusal(model, speculator={"use": "draft", "model": str(model), "quantization": "gguf"})
    assert told.startswith("speculator.quantization: quantization:gguf keeps the quantised blocks")


def test_what_a_draft_model_s_quantization_lacks_is_told_under_its_own_path(make_gguf, monkeypatch):
    """Operators, or layers that it can pack: whoever named another would change the model's quantization."""
    checkpoint = open_checkpoint(str(make_gguf()), progress=False)
    fallback, path = build("model", "transformers"), "speculator.quantization"
    with pytest.raises(ConfigError) as refused:
        check_quantization(build("quantization", "int8"), checkpoint, fallback, "cpu", "float32", path)
    assert str(refused.value).startswith(f"{path}: quantization:int8 requires 'packed_weights' of the model")
    assert "quantization, or the model component" in str(refused.value)
    monkeypatch.setattr(torch_support, "operator", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        check_quantization(build("quantization", "int4", kernels="torch"), checkpoint, None, "cpu", "float32", path)
    assert str(refused.value).startswith(f"{path}: quantization:int4 cannot multiply 4-bit weights")


LAYERS = (
    "lm_head, model.layers.*.mlp.down_proj, model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj, "
    "model.layers.*.self_attn.k_proj, model.layers.*.self_attn.o_proj, model.layers.*.self_attn.q_proj, "
    "model.layers.*.self_attn.v_proj")


@pytest.mark.parametrize("tied", [False, True])
def test_a_pattern_that_fits_no_layer_is_refused_with_the_names_that_there_are(tmp_path, tied):
    """The embedding is in the checkpoint, and no linear layer."""
    path = tiny_checkpoint(tmp_path, LLAMA | {"tie_word_embeddings": tied})
    for pattern, hint in (("lm_haed", " Did you mean 'lm_head'?"), ("*.down-proj", ""), ("model.embed_tokens", "")):
        told = refusal(path, quantization={"use": "int8", "keep": ["*.q_proj", pattern]})
        assert told == f"quantization.keep[1]: {pattern!r} fits no linear layer of {path}.{hint} There are {LAYERS}."
    told = refusal(path, quantization={"use": "int8", "keep": ["x", "y"]})
    assert "quantization.keep[0]: 'x' fits" in told and "quantization.keep[1]: 'y' fits" in told
    told = refusal(path, speculator={
        "use": "draft", "model": str(path), "quantization": {"use": "int4", "keep": ["head"]}})
    assert told.startswith("speculator.quantization.keep[0]: 'head' fits no linear layer")


@pytest.mark.parametrize("keep", [["lm_head"], ["*.down_proj", "model.layers.1.*", "lm_*"]])
def test_patterns_that_fit_are_taken(make_gguf, keep):
    for tied in (False, True):
        checkpoint = open_checkpoint(str(make_gguf(tied=tied)), progress=False)
        check_quantization(
            build("quantization", "int8", keep=keep), checkpoint, build("model", "LlamaForCausalLM"), "cpu", "float32")


def notes(make_gguf, use, dtype="bfloat16", matrices="Q4_1", **options):
    checkpoint = open_checkpoint(str(make_gguf(matrices)), progress=False)
    return check_quantization(build("quantization", use, **options), checkpoint, None, "cpu", dtype)


@pytest.mark.skipif(bool(no_kernels() or no_bfloat16_kernels()), reason="this machine lacks instructions")
@pytest.mark.parametrize("use", ["none", "int8", "int4", "gguf"])
def test_where_all_is_as_it_should_be_nothing_is_said(make_gguf, use):
    assert notes(make_gguf, use) == []


def test_a_format_without_a_path_of_its_own_is_said_once(make_gguf):
    *_, told = notes(make_gguf, "gguf", matrices="Q5_0")
    assert told == (
        "quantization: quantization:gguf has no path of its own for Q5_0, so that those weights are dequantised; it "
        "has for Q4_0, Q4_1, Q4_K, Q8_0")


def test_a_processor_that_lacks_instructions_is_given_the_next_best_and_the_reason(make_gguf, processor):
    processor("avx2")
    assert notes(make_gguf, "none") == [
        "quantization: bfloat16 weights stay as they are stored, since the processor has no bfloat16 instructions"]
    assert notes(make_gguf, "none", dtype="float32") == notes(make_gguf, "none", prepack=False) == []
    widened = "8-bit weights are made bfloat16 again for each product, since "
    [told] = notes(make_gguf, "int8")
    assert told.startswith(
        "quantization: torch's operators multiply the packed weights, since the processor has no AVX-512 instructions "
        f"for products of 8-bit numbers; {widened}")
    [told] = notes(make_gguf, "gguf")
    assert "; 4-bit weights are multiplied without AVX-512, which is slow; " in told and widened in told
    [told] = notes(make_gguf, "gguf", many_rows=None)
    assert widened not in told


def test_torch_s_operators_may_be_asked_for(make_gguf):
    for use in ("int8", "int4", "gguf"):
        [told] = notes(make_gguf, use, kernels="torch")
        assert told.startswith("quantization: torch's operators multiply the packed weights, since the config says so")


@pytest.mark.skipif(bool(no_bfloat16_kernels()), reason="this machine lacks instructions")
def test_where_onednn_multiplies_bfloat16_and_could_be_beaten_it_is_said(make_gguf, processor):
    told = "quantization: oneDNN multiplies bfloat16 weights, since "
    assert notes(make_gguf, "none", kernels="torch") == [f"{told}the config says so"]
    processor("avx512_f", "bf16")
    assert notes(make_gguf, "none") == [
        f"{told}the processor has no AVX-512 instructions for products of bfloat16"]
    processor("avx512_bf16", "amx_bf16")
    assert notes(make_gguf, "none") == [], "nobody is faster"


def test_an_operator_that_this_torch_lacks_is_named(make_gguf, monkeypatch):
    monkeypatch.setattr(torch_support, "operator", lambda name: None)
    for use in ("int4", "gguf"):
        with pytest.raises(ConfigError) as refused:
            notes(make_gguf, use, kernels="torch")
        assert str(refused.value) == (
            f"quantization: quantization:{use} cannot multiply 4-bit weights: torch {torch.__version__} has no "
            "operator aten._convert_weight_to_int4pack_for_cpu, aten._weight_int4pack_mm_for_cpu, and the config says "
            "so; choose int8, or none")
    [told] = notes(make_gguf, "int8", kernels="torch")
    assert "has no operator onednn.qlinear_prepack, onednn.qlinear_pointwise" in told or "no oneDNN" in told


def test_a_group_size_that_nobody_would_use_is_refused_or_said(make_gguf, processor, tmp_path):
    told = refusal(
        tiny_checkpoint(tmp_path / "m"), quantization={"use": "int8", "kernels": "torch", "group_size": 192})
    assert told.startswith("quantization.group_size: 192 is for our kernels, but 'kernels' is torch")
    assert told.endswith("leave one of the two out.")
    build("quantization", "int8", kernels="torch", group_size=32)
    processor("avx2")
    [told] = notes(make_gguf, "int8", group_size=192)
    assert told.endswith("group_size 192 has no effect: they have one scale for all weights of an output feature")
    assert "group_size" not in notes(make_gguf, "int8")[0]
