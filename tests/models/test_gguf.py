"""GGUF files: the same model in both formats, and what is wrong with a file is said."""

import json

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.gguf import GGUFFile

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}
WIDE = {"hidden_size": 64, "intermediate_size": 128}  # rows of whole blocks of 32


def gguf_name(name):
    module, kind = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def unfused(state):
    """llama.cpp has gate and up of the experts in a tensor each."""
    for name, tensor in state.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), half.contiguous()
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", tensor
        else:
            yield name, tensor


def write_gguf(path, model, architecture="llama", kind=GGMLQuantizationType.F32, vocabulary=None, **fields):
    """As llama.cpp's converter does: its names, and for "llama" the rows of q and k interleaved by halves."""
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in fields.items():
        getattr(writer, key)(value)
    (vocabulary or (lambda writer: None))(writer)
    for name, tensor in unfused(model.state_dict()):
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name and architecture == "llama":
                halves = values.reshape(heads, 2, -1, *values.shape[1:])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), values)
        elif kind == GGMLQuantizationType.F16:
            writer.add_tensor(gguf_name(name), values.astype(np.float16))
        else:
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_vocabulary(pre="gpt-2", size=128):
    def add(writer):
        writer.add_tokenizer_model("gpt2")
        if pre:
            writer.add_tokenizer_pre(pre)
        letters = [*(chr(c) for c in range(ord("!"), ord("~") + 1)), "th"]
        writer.add_token_list([*letters, *(f"<|{i}|>" for i in range(size - len(letters)))])
        writer.add_token_types([1] * len(letters) + [3] * (size - len(letters)))
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(size - 1)
    return add


@pytest.mark.parametrize("kind, cosine", [("F32", 0.999999), ("F16", 0.9999), ("BF16", 0.999), ("Q8_0", 0.999),
                                          ("Q5_1", 0.98), ("Q4_1", 0.9)])
def test_a_llama_in_both_formats_gives_the_same_logits(kind, cosine, make_checkpoint, reference, ids, tmp_path):
    theirs, _ = make_checkpoint(**WIDE)
    file = write_gguf(tmp_path / "m.gguf", theirs, kind=GGMLQuantizationType[kind])
    ours, expected = reference.logits_of(reference.load_decoder(file), ids), reference.transformers_logits(theirs, ids)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), expected.flatten(), 0) > cosine
    if kind == "F32":
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", [
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "BF16",
])
def test_every_block_format_is_read_as_the_format_says(kind, tmp_path):
    kind = GGMLQuantizationType[kind]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)  # no NaN among the scales
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=kind)
    writer.add_tensor("after", np.ones(2, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.tensors["t"].shape == (3, 2 * block_values)
    np.testing.assert_array_equal(file.dequantize("t"), dequantize(raw, kind))
    np.testing.assert_array_equal(file.dequantize("after"), [1, 1])


@pytest.mark.parametrize("family, architecture, config", [
    ("Llama", "llama", {"attention_bias": True, "mlp_bias": True}),
    ("Mistral", "llama", {"sliding_window": None}),
    ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", "qwen3", {}),
])
def test_each_architecture_has_its_own_row_order_and_biases(
        family, architecture, config, make_checkpoint, reference, ids, tmp_path):
    theirs, _ = make_checkpoint(family, **config)
    file = write_gguf(tmp_path / "m.gguf", theirs, architecture)
    torch.testing.assert_close(
        reference.logits_of(reference.load_decoder(file), ids), reference.transformers_logits(theirs, ids),
        atol=1e-4, rtol=0)


@pytest.mark.parametrize("family, architecture, kind", [
    ("Mixtral", "llama", "F32"), ("Qwen3Moe", "qwen3moe", "F32"), ("Qwen3Moe", "qwen3moe", "Q8_0"),
])
def test_experts_are_taken_out_of_their_stacks(
        family, architecture, kind, make_checkpoint, reference, ids, tmp_path):
    theirs, _ = make_checkpoint(
        family, **WIDE, num_local_experts=5, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    sizes = {"add_expert_count": 5, "add_expert_used_count": 2}
    if architecture == "qwen3moe":
        sizes["add_expert_feed_forward_length"] = 32
    file = write_gguf(tmp_path / "m.gguf", theirs, architecture, GGMLQuantizationType[kind], **sizes)
    ours, expected = reference.logits_of(reference.load_decoder(file), ids), reference.transformers_logits(theirs, ids)
    if kind == "F32":
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    assert torch.nn.functional.cosine_similarity(ours.flatten(), expected.flatten(), 0) > 0.99


def test_llama3_frequencies_stored_as_divisors_equal_the_config(make_checkpoint, reference, ids, tmp_path):
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32}
    theirs, _ = make_checkpoint(rope_parameters=rope)
    inv_freq = theirs.model.rotary_emb.inv_freq
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2).float() / 16)
    file = write_gguf(tmp_path / "m.gguf", theirs, vocabulary=lambda writer: writer.add_tensor(
        "rope_freqs.weight", (plain / inv_freq).numpy()))
    torch.testing.assert_close(
        reference.logits_of(reference.load_decoder(file), ids), reference.transformers_logits(theirs, ids),
        atol=1e-4, rtol=0)


