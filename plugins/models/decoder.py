"""Decoder-only transformers with rotary positions and gated MLPs or experts: Llama, SmolLM2, Mistral, Mixtral, Qwen2,
Qwen3.

Legend of shapes: T tokens of the step, H query heads, K key-value heads, D head size, V vocabulary, N rows that need
logits; H and K are those of this rank.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch

from hotswap.core.errors import ModelLoadError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef, Description, Part
from hotswap.core.interfaces.kvcache import CacheSpec
from hotswap.core.interfaces.model import Attend, Model, ModelFacts
from hotswap.core.interfaces.operators import OperatorSet
from hotswap.core.interfaces.quantization import PACKED_WEIGHTS
from hotswap.core.modeling.layers import Axis, ColumnLinear, RMSNorm, RowLinear, VocabEmbedding, VocabHead
from hotswap.core.modeling.mesh import Mesh
from hotswap.core.modeling.operators import TORCH_OPERATORS
from hotswap.core.modeling.rope import RotaryEmbedding
from hotswap.core.modeling.weights import WeightSource
from hotswap.plugins.models.decoder_config import DecoderConfig
from hotswap.plugins.models.mlp import MLP, GatedMLP, MixtureOfExperts, of_other_ranks

FULL, WINDOW = "full", "window"
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


class DecoderOptions(ComponentOptions):
    operators: Annotated[ComponentRef, Part("operators")] = ComponentRef(use="auto")
    """Who computes norms, rotary embedding and gates."""


class DecoderModel(Model):
    """For checkpoints of the Llama, Mistral, Mixtral, Qwen2 and Qwen3 families (Touvron et al., 2023; Jiang et al.,
    2023 and 2024; Yang et al., 2024 and 2025), with full or sliding-window attention."""

    Options = DecoderOptions
    config: DecoderConfig

    @classmethod
    def facts(cls, config: dict[str, Any]) -> ModelFacts:
        c = DecoderConfig.from_hf(config)
        axes = {"heads": c.heads, "kv_heads": c.kv_heads, "vocab": c.vocab_size, "layers": c.num_layers}
        sparse = len(c.experts.layers) if c.experts else 0
        if sparse < c.num_layers:
            axes["mlp"] = c.mlp_size
        if c.experts and sparse:
            axes |= {"expert": c.experts.count, "expert_mlp": c.experts.size}
        shapes = (c.shape(c.heads, c.kv_heads, window) for window in dict.fromkeys(c.windows))
        return ModelFacts(
            c.architecture, c.num_layers, c.hidden_size, c.vocab_size, c.rope.context, axes,
            concurrent=not sparse,  # experts count their tokens
            layer_costs=c.layer_costs, head_cost=c.vocab_size * c.hidden_size, mlp_width=c.mlp_width,
            capturable=c.capturable, attention=tuple(shapes))

    @classmethod
    def linear_layers(cls, config: dict[str, Any], matrices: Sequence[str]) -> Sequence[str]:
        """Embedding, routers and experts are none of them; a head that is tied has no tensor, but a name."""
        return [*(name for name in matrices if name.endswith("_proj") and ".experts." not in name), HEAD]

    def describe(self) -> Description:
        return Description(offers=frozenset({PACKED_WEIGHTS}))

    def build(self, config: dict[str, Any], mesh: Mesh, dtype: torch.dtype, device: str) -> None:
        self.config = c = DecoderConfig.from_hf(config)
        self.mesh = mesh
        self.dtype = dtype
        operators = self.parts["operators"].bind(device, dtype) if self.parts else TORCH_OPERATORS
        stage = mesh.shard("layers", c.num_layers)
        self.is_first, self.is_last = stage.start == 0, stage.stop == c.num_layers
        self.layers = [DecoderLayer(i, c, mesh, dtype, device, operators) for i in range(stage.start, stage.stop)]
        self.rope = RotaryEmbedding(c.rope, dtype, device)
        if self.is_first:
            self.embedding = VocabEmbedding(mesh, c.vocab_size, c.hidden_size, dtype, device)
        if self.is_last:
            tied = self.embedding if c.tied and self.is_first else None
            self.norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators)
            self.lm_head = VocabHead(mesh, c.vocab_size, c.hidden_size, dtype, device, tied)

    def cache_specs(self) -> list[CacheSpec]:
        """``bytes_per_token`` is that of all layers of the group."""
        c = self.config
        kv_heads = self.mesh.shard("kv_heads", c.kv_heads).count
        specs = []
        for group in (FULL, WINDOW):
            layers = tuple(layer.index for layer in self.layers if layer.group == group)
            if layers:
                num_bytes = 2 * len(layers) * kv_heads * c.head_dim * self.dtype.itemsize
                specs.append(CacheSpec(group, layers, kv_heads, c.head_dim, num_bytes, group, c.windows[layers[0]]))
        return specs

    def attention_shapes(self, page_sizes: dict[str, int]) -> dict[str, GroupShape]:
        heads = self.mesh.shard("heads", self.config.heads).count
        return {
            spec.group: self.config.shape(heads, spec.kv_heads, spec.window, page_sizes.get(spec.group, 0))
            for spec in self.cache_specs()
        }

    def load(self, weights: WeightSource) -> None:
        if self.is_first:
            self.embedding.load(weights, EMBEDDING)
        for layer in self.layers:
            layer.load(weights)
        if self.is_last:
            self.norm.load(weights, FINAL_NORM)
            self._load_head(weights)
        weights.skip(self._is_elsewhere)
        if self.config.experts:
            weights.skip(of_other_ranks(self.config.experts, self.mesh))
        weights.finish()

    def _load_head(self, weights: WeightSource) -> None:
        self.lm_head.load(weights, HEAD, EMBEDDING if self.config.tied else None)
        table, head = f"{EMBEDDING}.weight", f"{HEAD}.weight"
        # Some exporters write the shared matrix twice; a second one that differs means that the config is wrong.
        if self.config.tied and weights.has(head) and not weights.same(head, table, self.dtype):
            raise ModelLoadError(
                f"{weights.location} has an {head} that differs from {table} although its config ties them: set "
                "tie_word_embeddings to false in config.json if the head is right"
            )

    def _is_elsewhere(self, name: str) -> bool:
        """Whether another stage of the pipeline holds the tensor."""
        stage = self.mesh.shard("layers", self.config.num_layers)
        if name.startswith("model.layers."):
            index = name.split(".")[2]
            return index.isdigit() and int(index) < self.config.num_layers and not (
                stage.start <= int(index) < stage.stop)
        on_first, on_last = name == f"{EMBEDDING}.weight", name in (f"{FINAL_NORM}.weight", f"{HEAD}.weight")
        return (on_first and not self.is_first) or (on_last and not self.is_last)

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend,
        taps: dict[str, torch.Tensor | None] | None = None,
    ) -> torch.Tensor:
        return self._forward(inputs, positions, attend, {} if taps is None else taps, None)

    def forward_some(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor,
    ) -> torch.Tensor:
        return self._forward(inputs, positions, attend, {}, wanted)

    def _forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, attend: Attend, taps: dict[str, torch.Tensor | None],
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        x = self.embedding(inputs) if self.is_first else inputs
        if "embedding" in taps:
            taps["embedding"] = x
        cos, sin = self.rope(positions)
        delta: torch.Tensor | None = None
        for layer in self.layers:
            x, delta = layer(x, delta, cos, sin, attend, wanted if layer is self.layers[-1] else None)
            if taps and (name := f"layer:{layer.index}") in taps:
                taps[name] = x + delta
        x = x if delta is None else x + delta
        if "final" in taps:
            taps["final"] = self.norm(x)
        return x

    def taps(self) -> list[str]:
        """Of a stage: its own layers' only."""
        layers = [f"layer:{layer.index}" for layer in self.layers]
        return [*(["embedding"] if self.is_first else []), *layers, *(["final"] if self.is_last else [])]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids)

    def unembed(self, rows: torch.Tensor) -> torch.Tensor:
        return self.lm_head(rows).float()

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(rows))

    def statistics(self) -> Mapping[str, torch.Tensor]:
        """``expert_load.L`` [E] int64: tokens that each of this rank's experts of layer L worked on, padding too."""
        return {
            f"expert_load.{layer.index}": layer.mlp.experts.load_counts
            for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)
        }


