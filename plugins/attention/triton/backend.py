"""The ``triton`` attention backend: plans a step's launches on the host; :mod:`.kernels` has what is launched.

Legend: T tokens, R rows, P pages of the widest table, H query heads, K key-value heads, G = H / K, D head size.
"""

import os
from contextlib import nullcontext
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.attention import (
    HND,
    NHD,
    AttentionBackend,
    AttentionSupport,
    BatchLimits,
    GraphLevel,
    GroupShape,
)
from hotswap.core.interfaces.layout import BatchLayout
from hotswap.plugins.attention.triton.tiles import MIN_SPLIT, SLOTS, WRITE_BLOCK, Tiles, choose_tiles, power_of_two

OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler. Products and sums may be fused: the default, but triton 3.9 warns that it will change."""

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


class TritonAttention(AttentionBackend):
    """Our own paged kernels, in Triton: pages are read where they lie, and nothing is gathered.

    Prefill and chunks: FlashAttention-2 (Dao 2023, arXiv:2307.08691), tiles of queries over tiles of keys with the
    online softmax (Milakov & Gimelshein 2018, arXiv:1805.02867). Decoding and verification: Flash-Decoding (Dao,
    Haziza, Massa, Sizov 2023), the keys of a row split over programs, and a reduction. The query heads of a key head
    are packed into one tile, so that a decoding step reads each key once. Sums are float32; float32 inputs are
    multiplied exactly, not as TF32.

    Choose it on NVIDIA GPUs where no kernel library is installed, or where none takes what the model needs: any page
    size, head sizes up to 256 that are multiples of 8, sliding windows, softcap. Needs the extra ``triton``. On a CPU
    it runs in Triton's interpreter, where TRITON_INTERPRET=1 is set: for tests, since that is slow.

    The floor of a decoding step is memory traffic: 2 · K · D · itemsize · Σ min(length, window) bytes a layer. Writing
    and reading the splits again adds 4 · G / (itemsize · MIN_SPLIT) of that at most, for rows longer than MIN_SPLIT.

    Graphs: what ``run`` launches depends on the number of rows and their common number of queries alone; lengths,
    tables and slots are read on the device, from buffers of fixed address. A step of uneven rows has tiles that the
    host counts, and cannot be replayed as another.
    """

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        if find_spec("triton") is None:
            raise ConfigError(
                "the triton backend needs the package triton, which is not installed: "
                "pip install 'hotswap[triton]', or choose another attention backend")

    @cached_property
    def _kernels(self) -> Any:
        """Imported late: Triton decides while it is imported whether kernels are compiled or interpreted."""
        return import_module("hotswap.plugins.attention.triton.kernels")

    def support(self) -> AttentionSupport:
        """The interpreter brings each argument to the host, so that it runs on any device."""
        interpreted = _interpreted()
        return AttentionSupport(
            devices=None if interpreted else ("cuda",), dtypes=("float32", "bfloat16", "float16"),
            head_dims=tuple(range(8, 257, 8)), layouts=(HND, NHD), graph_level=GraphLevel.UNIFORM, rounding=1e-5,
            note="kernels run in Triton's interpreter, which is slow, since TRITON_INTERPRET is set" * interpreted)

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> Cache:
        size = (num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        if shape.layout == NHD:
            size = (num_pages, shape.page_size, shape.kv_heads, shape.head_dim)
        keys = torch.zeros(size, dtype=getattr(torch, limits.dtype), device=limits.device)
        return keys, torch.zeros_like(keys)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> "_State":
        if torch.device(limits.device).type == "cpu" and not _interpreted():
            raise ConfigError(
                "the triton backend runs on 'cpu' only in Triton's interpreter. Set TRITON_INTERPRET=1 in the "
                "environment (for tests: it is slow), give device: cuda, or choose another backend", "attention")
        return _State(group, shape, limits, choose_tiles(shape, getattr(torch, limits.dtype).itemsize))

    def plan(self, state: "_State", layout: BatchLayout) -> None:
        state.fill(layout)

    def run(
        self, state: "_State", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, out: torch.Tensor,
    ) -> None:
        with state.on_device:
            state.write(self._kernels, k, v, cache)
            if state.num_tiles:
                state.attend_tiles(self._kernels, q, cache, out)
            if state.num_short:
                state.attend_splits(self._kernels, q, cache, out)


class _State:
    """One cache group's buffers, of fixed address, and what the step at hand launches.

    A row is *short* if its queries fit into one tile of a decoding kernel; the others are cut into tiles of
    ``tiles.queries`` queries. ``tiles_at`` [.., 2] int32: (row, first query). ``short_rows`` [R] int32. ``on_device``:
    Triton launches on the current device, wherever the tensors are."""

    num_tiles = num_short = most_queries = 0

    def __init__(self, group: str, shape: GroupShape, limits: BatchLimits, tiles: Tiles) -> None:
        self.group, self.shape, self.tiles = group, shape, tiles
        cuda = torch.device(limits.device).type == "cuda"
        self.on_device = torch.cuda.device(limits.device) if cuda else nullcontext()
        rows, tokens, width = limits.max_rows, limits.max_tokens, limits.max_pages_per_row
        splits = -(-width * shape.page_size // MIN_SPLIT)
        self.splits = max(1, min(SLOTS, splits))

        def buffer(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=limits.device)

        self.page_table = buffer(rows, width)
        self.slots = buffer(tokens, dtype=torch.int64)
        self.query_starts, self.kv_lens = buffer(rows + 1), buffer(rows)
        self.tiles_at, self.short_rows = buffer(tokens // tiles.queries + rows, 2), buffer(rows)
        self.partial = buffer(rows, shape.kv_heads, SLOTS, tiles.group, shape.head_dim, dtype=torch.float32)
        self.lse = buffer(rows, shape.kv_heads, SLOTS, tiles.group, dtype=torch.float32)

    def fill(self, layout: BatchLayout) -> None:
        pages, queries = layout.groups[self.group], np.asarray(layout.query_lens)
        rows, width = pages.page_table.shape
        sizes, limits = (rows, width, len(pages.slots)), (*self.page_table.shape, len(self.slots))
        assert all(size <= limit for size, limit in zip(sizes, limits, strict=True)), (
            f"a step of {sizes} (rows, pages a row, tokens) exceeds the limits that were bound: {limits}")
        self.page_table[:rows, :width].copy_(pages.page_table, non_blocking=True)
        self.slots[: len(pages.slots)].copy_(pages.slots, non_blocking=True)
        self.query_starts[: rows + 1].copy_(layout.query_starts, non_blocking=True)
        self.kv_lens[:rows].copy_(layout.kv_lens, non_blocking=True)
        short = queries <= self.tiles.short
        long_rows, counts = np.flatnonzero(~short), -(-queries[~short] // self.tiles.queries)
        ends = np.cumsum(counts)
        firsts = (np.arange(counts.sum()) - np.repeat(ends - counts, counts)) * self.tiles.queries
        self.num_tiles = _put(self.tiles_at, np.stack([np.repeat(long_rows, counts), firsts], 1))
        self.num_short = _put(self.short_rows, np.flatnonzero(short))
        self.most_queries = int(queries[short].max(initial=0))

    def write(self, kernels: Any, k: torch.Tensor, v: torch.Tensor, cache: Cache) -> None:
        kernels.write_kv[(-(-len(k) * self.shape.kv_heads // WRITE_BLOCK),)](
            k, v, *cache, self.slots, len(k), *k.stride()[:2], *v.stride()[:2], *self._strides(cache),
            KV_HEADS=self.shape.kv_heads, D=self.shape.head_dim, D_PAD=self.tiles.head_dim,
            PAGE_SIZE=self.shape.page_size, BLOCK=WRITE_BLOCK, **OPTIONS)

    def attend_tiles(self, kernels: Any, q: torch.Tensor, cache: Cache, out: torch.Tensor) -> None:
        kernels.attend_tiles[(self.num_tiles, self.shape.kv_heads)](
            q, *cache, out, self.tiles_at, self.query_starts, self.kv_lens, self.page_table, *self._scales(),
            *q.stride()[:2], *out.stride()[:2], *self._strides(cache), self.page_table.stride(0),
            **self._constants(self.tiles.block_m), **self._options())

    def attend_splits(self, kernels: Any, q: torch.Tensor, cache: Cache, out: torch.Tensor) -> None:
        division = {"SPLITS": self.splits, "SLOTS": SLOTS, "MIN_SPLIT": MIN_SPLIT}
        constants = self._constants(self.tiles.short_block_m(self.most_queries))
        kernels.attend_splits[(self.num_short, self.shape.kv_heads, self.splits)](
            q, *cache, self.partial, self.lse, self.short_rows, self.query_starts, self.kv_lens, self.page_table,
            *self._scales(), *q.stride()[:2], *self._strides(cache), self.page_table.stride(0), **constants, **division,
            **self._options())
        kernels.reduce_splits[(self.num_short, self.shape.kv_heads, self.most_queries)](
            self.partial, self.lse, out, self.short_rows, self.query_starts, self.kv_lens, *out.stride()[:2],
            **{name: constants[name] for name in ("GROUP", "D", "D_PAD", "WINDOW", "BLOCK_N")},
            GROUP_PAD=power_of_two(self.tiles.group), **division, **OPTIONS)

    def _strides(self, cache: Cache) -> tuple[int, int, int]:
        """Of a page, a head and a slot; keys and values have the same."""
        page, outer, inner, _ = cache[0].stride()
        return (page, inner, outer) if self.shape.layout == NHD else (page, outer, inner)

    def _scales(self) -> tuple[float, float]:
        return self.shape.scale, self.shape.softcap or 0.0

    def _constants(self, block_m: int) -> dict[str, Any]:
        shape, tiles = self.shape, self.tiles
        return {
            "GROUP": tiles.group, "D": shape.head_dim, "D_PAD": tiles.head_dim, "PAGE_SIZE": shape.page_size,
            "WINDOW": shape.window or 0, "SOFTCAP": shape.softcap is not None, "BLOCK_M": block_m,
            "BLOCK_N": tiles.block_n,
        }

    def _options(self) -> dict[str, Any]:
        return {"num_warps": self.tiles.num_warps, "num_stages": self.tiles.num_stages, **OPTIONS}


def _put(buffer: torch.Tensor, values: "np.ndarray[Any, Any]") -> int:
    """``values`` to the head of ``buffer``; returns how many there are."""
    if len(values):
        buffer[: len(values)].copy_(torch.from_numpy(values.astype(np.int32)), non_blocking=True)
    return len(values)


def _interpreted() -> bool:
    """Whether Triton will interpret what it is given, as Triton itself reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