def test_a_file_without_pre_tokenizer_is_warned_about(make_checkpoint, tmp_path):
    theirs, _ = make_checkpoint()
    named = write_gguf(tmp_path / "new.gguf", theirs, vocabulary=byte_vocabulary("gpt-2"))
    stale = write_gguf(tmp_path / "old.gguf", theirs, vocabulary=byte_vocabulary(None))
    assert open_checkpoint(str(named)).warnings == []
    (warning,) = open_checkpoint(str(stale)).warnings
    assert "tokenizer.ggml.pre" in warning and "convert the model again" in warning


def test_control_tokens_of_the_file_are_special_and_merges_apply(make_checkpoint, tmp_path):
    theirs, _ = make_checkpoint()
    checkpoint = open_checkpoint(str(write_gguf(tmp_path / "m.gguf", theirs, vocabulary=byte_vocabulary())))
    tokenizer = checkpoint.tokenizer()
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("this<|5|>")] == ["th", "i", "s", "<|5|>"]
    assert "<|5|>" not in [tokenizer.id_to_token(i) for i in tokenizer.encode_without_special_parsing("this<|5|>")]
    assert checkpoint.eos_token_ids(128) == {127}


def test_an_unknown_pre_tokenizer_is_refused(make_checkpoint, tmp_path):
    theirs, _ = make_checkpoint()
    file = write_gguf(tmp_path / "m.gguf", theirs, vocabulary=byte_vocabulary("martian"))
    with pytest.raises(ConfigError, match="martian"):
        open_checkpoint(str(file)).tokenizer()


@pytest.mark.parametrize("lost", [1, 1024])
def test_a_file_that_was_cut_off_is_an_error_with_both_sizes(lost, make_checkpoint, tmp_path):
    theirs, _ = make_checkpoint()
    file = write_gguf(tmp_path / "m.gguf", theirs)
    data = file.read_bytes()
    file.write_bytes(data[:-lost])
    told = rf"truncated: its tensors need {len(data)} bytes, the file has {len(data) - lost}"
    with pytest.raises(ModelLoadError, match=told):
        open_checkpoint(str(file))


def test_a_header_that_was_cut_off_anywhere_is_an_error(make_checkpoint, tmp_path):
    theirs, _ = make_checkpoint()
    file = write_gguf(tmp_path / "m.gguf", theirs, vocabulary=byte_vocabulary())
    data = file.read_bytes()
    for length in [0, 3, 23, 24, 40, 100, 500, 2000]:
        file.write_bytes(data[:length])
        with pytest.raises(ModelLoadError, match="download it again") as caught:
            open_checkpoint(str(file))
        assert f"{length} bytes" in str(caught.value)
        assert "unpack" not in str(caught.value), "struct's words mean nothing to who has a bad download"


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        GGUFFile(file)


def test_an_unknown_architecture_is_refused_with_those_that_work(make_checkpoint, tmp_path):
    theirs, _ = make_checkpoint()
    file = write_gguf(tmp_path / "m.gguf", theirs, "bloom")
    with pytest.raises(ConfigError, match="'bloom'.*'llama', 'qwen2', 'qwen3'"):
        open_checkpoint(str(file))


def test_an_unknown_tensor_is_refused(make_checkpoint, reference, tmp_path):
    theirs, _ = make_checkpoint()
    file = write_gguf(tmp_path / "m.gguf", theirs, vocabulary=lambda writer: writer.add_tensor(
        "blk.0.ffn_extra.weight", np.zeros((4, 4), np.float32)))
    with pytest.raises(ModelLoadError, match="unexpected: blk.0.ffn_extra.weight"):
        reference.load_decoder(file)


def test_a_directory_with_one_gguf_file_is_that_file(make_checkpoint, tmp_path):
    theirs, directory = make_checkpoint()
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf(folder / "m.gguf", theirs)
    assert open_checkpoint(str(folder)).config["hidden_size"] == 64
    assert json.loads((directory / "config.json").read_text())["vocab_size"] == 128
