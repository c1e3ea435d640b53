"""Paged attention by the FlashAttention packages. Legend of shapes: see :mod:`flash_packages`."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import NHD, AttentionBackend, AttentionSupport, BatchLimits, GroupShape
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.layout import BatchLayout, GroupLayout
from hotswap.plugins.attention.flash_packages import Cache, Call, Capability, Chosen, choose
from hotswap.plugins.attention.pages import rest_of_pages

DEVICES = ("cuda",)
"""Kinds of device that the packages run on."""


@dataclass
class _State:
    """What ``run`` needs of a step. ``static`` keeps it for captured steps, by rows and queries."""

    group: str
    shape: GroupShape
    step: "_Step | None" = None
    static: dict[tuple[int, int], "_Step"] = field(default_factory=dict)


@dataclass
class _Step:
    """``slots`` [T]: where new keys and values go. ``rest`` [R S]: the slots behind each row's last token in its page,
    which become zeros; None where no kernel loads them."""

    call: Call
    slots: torch.Tensor
    rest: torch.Tensor | None


class FlashAttention(AttentionBackend):
    """The kernels of the package ``flash-attn`` (FlashAttention-2: Dao, 2023) and of its successors for Hopper
    (FlashAttention-3: Shah et al., 2024) and Blackwell (FlashAttention-4), whichever is installed and made for the
    device. Choose it on NVIDIA GPUs in float16 or bfloat16: it is the fastest attention there is for prompts.

    FlashAttention-2 takes pages of 256 tokens and their multiples only, so that short requests waste more of the cache
    than with ``triton``; FlashAttention-3 takes pages of any size.
    """

    class Options(ComponentOptions):
        version: Literal[2, 3, 4] | None = None
        """The generation; by default the newest that is installed and made for the device."""

    options: Options

    @cached_property
    def _chosen(self) -> Chosen:
        return choose(self.options.version, device_capability())

    def support(self) -> AttentionSupport:
        """ConfigError where no generation can be used here."""
        generation = self._chosen.generation
        return AttentionSupport(
            devices=DEVICES, dtypes=("bfloat16", "float16"), head_dims=generation.head_dims,
            page_sizes=generation.page_sizes, layouts=(NHD,),
            needs_clean_pages=generation.page_sizes is None, leaves_clean_pages=generation.page_sizes is None,
            graph_level=generation.graph_level, rounding=1e-2, note=self._chosen.why)

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> Cache:
        """Two tensors [pages, S, K, D], zeroed."""
        size = (num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
        keys = torch.zeros(size, dtype=getattr(torch, limits.dtype), device=limits.device)
        return keys, torch.zeros_like(keys)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> _State:
        return _State(group, shape)

    def plan(self, state: _State, layout: BatchLayout) -> None:
        generation, shape, pages = self._chosen.generation, state.shape, layout.groups[state.group]
        kv_starts, rest, table = None, None, pages.page_table
        if generation.sums_lengths and layout.uniform_query_len is None:
            kv_starts = torch.nn.functional.pad(layout.kv_lens.cumsum(0, dtype=torch.int32), (1, 0))
        if generation.page_sizes is None and shape.window is not None:
            table, rest = _visible_pages(shape.window, layout, pages), rest_of_pages(
                pages.slots[layout.query_starts[1:].long() - 1], pages.page_size).flatten()
        step = _Step(
            Call(shape, table, layout.kv_lens, layout.query_starts, kv_starts, layout.uniform_query_len,
                 max(layout.query_lens), max(layout.kv_lens_max)),
            pages.slots, rest)
        if layout.static:
            kept = state.static.setdefault((len(layout.query_lens), layout.query_lens[0]), step)
            if kept is not step and rest is not None and kept.rest is not None:  # what was derived keeps its address
                kept.call.table.copy_(table)
                kept.rest.copy_(rest)
            step = kept
        state.step = step

    def run(
        self, state: _State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, out: torch.Tensor,
    ) -> None:
        step = state.step
        assert step is not None, "run before plan"
        for tensor, new in zip(cache, (k, v), strict=True):
            vectors = tensor.view(-1, *new.shape[1:])
            if step.rest is not None:
                vectors.index_fill_(0, step.rest, 0.0)
            vectors.index_copy_(0, step.slots, new)
        out.copy_(self._chosen.generation.attend(self._chosen.module, q, cache, step.call))


def device_capability() -> Capability | None:
    """Of the CUDA device in use; None where there is none. ConfigError where it cannot be used."""
    try:
        return torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    except RuntimeError as error:  # taken by others, or broken: the config may name the CPU all the same
        raise ConfigError(
            f"the CUDA device cannot be asked what it can do ({str(error).splitlines()[0]}); choose attention torch, "
            "or mend it", "attention") from error


def _visible_pages(window: int, layout: BatchLayout, pages: GroupLayout) -> torch.Tensor:
    """The table [R, P], with the row's first visible page in the place of those before it. A kernel loads whole tiles
    and masks scores, but what a window has given back may be NaN by now, and 0 * NaN is NaN."""
    asked = layout.query_starts.diff()
    first = (layout.kv_lens - asked - window + 1).clamp_(min=0) // pages.page_size
    places = torch.arange(pages.page_table.shape[1], device=first.device).maximum(first[:, None].long())
    return pages.page_table.gather(1, places)
