"""The MLP of a decoder's layer: one gated unit, or a router and experts. Legend of shapes: T tokens, E experts of this
rank, k experts a token, I an expert's inner size on this rank."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from hotswap.core.interfaces.operators import OperatorSet
from hotswap.core.modeling.layers import Axis, ColumnLinear, RowLinear
from hotswap.core.modeling.mesh import Mesh, Routed
from hotswap.core.modeling.weights import WeightSource
from hotswap.plugins.models.decoder_config import DecoderConfig, ExpertsConfig
from hotswap.plugins.models.experts import Experts


class MLP(Protocol):
    """x [T, hidden] -> [T, hidden], complete on every rank, and a tensor that nobody else has."""

    def load(self, weights: WeightSource, layer: str) -> None:
        """``layer``: the layer's prefix, "model.layers.0."."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class GatedMLP:
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x))."""

    def __init__(
        self, c: DecoderConfig, mesh: Mesh, dtype: torch.dtype, device: str, operators: OperatorSet,
    ) -> None:
        self.operators = operators
        inner = Axis("mlp", c.mlp_size)
        self.gate_up = ColumnLinear(
            mesh, c.hidden_size, [("gate_proj", inner), ("up_proj", inner)], c.mlp_bias, dtype, device)
        self.down = RowLinear(mesh, inner, c.hidden_size, c.mlp_bias, dtype, device)

    def load(self, weights: WeightSource, layer: str) -> None:
        self.gate_up.load(weights, f"{layer}mlp.")
        self.down.load(weights, f"{layer}mlp.down_proj")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.operators.silu_mul(self.gate_up(x)))


class MixtureOfExperts:
    """A token goes to the k experts that its router scores best; their outputs are added, weighted by the scores.

    After the sparsely-gated layer (Shazeer et al., 2017) as Mixtral (Jiang et al., 2024) and Qwen3 (Yang et al., 2025)
    have it: softmax over all experts in float32, no capacity limit, no token dropped.
    """

    def __init__(
        self, c: ExpertsConfig, hidden_size: int, mesh: Mesh, dtype: torch.dtype, device: str, operators: OperatorSet,
    ) -> None:
        self.config, self.mesh = c, mesh
        self.router = torch.empty(c.count, hidden_size, dtype=torch.float32, device=device)
        self.experts = Experts(c, hidden_size, mesh, dtype, device, operators)

    def load(self, weights: WeightSource, layer: str) -> None:
        # transformers may write its own layout, too, where every family's block is called the same.
        fused = weights.has(f"{layer}mlp.experts.gate_up_proj")
        block = f"{layer}mlp." if fused else f"{layer}{self.config.family.block}."
        self.router.copy_(weights.take(f"{block}gate.weight", self.router.shape))
        (self.experts.load_fused if fused else self.experts.load)(weights, f"{block}experts.")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        scores, experts = functional.linear(x.float(), self.router).softmax(-1).topk(self.config.top_k)
        if self.config.normalised:
            scores = scores / scores.sum(-1, keepdim=True)
        routed = self.mesh.dispatch("expert", Routed(x, experts, scores), self.config.count)
        y = self.mesh.reduce("expert_mlp", self.experts(routed.x, routed.experts, routed.weights))
        return self.mesh.combine("expert", y, routed)


def of_other_ranks(c: ExpertsConfig, mesh: Mesh) -> Callable[[str], bool]:
    """Whether a tensor of a checkpoint is that of an expert which another rank holds."""
    part = mesh.shard("expert", c.count)

    def elsewhere(name: str) -> bool:
        index = name.partition(".experts.")[2].partition(".")[0]
        return index.isdigit() and int(index) < c.count and not part.start <= int(index) < part.stop

    return elsewhere
