"""The heads of EAGLE-1 and EAGLE-3, with the names and shapes of the published checkpoints.

Legend of shapes: T tokens, h the hidden size of target and head, N rows that need logits, V the target's vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.model import Attend
from hotswap.core.interfaces.operators import OperatorSet
from hotswap.core.modeling.config_values import positive
from hotswap.core.modeling.layers import Axis, ColumnLinear, RMSNorm, RowLinear
from hotswap.core.modeling.mesh import LOCAL_MESH
from hotswap.core.modeling.rope import RopeConfig, RotaryEmbedding
from hotswap.core.modeling.weights import WeightSource

_SHARED = ("embed_tokens.weight", "lm_head.weight", "t2d")
"""What some checkpoints repeat: the target's own embedding and head, and the inverse of ``d2t``."""


@dataclass(frozen=True)
class HeadConfig:
    """``taps``: what is fused, by the names of ``Model.taps``. ``draft_vocab_size``: None where the target's own head
    gives the logits, which is EAGLE-1."""

    hidden_size: int
    mlp_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    vocab_size: int
    draft_vocab_size: int | None
    norm_before_residual: bool
    taps: tuple[str, ...]
    rope: RopeConfig

    @property
    def third(self) -> bool:
        return self.draft_vocab_size is not None

    @property
    def shape(self) -> GroupShape:
        return GroupShape(self.heads, self.kv_heads, self.head_dim, 0, self.head_dim**-0.5)

    def prefix(self, layer: int) -> str:
        """What the names of a layer's tensors begin with."""
        return "midlayer." if self.third else f"layers.{layer}."

    @classmethod
    def from_hf(cls, config: dict[str, Any], layers: list[int] | None, num_layers: int) -> "HeadConfig":
        """``num_layers``: the target's. ``layers``: those whose outputs are fused, in place of what ``config`` says.
        ConfigError names the key that is missing or wrong."""
        heads, hidden_size = positive(config, "num_attention_heads"), positive(config, "hidden_size")
        head_dim = positive(config, "head_dim", hidden_size // heads)
        third = "draft_vocab_size" in config or str((config.get("architectures") or [""])[0]).endswith("Eagle3")
        vocab_size = positive(config, "vocab_size")
        count = positive(config, "num_hidden_layers", 1)
        if third and count != 1:
            raise ConfigError(f"an EAGLE-3 head has one layer, this one {count}", "num_hidden_layers")
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"activation {config['hidden_act']!r} is not supported, expected 'silu'", "hidden_act")
        return cls(
            hidden_size=hidden_size, mlp_size=positive(config, "intermediate_size"), num_layers=count, heads=heads,
            kv_heads=positive(config, "num_key_value_heads", heads), head_dim=head_dim,
            norm_eps=float(config.get("rms_norm_eps", 1e-6)), vocab_size=vocab_size,
            draft_vocab_size=positive(config, "draft_vocab_size", vocab_size) if third else None,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            taps=fused_taps(config, layers, num_layers) if third else ("final",),
            rope=RopeConfig.from_hf(config, head_dim, positive(config, "max_position_embeddings", 2048)))


