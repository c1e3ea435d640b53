"""Checkpoints of a few kilobytes with random weights, for what needs a real model: no download, no training."""

import json
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 16
SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "bos_token_id": 0, "eos_token_id": 1,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LLAMA: dict[str, Any] = SIZES | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32",
}
MIXTRAL: dict[str, Any] = LLAMA | EXPERTS | {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "sliding_window": None}


def tiny_checkpoint(folder: Path, config: dict[str, Any] = LLAMA, seed: int = 1) -> Path:
    """Write a model of the Llama or the Mixtral family, with whatever sizes ``config`` gives, to ``folder``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    save_file({name: _random(name, shape, random) for name, shape in shapes(config).items()},
              folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def transformers_checkpoint(folder: Path, architecture: str, seed: int = 1) -> Path:
    """Write a model of any architecture that transformers knows ("Qwen3ForCausalLM"), of LLAMA's sizes, to ``folder``.
    Where the family has windows, they are shorter than the kit's texts."""
    import transformers

    made = getattr(transformers, architecture)
    usual, random = made.config_class(), torch.Generator().manual_seed(seed)
    wanted = SIZES | EXPERTS | {"num_experts": 4, "moe_intermediate_size": 24, "sliding_window": 6}
    model = made(made.config_class(**{
        name: value for name, value in wanted.items() if getattr(usual, name, None) is not None})).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random(name, tuple(parameter.shape), random))
    model.save_pretrained(folder)
    return folder


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of such a checkpoint by Hugging Face's names."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found |= {
            f"{layer}input_layernorm": (hidden,), f"{layer}post_attention_layernorm": (hidden,),
            f"{layer}self_attn.q_proj": (q, hidden), f"{layer}self_attn.k_proj": (kv, hidden),
            f"{layer}self_attn.v_proj": (kv, hidden), f"{layer}self_attn.o_proj": (hidden, q),
        }
        experts = config.get("num_local_experts")
        if experts is None:
            mlp = f"{layer}mlp."
            found |= {f"{mlp}gate_proj": (inner, hidden), f"{mlp}up_proj": (inner, hidden),
                      f"{mlp}down_proj": (hidden, inner)}
        else:
            moe = f"{layer}block_sparse_moe."
            found[f"{moe}gate"] = (experts, hidden)
            for e in range(experts):
                found |= {f"{moe}experts.{e}.w1": (inner, hidden), f"{moe}experts.{e}.w3": (inner, hidden),
                          f"{moe}experts.{e}.w2": (hidden, inner)}
    if not config["tie_word_embeddings"]:
        found["lm_head"] = (vocab, hidden)
    return {f"{name}.weight": shape for name, shape in found.items()}


def _random(name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    """Large enough that logits differ, whatever the depth."""
    noise = torch.randn(shape, generator=random)
    return 1 + 0.1 * noise if "norm" in name else noise * 1.5 / shape[-1] ** 0.5
