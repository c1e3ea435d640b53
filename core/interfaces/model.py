"""The model: layers of one family, written with logical axes, on any mesh. ``model/1``.

An entry point of ``hotswap.model`` is named after the architecture in the checkpoint's config ("LlamaForCausalLM"), so
that the right class is found without importing any other.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CacheSpec

if TYPE_CHECKING:
    import torch

    from hotswap.core.modeling.mesh import Mesh
    from hotswap.core.modeling.weights import WeightSource


@dataclass(frozen=True)
class ModelFacts:
    """``axes``: the sizes of the logical axes that the model has ("heads", "kv_heads", "mlp", "vocab", "expert",
    "expert_mlp", "layers" …): what strategies shard. ``expert_mlp`` is the inner axis of one expert.

    ``vocab_size`` is the width of the logits; every token id of a request is checked against it. ``concurrent``:
    whether several threads may call ``forward`` and ``head`` of one model at once, because nothing but weights is kept
    between calls; engines that run in one process then share the model, and its weights are loaded once.

    ``layer_costs`` and ``head_cost``: weights that a token is multiplied with in each layer and in the output head, by
    which stages of a pipeline are balanced. Empty: all layers are alike. ``mlp_width``: values a token that the widest
    MLP holds at a time, for the estimate of a step's memory; 0: not said.

    ``capturable``: dtypes in which ``forward`` may be captured in a graph: the operations and shapes of a step
    depend on the number of its tokens alone, nothing is read back to the host, and nothing that it computes outlives
    the step (``statistics`` aside).

    ``attention``: what an attention backend must do, as :meth:`Model.attention_shapes` would say it of all ranks
    together, with pages of size 0; by it ``attention: auto`` chooses. Empty: not said.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position: int
    axes: dict[str, int] = field(default_factory=dict)
    concurrent: bool = False
    layer_costs: tuple[int, ...] = ()
    head_cost: int = 0
    mlp_width: int = 0
    capturable: tuple[str, ...] = ()
    attention: tuple[GroupShape, ...] = ()


class Attend(Protocol):
    """Given to ``forward`` by the runner: q [T, H, D], k and v [T, K, D] of one layer -> [T, H, D]."""

    def __call__(self, layer: int, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor") -> "torch.Tensor": ...


class Model(Component):
    """Built with its checkpoint's config, loaded once, then run every step.

    ``forward`` takes token ids on the first stage and hidden states on later ones; it calls ``attend`` once per layer
    of its stage, and ``mesh.reduce(axis, x)`` where a contraction over a sharded axis ends.
    """

    kind: ClassVar[str] = "model"
    contract: ClassVar[str] = "model/1"

    @classmethod
    @abstractmethod
    def facts(cls, config: dict[str, Any]) -> ModelFacts:
        """From the checkpoint's config alone, before any weight is read. ConfigError for what it does not support."""

    @classmethod
    def linear_layers(cls, config: dict[str, Any], matrices: Sequence[str]) -> Sequence[str]:
        """Which of the checkpoint's ``matrices``, by their names without ``.weight``, are given to a quantization, and
        by what names, without reading any. Asked where options name layers."""
        return matrices

    @abstractmethod
    def build(self, config: dict[str, Any], mesh: "Mesh", dtype: "torch.dtype", device: str) -> None:
        """Prepare for a checkpoint with this config."""

    @abstractmethod
    def cache_specs(self) -> list[CacheSpec]:
        """The cache groups of this rank's layers."""

    @abstractmethod
    def attention_shapes(self, page_sizes: dict[str, int]) -> dict[str, GroupShape]:
        """What an attention backend must do, per cache group, on this rank; page sizes as planned (0 before)."""

    def taps(self) -> Sequence[str]:
        """Names of the hidden states [T, hidden] that ``forward`` can give to a speculator: "layer:i", the output of
        layer i, "embedding", the input of the first, and "final", the last layer's behind the final norm. A model that
        lists any also shares its vocabulary by :meth:`embed` and :meth:`unembed`."""
        return ()

    def embed(self, ids: "torch.Tensor") -> "torch.Tensor":
        """ids [T] -> [T, hidden], as ``forward`` begins."""
        raise NotImplementedError(f"{self.label} does not share its embedding")

    def unembed(self, rows: "torch.Tensor") -> "torch.Tensor":
        """rows [N, hidden] -> logits [N, V], float32, without the final norm."""
        raise NotImplementedError(f"{self.label} does not share its head")

    @abstractmethod
    def load(self, weights: "WeightSource") -> None:
        """Take every tensor of this rank. ModelLoadError names what is missing, unexpected or misshaped."""

    @abstractmethod
    def forward(
        self, inputs: "torch.Tensor", positions: "torch.Tensor", attend: Attend,
        taps: "dict[str, torch.Tensor | None] | None" = None,
    ) -> "torch.Tensor":
        """inputs [T] token ids or [T, hidden]; positions [T] -> [T, hidden], before the final norm.

        ``taps``: hidden states to give besides, by name; each is put there. Only asked for what ``taps()`` lists."""

    def forward_some(
        self, inputs: "torch.Tensor", positions: "torch.Tensor", attend: Attend, wanted: "torch.Tensor",
    ) -> "torch.Tensor":
        """As :meth:`forward`, of the tokens ``wanted`` [N] alone, at least one: [N, hidden]. A model may leave out what
        becomes of the others behind its last attention."""
        return self.forward(inputs, positions, attend)[wanted]

    @abstractmethod
    def head(self, rows: "torch.Tensor") -> "torch.Tensor":
        """rows [N, hidden] -> logits [N, V], float32 or of the model's dtype, in a tensor that may be changed."""

    def statistics(self) -> "Mapping[str, torch.Tensor]":
        """Counters that the model keeps on its device, by name, such as the tokens each expert has worked on. They grow
        from the start on; reading one waits for the device."""
        return {}