def fused_taps(config: dict[str, Any], layers: list[int] | None, num_layers: int) -> tuple[str, ...]:
    """The three hidden states that an EAGLE-3 head fuses.

    Checkpoints count them in two ways: ``eagle_config.eagle_aux_hidden_state_layer_ids`` are the layers whose outputs
    are taken, ``eagle_aux_hidden_state_layer_ids`` at the top the states between layers, 0 being the embedding. Where
    neither is there it is what goes into layers 2, L // 2 and L - 3, as in the paper's code.
    """
    between = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        layers = [state - 1 for state in between or (2, num_layers // 2, num_layers - 3)]
    if len(layers) != 3 or not all(-1 <= layer < num_layers for layer in layers):
        raise ConfigError(
            f"the head fuses the outputs of the layers {layers}, expected three from -1 (the embedding) to "
            f"{num_layers - 1}, of the target's {num_layers}; set speculator.layers to those it was trained with",
            "speculator.layers")
    return tuple("embedding" if layer < 0 else f"layer:{layer}" for layer in layers)


class EagleHead:
    """One hidden state for each pair of a target's state and the token behind it: the guess of the target's next
    state (EAGLE-1), or of something that an own head reads (EAGLE-3)."""

    def __init__(
        self, c: HeadConfig, first_layer: int, weights: WeightSource, dtype: torch.dtype, device: str,
        operators: OperatorSet,
    ) -> None:
        """``weights`` are not read, but asked which of the layers have a bias: configs do not say."""
        self.config, self.device = c, device
        width = len(c.taps) if c.third else 2
        hidden = Axis("hidden", c.hidden_size)
        self.fc = ColumnLinear(
            LOCAL_MESH, width * c.hidden_size, [("fc", hidden)], weights.has("fc.bias"), dtype, device)
        self.layers = [
            EagleLayer(first_layer + i, c, c.prefix(i), weights, c.third or i > 0, dtype, device, operators)
            for i in range(c.num_layers)]
        self.rope = RotaryEmbedding(c.rope, dtype, device)
        if c.draft_vocab_size is not None:
            self.norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators)
            self.lm_head = torch.empty(c.draft_vocab_size, c.hidden_size, dtype=dtype, device=device)
            self.target_ids = torch.arange(c.draft_vocab_size, device=device)

    def load(self, weights: WeightSource) -> None:
        c = self.config
        self.fc.load(weights, "")
        for layer in self.layers:
            layer.load(weights)
        if c.draft_vocab_size is not None:
            self.norm.load(weights, "norm")
            self.lm_head.copy_(weights.take("lm_head.weight", self.lm_head.shape))
            if weights.has("d2t"):
                self.target_ids += weights.take_integers("d2t", (c.draft_vocab_size,)).to(self.device)
            elif c.draft_vocab_size != c.vocab_size:
                raise ConfigError(
                    f"{weights.location} drafts {c.draft_vocab_size} of {c.vocab_size} tokens, and has no d2t to say "
                    "which", "speculator.model")
        weights.skip(lambda name: name in _SHARED)
        weights.finish()
        if c.third and not 0 <= int(self.target_ids.min()) <= int(self.target_ids.max()) < c.vocab_size:
            raise ConfigError(
                f"d2t of {weights.location} leads to tokens from {int(self.target_ids.min())} to "
                f"{int(self.target_ids.max())}, the vocabulary has {c.vocab_size}", "speculator.model")

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        """The target's states [T, taps * h] -> [T, h], what a pass of this head gives by itself."""
        return self.fc(states) if self.config.third else states

    def __call__(
        self, states: torch.Tensor, embedded: torch.Tensor, positions: torch.Tensor, attend: Attend,
    ) -> torch.Tensor:
        """states [T, h] at ``positions``, embedded [T, h] the tokens behind them -> [T, h]."""
        cos, sin = self.rope(positions)
        x = states if self.config.third else self.fc(torch.cat([embedded, states], -1))
        for layer in self.layers:
            x = layer(x, embedded, cos, sin, attend)
        return x

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """EAGLE-3: rows [N, h] -> [N, V] float32, minus infinity for what is not in the draft vocabulary."""
        known = functional.linear(self.norm(rows), self.lm_head).float()
        return known.new_full((len(rows), self.config.vocab_size), -torch.inf).index_copy_(1, self.target_ids, known)


class EagleLayer:
    """A decoder layer. EAGLE-1's first has no norm before attention; EAGLE-3's attends to the token beside the state,
    both normed, and hence is twice as wide at its entrance."""

    def __init__(
        self, index: int, c: HeadConfig, prefix: str, weights: WeightSource, normed: bool, dtype: torch.dtype,
        device: str, operators: OperatorSet,
    ) -> None:
        self.index, self.config, self.prefix, self.operators = index, c, prefix, operators
        qkv_bias, out_bias = (weights.has(f"{prefix}self_attn.{name}_proj.bias") for name in "qo")
        heads, kv_heads = Axis("heads", c.heads, c.head_dim), Axis("kv_heads", c.kv_heads, c.head_dim)
        mlp, width = Axis("mlp", c.mlp_size), c.hidden_size * (2 if c.third else 1)
        self.qkv = ColumnLinear(
            LOCAL_MESH, width, [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)],
            qkv_bias, dtype, device)
        self.out = RowLinear(LOCAL_MESH, heads, c.hidden_size, out_bias, dtype, device)
        self.gate_up = ColumnLinear(
            LOCAL_MESH, c.hidden_size, [("gate_proj", mlp), ("up_proj", mlp)], False, dtype, device)
        self.down = RowLinear(LOCAL_MESH, mlp, c.hidden_size, False, dtype, device)
        self.input_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators) if normed else None
        self.hidden_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators) if c.third else None
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators)

    def load(self, weights: WeightSource) -> None:
        prefix = self.prefix
        self.qkv.load(weights, f"{prefix}self_attn.")
        self.out.load(weights, f"{prefix}self_attn.o_proj")
        self.gate_up.load(weights, f"{prefix}mlp.")
        self.down.load(weights, f"{prefix}mlp.down_proj")
        if self.input_norm:
            self.input_norm.load(weights, f"{prefix}input_layernorm")
        if self.hidden_norm:
            self.hidden_norm.load(weights, f"{prefix}hidden_norm")
        self.mlp_norm.load(weights, f"{prefix}post_attention_layernorm")

    def __call__(
        self, x: torch.Tensor, embedded: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend,
    ) -> torch.Tensor:
        entering = x
        if self.hidden_norm and self.input_norm:
            normed = self.hidden_norm(x)
            entering = torch.cat([self.input_norm(embedded), normed], -1)
            x = normed if self.config.norm_before_residual else x
        elif self.input_norm:
            entering = self.input_norm(x)
        attended = self._attention(entering, cos, sin, attend)
        normed, x = self.mlp_norm.add(attended, x), attended
        return x + self.down(self.operators.silu_mul(self.gate_up(normed)))

    def _attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        c = self.config
        qkv = self.qkv(x).view(len(x), -1, c.head_dim)  # [T, H + 2K, D]
        qk, v = qkv.split_with_sizes((c.heads + c.kv_heads, c.kv_heads), 1)
        self.operators.rotate(qk, cos, sin)
        q, k = qk.split_with_sizes((c.heads, c.kv_heads), 1)
        return self.out(attend(self.index, q, k, v).reshape(len(x), -1))
