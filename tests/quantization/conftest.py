"""Tiny GGUF files of every format, and processors that have fewer instructions than this one."""

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from hotswap.core.testing.checkpoints import LLAMA, shapes
from hotswap.plugins.cpu.linear_words import GROUP
from hotswap.plugins.quantization.grouped import Groups

WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 2}
"""Rows of whole blocks of 32."""

_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@pytest.fixture
def wide() -> dict[str, Any]:
    return WIDE


@pytest.fixture
def make_gguf(tmp_path):
    """``make_gguf(matrices="Q4_1", embedding="Q8_0", tied=True)``: the path of a random model of the Llama family, its
    q and k rows interleaved as llama.cpp has them."""

    def make(matrices: str = "Q4_1", embedding: str = "Q8_0", tied: bool = True):
        from gguf import GGMLQuantizationType, GGUFWriter
        from gguf.quants import quantize

        config, path = WIDE | {"tie_word_embeddings": tied}, tmp_path / f"{matrices}-{embedding}-{tied}.gguf"
        writer = GGUFWriter(path, "llama")
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
        random = np.random.default_rng(1)
        for name, shape in shapes(config).items():
            module = name.removesuffix(".weight")
            values = random.standard_normal(shape).astype(np.float32)
            if len(shape) == 1:
                writer.add_tensor(_gguf_name(module), 1 + 0.1 * values)
                continue
            kind = GGMLQuantizationType[embedding if module in _OUTER else matrices]
            values = values * 1.5 / shape[-1] ** 0.5
            data = values if kind == GGMLQuantizationType.F32 else quantize(values, kind)
            writer.add_tensor(_gguf_name(module), data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def _gguf_name(module: str) -> str:
    if module.startswith("model.layers."):
        _, _, layer, part = module.split(".", 3)
        return f"blk.{layer}.{_PARTS[part]}.weight"
    return f"{_OUTER[module]}.weight"


@pytest.fixture
def dense():
    """``dense(groups)``: [O, I] float32, what the numbers stand for."""

    def make(groups: Groups) -> torch.Tensor:
        scales, least = (
            each.repeat_interleave(GROUP, 1)[:, : groups.numbers.shape[1]] for each in (groups.scales, groups.least))
        return groups.numbers * scales + least

    return make


@pytest.fixture
def processor(monkeypatch):
    """``processor("avx2")``: from here on the processor has these capabilities and no others."""

    def have(*names: str) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: MappingProxyType(dict.fromkeys(names, True)))

    return have
