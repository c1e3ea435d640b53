"""What a decoder-only checkpoint's config promises, with the differences between the families in one table."""

from dataclasses import dataclass
from typing import Any

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.modeling.config_values import positive
from hotswap.core.modeling.rope import RopeConfig


@dataclass(frozen=True)
class ExpertsFamily:
    """How an architecture names and sizes its experts."""

    block: str
    """The module in published checkpoints that holds the router and the experts."""
    projections: tuple[str, str, str]
    """gate, up, down of one expert."""
    size_key: str
    """The config key of an expert's inner size."""
    default_count: int
    default_top_k: int
    normalised: bool | None = None
    """Whether the chosen experts' weights are scaled to a sum of 1; None: as ``norm_topk_prob`` says (default: no)."""
    some_layers: bool = False
    """Whether ``decoder_sparse_step`` and ``mlp_only_layers`` leave some layers without experts."""


@dataclass(frozen=True)
class Family:
    """How an architecture departs from Llama's. The defaults hold where a config leaves the key out, and are those of
    the published implementation."""

    qkv_bias: bool | None = None
    """None: as ``attention_bias`` says, which then covers the output projection too."""
    mlp_bias: bool = False
    """Whether ``mlp_bias`` is read."""
    qk_norm: bool = False
    windows: str = "none"
    """"none", "all" (``sliding_window`` holds for every layer), or, if ``use_sliding_window``, "asked" (for every
    layer) and "some" (for those that ``layer_types`` or ``max_window_layers`` say)."""
    default_window: int | None = 4096
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    default_max_position: int = 2048
    experts: ExpertsFamily | None = None


FAMILIES = {
    "LlamaForCausalLM": Family(mlp_bias=True),
    "MistralForCausalLM": Family(qkv_bias=False, windows="all", default_kv_heads=8, default_max_position=131072),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows="some", default_kv_heads=32, default_max_position=32768),
    "Qwen3ForCausalLM": Family(
        qk_norm=True, windows="some", default_kv_heads=32, default_head_dim=128, default_max_position=32768),
    "MixtralForCausalLM": Family(
        qkv_bias=False, windows="all", default_window=None, default_kv_heads=8, default_max_position=131072,
        experts=ExpertsFamily(
            "block_sparse_moe", ("w1", "w3", "w2"), "intermediate_size", default_count=8, default_top_k=2,
            normalised=True)),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, windows="asked", default_kv_heads=4, default_max_position=32768,
        experts=ExpertsFamily(
            "mlp", ("gate_proj", "up_proj", "down_proj"), "moe_intermediate_size", default_count=128, default_top_k=8,
            some_layers=True)),
}

ALIGNED = 8
"""torch's grouped multiplication takes bfloat16 rows of a multiple of so many values."""
_REFUSED = ("quantization_config",)