class DecoderLayer:
    """x [T, hidden] -> x + attention(norm(x)), then x + mlp(norm(x)), where ``mlp`` is what the config says.

    The last addition is left to the next layer, whose norm is one operator with it.
    """

    def __init__(
        self, index: int, c: DecoderConfig, mesh: Mesh, dtype: torch.dtype, device: str, operators: OperatorSet,
    ) -> None:
        self.index, self.operators = index, operators
        self.group = FULL if c.windows[index] is None else WINDOW
        self.head_dim = c.head_dim
        heads, kv_heads = Axis("heads", c.heads, c.head_dim), Axis("kv_heads", c.kv_heads, c.head_dim)
        self.heads, self.kv_heads = (axis.part(mesh).count // c.head_dim for axis in (heads, kv_heads))
        self.qkv = ColumnLinear(
            mesh, c.hidden_size, [("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)],
            c.qkv_bias, dtype, device)
        self.out = RowLinear(mesh, heads, c.hidden_size, c.out_bias, dtype, device)
        self.mlp: MLP = (
            MixtureOfExperts(c.experts, c.hidden_size, mesh, dtype, device, operators)
            if c.experts and index in c.experts.layers else GatedMLP(c, mesh, dtype, device, operators))
        self.attention_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators)
        self.mlp_norm = RMSNorm(c.hidden_size, c.norm_eps, dtype, device, operators)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, dtype, device, operators) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, dtype, device, operators) if c.qk_norm else None

    def load(self, weights: WeightSource) -> None:
        prefix = f"model.layers.{self.index}."
        self.attention_norm.load(weights, f"{prefix}input_layernorm")
        self.qkv.load(weights, f"{prefix}self_attn.")
        if self.q_norm and self.k_norm:
            self.q_norm.load(weights, f"{prefix}self_attn.q_norm")
            self.k_norm.load(weights, f"{prefix}self_attn.k_norm")
        self.out.load(weights, f"{prefix}self_attn.o_proj")
        self.mlp_norm.load(weights, f"{prefix}post_attention_layernorm")
        self.mlp.load(weights, prefix)

    def __call__(
        self, x: torch.Tensor, delta: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``delta``: what is still to be added to ``x``, and may be written to; None: nothing. Returns both anew.
        ``wanted``: of these tokens alone."""
        if delta is None:
            normed = self.attention_norm(x)
        else:
            normed, x = self.attention_norm.add(delta, x), delta
        y = self._attention(normed, cos, sin, attend)
        if wanted is not None:
            x, y = x[wanted], y[wanted]
        delta = self.out(y)
        normed, x = self.mlp_norm.add(delta, x), delta
        return x, self.mlp(normed)

    def _attention(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)  # [T, H + 2K, D]
        qk, v = qkv.split_with_sizes((self.heads + self.kv_heads, self.kv_heads), 1)
        if self.q_norm and self.k_norm:
            q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        self.operators.rotate(qk, cos, sin)
        q, k = qk.split_with_sizes((self.heads, self.kv_heads), 1)
        return attend(self.index, q, k, v).reshape(x.shape[0], -1)
