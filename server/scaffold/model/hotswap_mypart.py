"""A model: the layers of one family, written with logical axes."""

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.component import ComponentOptions, Description
from hotswap.core.interfaces.kvcache import CacheSpec
from hotswap.core.interfaces.model import Attend, Model, ModelFacts
from hotswap.core.interfaces.quantization import PACKED_WEIGHTS
from hotswap.core.modeling.layers import Axis, ColumnLinear, RMSNorm, RowLinear, VocabEmbedding, VocabHead
from hotswap.core.modeling.mesh import Mesh
from hotswap.core.modeling.operators import TORCH_OPERATORS as OPERATORS
from hotswap.core.modeling.rope import RopeConfig, RotaryEmbedding
from hotswap.core.modeling.weights import WeightSource

REFUSED = {"attention_bias": True, "mlp_bias": True, "sliding_window": ..., "quantization_config": ...}
"""What configs of the family may ask for and this model has not; ``...``: any value."""


class MyPart(Model):
    """Decoders of the Llama family, without biases and windows (Touvron et al., "LLaMA", 2023).

    Choose it ... (an entry point that is named after a checkpoint's architecture is chosen by itself).

    T tokens of the step, H query heads, K key-value heads, D head size; H and K are those of this rank.
    """

    class Options(ComponentOptions):
        softcap: Annotated[float, Field(gt=0)] | None = None
        """Logits are squashed to what lies between -softcap and softcap."""

    @classmethod
    def facts(cls, config: dict[str, Any]) -> ModelFacts:
        """From config.json alone, before a weight is read. What it cannot serve, it refuses here, by name."""
        for key, refused in REFUSED.items():
            if config.get(key) and refused in (config[key], ...):
                raise ConfigError(f"{key}={config[key]!r} is not supported", "model")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act={config['hidden_act']!r} is not supported, expected 'silu'", "model")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return ModelFacts(
            config["architectures"][0], config["num_hidden_layers"], config["hidden_size"], config["vocab_size"],
            config["max_position_embeddings"],
            axes={"heads": heads, "kv_heads": kv_heads, "mlp": config["intermediate_size"],
                  "vocab": config["vocab_size"]},
            concurrent=True, attention=(GroupShape(heads, kv_heads, head_dim, 0, head_dim**-0.5),))

    @classmethod
    def linear_layers(cls, config: dict[str, Any], matrices: Sequence[str]) -> Sequence[str]:
        """By these names options of a quantization speak of its layers. A tied head has no tensor, but a name."""
        return [*(name for name in matrices if name.endswith("_proj")), "lm_head"]

    def describe(self) -> Description:
        """Its linear layers take weights in any form that a quantization makes of them."""
        return Description(offers=frozenset({PACKED_WEIGHTS}))

    def build(self, config: dict[str, Any], mesh: Mesh, dtype: torch.dtype, device: str) -> None:
        """Prepare what this rank holds. A layer asks the mesh for its part of an axis."""
        facts, eps = self.facts(config), config["rms_norm_eps"]
        hidden, vocab = facts.hidden_size, facts.vocab_size
        self.head_dim = facts.attention[0].head_dim
        self.dtype, self.tied = dtype, bool(config.get("tie_word_embeddings"))
        heads, kv_heads, inner = (Axis(name, facts.axes[name], width) for name, width in (
            ("heads", self.head_dim), ("kv_heads", self.head_dim), ("mlp", 1)))
        self.heads, self.kv_heads = (axis.part(mesh).count // self.head_dim for axis in (heads, kv_heads))
        self.embedding = VocabEmbedding(mesh, vocab, hidden, dtype, device)
        self.layers = [
            (RMSNorm(hidden, eps, dtype, device),
             ColumnLinear(mesh, hidden, [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)], False,
                          dtype, device),
             RowLinear(mesh, heads, hidden, False, dtype, device),
             RMSNorm(hidden, eps, dtype, device),
             ColumnLinear(mesh, hidden, [("gate_proj", inner), ("up_proj", inner)], False, dtype, device),
             RowLinear(mesh, inner, hidden, False, dtype, device))
            for _ in range(facts.num_layers)]
        self.norm = RMSNorm(hidden, eps, dtype, device)
        self.lm_head = VocabHead(mesh, vocab, hidden, dtype, device, self.embedding if self.tied else None)
        self.rope = RotaryEmbedding(RopeConfig.from_hf(config, self.head_dim, facts.max_position), dtype, device)

    def load(self, weights: WeightSource) -> None:
        """Take every tensor by its name in the checkpoint; ``finish`` names all that is missing or left over."""
        self.embedding.load(weights, "model.embed_tokens")
        for i, (norm, qkv, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            layer = f"model.layers.{i}."
            norm.load(weights, f"{layer}input_layernorm")
            qkv.load(weights, f"{layer}self_attn.")
            out.load(weights, f"{layer}self_attn.o_proj")
            mlp_norm.load(weights, f"{layer}post_attention_layernorm")
            gate_up.load(weights, f"{layer}mlp.")
            down.load(weights, f"{layer}mlp.down_proj")
        self.norm.load(weights, "model.norm")
        self.lm_head.load(weights, "lm_head", "model.embed_tokens" if self.tied else None)
        weights.finish()

    def cache_specs(self) -> list[CacheSpec]:
        """What the cache must hold: here one group, with keys and values of every layer."""
        count = len(self.layers)
        num_bytes = 2 * count * self.kv_heads * self.head_dim * self.dtype.itemsize
        return [CacheSpec("full", tuple(range(count)), self.kv_heads, self.head_dim, num_bytes)]

    def attention_shapes(self, page_sizes: dict[str, int]) -> dict[str, GroupShape]:
        return {"full": GroupShape(
            self.heads, self.kv_heads, self.head_dim, page_sizes.get("full", 0), self.head_dim**-0.5)}

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend,
        taps: dict[str, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        """Token ids [T] -> [T, hidden]. Rows of many requests stand side by side; ``attend`` knows which is whose."""
        x = self.embedding(inputs)
        cos, sin = self.rope(positions)
        for i, (norm, qkv, out, mlp_norm, gate_up, down) in enumerate(self.layers):
            heads = qkv(norm(x)).view(len(x), -1, self.head_dim)  # [T, H + 2 K, D]
            q, k, v = heads.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), 1)
            OPERATORS.rotate(heads[:, : -self.kv_heads], cos, sin)  # q and k, in place
            x = x + out(attend(i, q, k, v).reshape(len(x), -1))
            x = x + down(OPERATORS.silu_mul(gate_up(mlp_norm(x))))
        return x

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> logits [N, V], float32."""
        logits, cap = self.lm_head(self.norm(rows)), self.options.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
