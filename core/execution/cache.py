"""The cache's tensors: one pair a layer, laid out as the attention backend asked, under the tables of its group."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from hotswap.core.interfaces.attention import AttentionBackend, BatchLimits, GroupShape
from hotswap.core.interfaces.kv_transfer import AxisShard, CachePages, GroupPages, LayerPages, TransferWorker
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec, Grant
from hotswap.core.interfaces.layout import BatchLayout


class _Layer(NamedTuple):
    state: Any
    cache: tuple[torch.Tensor, torch.Tensor]


class PagedCache:
    """Keys and values of all layers, and the attention backend's state of each group."""

    def __init__(
        self, backend: AttentionBackend, specs: Sequence[CacheSpec], shapes: dict[str, GroupShape], plan: CachePlan,
        limits: BatchLimits, max_tokens: int, kept: "PagedCache | None" = None,
    ) -> None:
        """``kept``: another one of the same ``plan``, whose tensors are taken over with what is in them."""
        self._backend = backend
        self._states: dict[str, Any] = {}
        self._layers: dict[int, _Layer] = {}
        self._groups = {spec.group: spec.layers for spec in specs}
        self._plan, self._limits = plan, limits
        self._transfer: TransferWorker | None = None
        for spec in specs:
            share, shape = plan.groups[spec.group], shapes[spec.group]
            bounded = replace(limits, max_pages_per_row=-(-max_tokens // share.page_size))
            state = self._states[spec.group] = backend.bind(spec.group, shape, bounded)
            for layer in spec.layers:
                tensors = kept._layers[layer].cache if kept is not None else (
                    backend.allocate(shape, share.num_pages, bounded))
                self._layers[layer] = _Layer(state, tensors)

    @property
    def num_bytes(self) -> int:
        """Of keys and values."""
        return sum(tensor.nbytes for layer in self._layers.values() for tensor in layer.cache)

    def pages(self, kv_heads: Mapping[str, AxisShard]) -> CachePages:
        """For a KV transfer: the tensors themselves. ``kv_heads``: per group, which of its heads are here."""
        groups = {
            group: GroupPages(
                group, self._plan.groups[group].page_size, self._plan.groups[group].num_pages,
                self._backend.page_axes(), kv_heads[group],
                tuple(LayerPages(layer, self._layers[layer].cache) for layer in layers))
            for group, layers in self._groups.items()
        }
        return CachePages(groups, self._limits.device, self._limits.dtype)

    def watch_layers(self, transfer: TransferWorker) -> None:
        """Tell ``transfer`` before and after each layer."""
        self._transfer = transfer

    def copy_pages(self, grant: Grant) -> None:
        """Carry out the grant's copies; within one grant every source is read before any target is written."""
        for group, change in grant.groups.items():
            if not change.copies:
                continue
            sources, targets = map(list, zip(*change.copies, strict=True))
            for layer in self._groups[group]:
                for tensor in self._layers[layer].cache:
                    tensor[targets] = tensor[sources]

    def plan(self, layout: BatchLayout) -> None:
        """For the groups that ``layout`` has."""
        for group in layout.groups:
            self._backend.plan(self._states[group], layout)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k and v [T, K, D] -> [T, H, D]; see ``Attend``."""
        state, cache = self._layers[layer]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if self._transfer is None:
            self._backend.run(state, q, k, v, cache, out)
        else:
            self._transfer.before_layer(layer)
            self._backend.run(state, q, k, v, cache, out)
            self._transfer.after_layer(layer)
        return out
