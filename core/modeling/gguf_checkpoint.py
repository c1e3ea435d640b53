"""What a GGUF file says, in Hugging Face's terms: the config, the names of tensors, the order of their rows.

Only what differs between the formats is here; which family a config belongs to is the model plugins' business.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from hotswap.core.errors import ConfigError, ModelLoadError
from hotswap.core.modeling.gguf import GGUFFile

ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""llama.cpp's architectures (its "llama" covers Mistral and Mixtral) and the class that Hugging Face's configs name."""

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_EXPERTS = {
    "llama": ("block_sparse_moe", {"ffn_gate_exps": "w1", "ffn_up_exps": "w3", "ffn_down_exps": "w2"}),
    "qwen3moe": ("mlp", {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}),
}
"""Where the experts, of which llama.cpp stacks one tensor a layer, are in Hugging Face's checkpoints."""
DENSE_FORMATS = {"F64", "F32", "F16", "BF16"}
"""In which each value is stored by itself."""
ROPE_FACTORS = "rope_freqs.weight"
"""Llama 3's scaled frequencies, stored as one divisor per frequency; becomes part of the config."""


class TensorSource(NamedTuple):
    """``heads`` is set where llama.cpp interleaved the two halves of each head's rows for its own rotary order;
    ``item`` where the tensor is one of those that llama.cpp stacks."""

    gguf_name: str
    heads: int | None = None
    item: int | None = None


def check_pre_tokenizer(file: GGUFFile) -> str | None:
    """A warning where a byte-level vocabulary does not say how text is cut: such files are conversions from before
    llama.cpp recorded it."""
    if file.metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in file.metadata:
        return (
            f"{file.path.name} does not name its pre-tokenizer (tokenizer.ggml.pre): it was converted by an old tool, "
            "the GPT-2 rule is used and answers may be worse; convert the model again"
        )
    return None


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The config.json that the file's metadata amounts to. ConfigError for an architecture that is not known."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{file.path} has the GGUF architecture {architecture!r}, supported are {sorted(ARCHITECTURES)}: "
            "use the Hugging Face checkpoint"
        )

    def field(name: str, default: Any = ...) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is ...:
            raise ModelLoadError(f"{file.path} lacks the metadata field {architecture}.{name}: convert the model again")
        return value

    heads, hidden_size = field("attention.head_count"), field("embedding_length")
    if not all(isinstance(value, int) and value > 0 for value in (heads, hidden_size)):
        raise ModelLoadError(f"{file.path} has {heads!r} heads and width {hidden_size!r}, expected positive integers")
    head_dim = field("attention.key_length", hidden_size // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if field(name, head_dim) != head_dim:
            raise ConfigError(f"{file.path} has {name} {field(name)}, supported is the head size {head_dim} alone")
    window, experts = field("attention.sliding_window", None), field("expert_count", None)
    config = {
        "architectures": [_class_name(architecture, window, experts)],
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length"),
        "rope_parameters": _rope(file, field),
        "vocab_size": _tensor_rows(file, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": architecture == "llama" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": _end_ids(metadata),
    }
    if experts:
        config |= _experts(experts, config["intermediate_size"], field)
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 0}
    return config


def _class_name(architecture: str, window: int | None, experts: int | None) -> str:
    if architecture == "llama" and (window or experts):
        return "MixtralForCausalLM" if experts else "MistralForCausalLM"
    return ARCHITECTURES[architecture]


def _experts(count: int, mlp_size: int, field: Callable[..., Any]) -> dict[str, Any]:
    """``mlp_size``: an expert's, where the file gives no other."""
    return {
        "num_local_experts": count, "num_experts_per_tok": field("expert_used_count"),
        "moe_intermediate_size": field("expert_feed_forward_length", mlp_size),
        "norm_topk_prob": field("expert_weights_norm", True),
    }


def tensor_sources(file: GGUFFile, config: dict[str, Any]) -> dict[str, TensorSource]:
    """By Hugging Face's name, where each tensor comes from. Names that are not known keep their own."""
    architecture = file.metadata["general.architecture"]
    permuted = architecture == "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]} if permuted else {}
    sources: dict[str, TensorSource] = {}
    for name in file.tensors:
        if name == ROPE_FACTORS:
            continue
        if experts := _expert_sources(name, file.tensors[name].shape, architecture):
            sources |= experts
            continue
        sources[_hf_name(name)] = TensorSource(name, heads.get(name.split(".")[-2]) if "." in name else None)
    return sources


def _expert_sources(name: str, shape: tuple[int, ...], architecture: str) -> dict[str, TensorSource]:
    """By Hugging Face's name, the router or the experts that the tensor ``name`` holds; empty where it is neither."""
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or architecture not in _EXPERTS:
        return {}
    (layer, part), (block, projections) = match.groups(), _EXPERTS[architecture]
    if part == "ffn_gate_inp":
        return {f"model.layers.{layer}.{block}.gate.weight": TensorSource(name)}
    if part not in projections:
        return {}
    return {
        f"model.layers.{layer}.{block}.experts.{expert}.{projections[part]}.weight": TensorSource(name, item=expert)
        for expert in range(shape[0])
    }


def _hf_name(name: str) -> str:
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_INNER[part]}.{kind}" if part in _INNER else name
    part, _, kind = name.partition(".")
    return f"{_OUTER[part]}.{kind}" if part in _OUTER else name


def _tensor_rows(file: GGUFFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path} lacks the tensor {name}: download or convert it again")
    return file.tensors[name].shape[0]


def _end_ids(metadata: dict[str, Any]) -> list[int]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    return sorted({metadata[k] for k in (f"tokenizer.ggml.{key}" for key in keys) if k in metadata})


def _rope(file: GGUFFile, field: Any) -> dict[str, Any]:
    theta, context = field("rope.freq_base", 10000.0), field("context_length")
    kind = field("rope.scaling.type", "none")
    if ROPE_FACTORS in file.tensors:
        # 1 / (factor * base^x) is longrope's formula, with the same factors at every length.
        factors = file.dequantize(ROPE_FACTORS).reshape(-1).tolist()
        return {
            "rope_type": "longrope", "rope_theta": theta, "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": context, "attention_factor": 1.0,
        }
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": field("rope.scaling.factor")}
    if kind == "yarn":
        parameters["original_max_position_embeddings"] = field("rope.scaling.original_context_length")
    elif kind != "linear":
        raise ConfigError(f"{file.path} asks for rope scaling {kind!r}, supported are linear, yarn and {ROPE_FACTORS}")
    return parameters
