"""The attention backend: writes new keys and values into the pages, then attends. ``attention/1``."""

from abc import abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from hotswap.core.interfaces.component import Component, Exchange
from hotswap.core.interfaces.graphs import GraphDevice
from hotswap.core.interfaces.layout import BatchLayout

if TYPE_CHECKING:
    import torch


class GraphLevel(IntEnum):
    """Which steps may be captured in a graph: none, one token a row, a uniform query length, or any."""

    NEVER = 0
    ONE_TOKEN = 1
    UNIFORM = 2
    ANY = 3


PageLayout = tuple[str, ...]
"""What the dimensions of a group's keys, and of its values, count; "page" comes first."""

NHD: PageLayout = ("page", "token", "kv_heads", "head_dim")
HND: PageLayout = ("page", "kv_heads", "token", "head_dim")
"""A head's part of a page in one piece."""


@dataclass(frozen=True)
class AttentionSupport:
    """What the backend can do; None stands for any. Asked at start, so that no request meets an unsupported shape.

    ``layouts``: those that another backend may share pages in, the preferred first; empty where its pages are its own.
    ``needs_clean_pages``: it reads a row's last page to its end, masked, and so needs numbers there and no NaN, whoever
    has begun the page. ``leaves_clean_pages``: it clears the pages that it begins; what needs such pages must.
    ``rounding``: how much a request's result may depend on its neighbours in the batch (relative, float32).
    ``note``: what the backend chose by itself, and why; printed at start.
    """

    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    layouts: tuple[PageLayout, ...] = ()
    needs_clean_pages: bool = False
    leaves_clean_pages: bool = False
    windows: bool = True
    softcap: bool = True
    graph_level: GraphLevel = GraphLevel.NEVER
    rounding: float = 1e-6
    note: str = ""


@dataclass(frozen=True)
class GroupShape:
    """One cache group as its layers see it. ``scale`` multiplies q·k; ``softcap`` squashes the scores where set.
    ``layout``: how its pages must lie, one of the backend's own; None leaves it to the backend."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    layout: PageLayout | None = None


@dataclass(frozen=True)
class BatchLimits:
    """Greatest sizes of a step, for fixed-address buffers."""

    max_tokens: int
    max_rows: int
    max_pages_per_row: int
    device: str
    dtype: str


class AttentionBackend(Component):
    """Four verbs. Sizes only: never the runner, never the config. Legend of shapes: ``core/interfaces/layout.py``."""

    kind: ClassVar[str] = "attention"
    contract: ClassVar[str] = "attention/1"
    exchangeable: ClassVar[Exchange] = Exchange.WORKERS

    @abstractmethod
    def support(self) -> AttentionSupport: ...

    @abstractmethod
    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> "tuple[torch.Tensor, torch.Tensor]":
        """One layer's (keys, values), in the layout that this backend reads; the first dimension counts pages."""

    def page_axes(self) -> PageLayout:
        """What the dimensions of ``allocate``'s tensors count, "page" first: how a peer with another layout or tensor
        size finds its part. A dimension of several things has a name of its own, which no other layout shares."""
        layouts = self.support().layouts
        return layouts[0] if layouts else NHD

    def graph_device(self, device: str) -> GraphDevice | None:
        """What records steps with this backend on ``device`` ("cpu", "cuda:1"); None: what core has for such devices,
        which is CUDA graphs. Asked where ``support().graph_level`` allows any."""
        return None

    @abstractmethod
    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> Any:
        """The backend's state for one cache group."""

    @abstractmethod
    def plan(self, state: Any, layout: BatchLayout) -> None:
        """Once a step and group, outside any graph: derive what ``run`` needs for all layers."""

    @abstractmethod
    def run(
        self, state: Any, q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor",
        cache: "tuple[torch.Tensor, torch.Tensor]", out: "torch.Tensor",
    ) -> None:
        """One layer: write ``k``, ``v`` [T, K, D] to the planned slots of ``cache``, then attend with ``q`` [T, H, D]
        into ``out`` [T, H, D], causally: a query at position p sees keys at positions 0..p (or its window of them)."""
