"""The ``cpu`` attention backend: plans a step on the host; :mod:`hotswap.plugins.cpu.attention_kernels` computes it."""

import math
import platform
import struct
from importlib import import_module
from typing import Any

import numpy as np
import torch

from hotswap.core.execution.layout import IntArray
from hotswap.core.interfaces.attention import (
    HND,
    AttentionBackend,
    AttentionSupport,
    BatchLimits,
    GraphLevel,
    GroupShape,
)
from hotswap.core.interfaces.graphs import GraphDevice
from hotswap.core.interfaces.layout import BatchLayout
from hotswap.plugins.attention.pages import zeros
from hotswap.plugins.cpu import attention_words as w
from hotswap.plugins.cpu.recording import StepRecorder
from hotswap.plugins.cpu.team import Kernel, check_numba, compile_kernels, is_recorded, team_note

LANES = 16
"""Lines of scratch memory are whole vectors of the widest registers."""

LOG2_E = math.log2(math.e)
"""Weights are powers of two: scores are multiplied by it beforehand."""

_RUN_WORDS = struct.Struct(f"{8 * w.QUERIES}x{w.TABLE - w.QUERIES}q")
"""Those that each layer sets, the first ones: its tensors behind the counters, which become zero."""

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""


class CPUAttention(AttentionBackend):
    """Kernels of our own for CPUs, which read the pages where they lie; compiled by numba, on torch's threads.

    FlashAttention (Dao et al. 2022) over pages (PagedAttention, Kwon et al. 2023); the keys of a row are divided among
    the cores as in Flash-Decoding (2023), so that work is shared by tokens to read and not by requests. Keys and values
    are read once for all query heads that share them. Prompts, chunks, drafts and decodes are one call. Sums are
    float32. A row's result does not depend on its neighbours, nor on the number of threads, in any bit.

    Choose it on CPUs. It needs numba and no compiler: at the first start kernels are compiled, which takes some
    seconds, and then they are kept. The floor of a decoding step is memory traffic: 2 · K · D · itemsize ·
    Σ min(length, window) bytes a layer.
    """

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        check_numba("the cpu attention backend")

    def support(self) -> AttentionSupport:
        """Registers of all processors convert bfloat16, which is half of a float32; float16 needs instructions."""
        converts = platform.machine() in ("aarch64", "arm64") or torch.backends.cpu.get_cpu_capability() != "DEFAULT"
        return AttentionSupport(
            devices=("cpu",), dtypes=("float32", "bfloat16", *(("float16",) if converts else ())), layouts=(HND,),
            needs_clean_pages=True, leaves_clean_pages=True, graph_level=GraphLevel.ANY, rounding=0.0,
            note=team_note())

    def graph_device(self, device: str) -> GraphDevice:
        """For the CPU, the only device that is supported."""
        return StepRecorder()

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> Cache:
        """Two tensors [pages, K, S, D], zeroed, as the torch backend's, so that one can go on with the other's."""
        size = (num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        dtype = getattr(torch, limits.dtype)
        return zeros(size, dtype, limits.device), zeros(size, dtype, limits.device)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> "_State":
        kernels = import_module("hotswap.plugins.cpu.attention_kernels")  # late: it imports numba
        odd = "_odd" if limits.dtype == "bfloat16" and shape.head_dim % 2 else ""
        any_size = getattr(kernels, f"attend_{limits.dtype}{odd}")
        plan, attend = kernels.plan, getattr(kernels, f"attend_{limits.dtype}_{shape.head_dim}", any_size)
        compile_kernels((plan, attend))
        return _State(group, shape, getattr(torch, limits.dtype).itemsize, plan, attend)

    def plan(self, state: "_State", layout: BatchLayout) -> None:
        state.prepare(layout)

    def run(
        self, state: "_State", q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, out: torch.Tensor,
    ) -> None:
        state.run(q, k, v, cache, out)


class _State:
    """One cache group's words, and the memory that these point to. ``step``: the tensors of the step at hand."""

    def __init__(self, group: str, shape: GroupShape, itemsize: int, plan: Kernel, attend: Kernel) -> None:
        self.group, self.itemsize, self._plan, self._attend = group, itemsize, plan, attend
        self.words = self.memory = _zeros(w.NUM_WORDS)
        self.address, self.size, self._buffer = self.words.ctypes.data, 8 * w.TABLE, self.words.data
        self.step: tuple[torch.Tensor, ...] = ()
        self.members = 0
        self.shared = False
        self._held: dict[int, IntArray] = {}
        heads, dims = shape.heads // shape.kv_heads, shape.head_dim
        padded = -(-dims // LANES) * LANES
        self._set(
            (w.COUNTERS, self.address), (w.KV_HEADS, shape.kv_heads), (w.GROUP, heads), (w.HEAD_DIM, dims),
            (w.PADDED, padded), (w.ROW_BYTES, dims * itemsize), (w.PAGE_SIZE, shape.page_size),
            (w.WINDOW, shape.window or 0), (w.SCALE, _bits(shape.scale * (1 if shape.softcap else LOG2_E))),
            (w.SOFTCAP, _bits(shape.softcap or 0.0)), (w.MOST_SCORE, _bits((shape.softcap or 0.0) * LOG2_E)))
        lines = -(-max(w.TILE_ROWS // heads * heads, heads) // w.ROWS_AT_ONCE) * w.ROWS_AT_ONCE
        offset = lines * padded * 4
        for word, size in (
            (w.SUMS, lines * padded * 4),
            (w.SCORES, max(lines * w.TILE_KEYS, w.SHORT_ROWS * w.SHORT_PART) * 4),
            (w.PLACES, 2 * w.ROOM * 8), (w.COLUMNS, padded * w.TILE_KEYS * 4),
            (w.LINES, w.TILE_KEYS * padded * 4), (w.GREATEST, lines * 4), (w.TOTALS, lines * 4),
            (w.LANE_TOTALS, lines * LANES * 4),
        ):
            self._set((word, offset))
            offset += -(-size // 64) * 64
        self._set((w.SCRATCH_BYTES, offset))

    def prepare(self, layout: BatchLayout) -> None:
        pages = layout.groups[self.group]
        self.step = tuple(
            tensor.contiguous() for tensor in (pages.page_table, pages.slots, layout.query_starts, layout.kv_lens))
        table, slots, starts, lengths = self.step
        self._set(
            (w.TABLE, table.data_ptr()), (w.TABLE_WIDTH, table.shape[1]), (w.SLOTS, slots.data_ptr()),
            (w.STARTS, starts.data_ptr()), (w.LENGTHS, lengths.data_ptr()), (w.ROWS, len(lengths)),
            (w.TOKENS, len(slots)))
        self._plan(self, shared=False)
        if self._grow():
            self._plan(self, shared=False)
        self.shared = bool(self.words[w.NUM_ITEMS] > 1)

    def _grow(self) -> bool:
        """Make room for what ``plan`` has counted; whether there was too little."""
        grown = False
        for found, room, word, size in (
            (w.NUM_ITEMS, w.MAX_ITEMS, w.ITEMS, 8 * w.NUM_FIELDS), (w.NUM_PARTIALS, w.MAX_PARTIALS, w.PARTIALS, 4),
            (w.NUM_ARRIVALS, w.MAX_ARRIVALS, w.ARRIVALS, 8),
        ):
            if self.words[found] > self.words[room]:
                most = 2 * int(self.words[found])
                self._set((room, most))
                self._hold(word, most * size)
                grown = True
        return grown

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, out: torch.Tensor) -> None:
        """Some microseconds of Python, which a step pays for each layer."""
        of_q, of_k, of_v, of_out, size = q.stride(), k.stride(), v.stride(), out.stride(), self.itemsize
        if not of_q[2] == of_k[2] == of_v[2] == 1:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
            of_q, of_k, of_v = q.stride(), k.stride(), v.stride()
        assert of_out[2] == 1, f"the numbers of a head must lie side by side, but out has strides {of_out}"
        _RUN_WORDS.pack_into(
            self._buffer, 0, q.data_ptr(), k.data_ptr(), v.data_ptr(), cache[0].data_ptr(), cache[1].data_ptr(),
            out.data_ptr(), of_q[0] * size, of_q[1] * size, of_k[0] * size, of_k[1] * size, of_v[0] * size,
            of_v[1] * size, of_out[0] * size, of_out[1] * size)
        shared = self.shared or is_recorded()  # a step that is replayed may have more items than this one
        if (members := torch.get_num_threads() if shared else 1) > self.members:
            self.members = members
            self._hold(w.SCRATCH, members * int(self.words[w.SCRATCH_BYTES]))
        self._attend(self, shared)

    def _set(self, *words: tuple[int, int]) -> None:
        for word, value in words:
            self.words[word] = value

    def _hold(self, word: int, size: int) -> None:
        """Give ``word`` the address of so many zeroed bytes."""
        self._held[word] = _zeros(size // 8)
        self._set((word, self._held[word].ctypes.data))


def _zeros(count: int) -> IntArray:
    """int64 [count], which begins with a cache line."""
    memory = np.zeros(count + 7, np.int64)
    skip = -memory.ctypes.data % 64 // 8
    return memory[skip : skip + count]


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))