@dataclass(frozen=True)
class ExpertsConfig:
    """``count`` experts of inner size ``size`` in each of ``layers``, ``top_k`` of which work on a token."""

    family: ExpertsFamily
    count: int
    top_k: int
    size: int
    normalised: bool
    layers: frozenset[int]

    @classmethod
    def from_hf(cls, config: dict[str, Any], family: ExpertsFamily, num_layers: int) -> "ExpertsConfig":
        stated = {config[key] for key in ("num_local_experts", "num_experts") if config.get(key) is not None}
        if len(stated) > 1:
            raise ConfigError(f"num_local_experts and num_experts differ: {sorted(stated)}", "num_experts")
        count = positive({"num_experts": next(iter(stated), family.default_count)}, "num_experts")
        top_k = positive(config, "num_experts_per_tok", family.default_top_k)
        if top_k > count:
            raise ConfigError(f"{top_k} experts a token were asked of {count}", "num_experts_per_tok")
        normalised = family.normalised if family.normalised is not None else bool(config.get("norm_topk_prob", False))
        layers = list(range(num_layers))
        if family.some_layers:
            step, dense = positive(config, "decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
            layers = [i for i in layers if (i + 1) % step == 0 and i not in dense]
        return cls(family, count, top_k, positive(config, family.size_key), normalised, frozenset(layers))


@dataclass(frozen=True)
class DecoderConfig:
    """``windows[i]``: the tokens that a query of layer i sees, itself included; None for all. ``experts``: None where
    every layer has one gated MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    experts: ExpertsConfig | None = None

    def shape(self, heads: int, kv_heads: int, window: int | None, page_size: int = 0) -> GroupShape:
        """Of the layers with this window, of which a rank has so many heads."""
        return GroupShape(heads, kv_heads, self.head_dim, page_size, self.head_dim**-0.5, window)

    @property
    def layer_costs(self) -> tuple[int, ...]:
        """Weights that a token is multiplied with in each layer: of the experts, those that work on it."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        dense, sparse = 3 * self.hidden_size * self.mlp_size, 0
        if self.experts is not None:
            sparse = self.hidden_size * (3 * self.experts.top_k * self.experts.size + self.experts.count)
        layers = self.experts.layers if self.experts is not None else ()
        return tuple(attention + (sparse if layer in layers else dense) for layer in range(self.num_layers))

    @property
    def capturable(self) -> tuple[str, ...]:
        """Experts read the tokens of each back to the host, unless their sizes and dtype suit a grouped kernel."""
        if self.experts is None or not self.experts.layers:
            return ("float32", "bfloat16", "float16")
        return () if self.hidden_size % ALIGNED or self.experts.size % ALIGNED else ("bfloat16",)

    @property
    def mlp_width(self) -> int:
        """Values a token that the widest MLP holds at a time: gate, up and their product; with experts those of each
        that works on it, and its row as it goes in and comes out, sorted and not."""
        e = self.experts
        sparse = 3 * e.top_k * (e.size + self.hidden_size) if e is not None and e.layers else 0
        dense = 3 * self.mlp_size if e is None or len(e.layers) < self.num_layers else 0
        return max(sparse, dense)

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> "DecoderConfig":
        """ConfigError names the key of what is missing, contradictory or not supported."""
        name = (config.get("architectures") or [None])[0]
        if name not in FAMILIES:
            raise ConfigError(f"architecture {name!r} is not a known decoder, expected one of {sorted(FAMILIES)}",
                              "architectures")
        family = FAMILIES[name]
        for key in _REFUSED:
            if config.get(key):
                raise ConfigError(f"{name} with {key}={config[key]!r} is not supported", key)
        if config.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"activation {config['hidden_act']!r} is not supported, expected 'silu'", "hidden_act")
        heads, hidden_size = positive(config, "num_attention_heads"), positive(config, "hidden_size")
        head_dim = positive(config, "head_dim", family.default_head_dim or hidden_size // heads)
        kv_heads = positive(config, "num_key_value_heads", family.default_kv_heads or heads)
        if heads % kv_heads:
            raise ConfigError(
                f"{heads} query heads cannot share {kv_heads} key-value heads evenly", "num_key_value_heads")
        if head_dim % 2:
            raise ConfigError(f"head size {head_dim} is odd, rotary embedding needs an even one", "head_dim")
        max_position = positive(config, "max_position_embeddings", family.default_max_position)
        rope = RopeConfig.from_hf(config, head_dim, max_position)
        num_layers = positive(config, "num_hidden_layers")
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=name, vocab_size=positive(config, "vocab_size"), hidden_size=hidden_size,
            mlp_size=positive(config, "intermediate_size"), num_layers=num_layers, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            out_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=family.mlp_bias and bool(config.get("mlp_bias", False)), qk_norm=family.qk_norm,
            tied=bool(config.get("tie_word_embeddings", False)), rope=rope,
            windows=_windows(config, family, num_layers, rope.context),
            experts=ExpertsConfig.from_hf(config, family.experts, num_layers) if family.experts else None,
        )


def _windows(config: dict[str, Any], family: Family, num_layers: int, context: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", family.default_window)
    if family.windows == "none" or window is None:
        return (None,) * num_layers
    window = positive(config, "sliding_window", window)
    if window >= context:  # it never hides anything
        return (None,) * num_layers
    if family.windows == "all":
        return (window,) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    if family.windows == "asked":
        return (window,) * num_layers
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    if len(kinds) != num_layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries of {sorted(set(kinds))}, expected {num_layers} of "
            "'full_attention' or 'sliding_attention'", "layer_types",
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
