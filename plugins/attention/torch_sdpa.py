"""Paged attention with torch's scaled_dot_product_attention, on any device.

Legend: T tokens, R rows, m queries of a row, L keys of a row, P its pages, S tokens of a page, H query heads, K
key-value heads, G = H / K, D head size.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from hotswap.core.execution.layout import IntArray
from hotswap.core.interfaces.attention import (
    HND,
    AttentionBackend,
    AttentionSupport,
    BatchLimits,
    GraphLevel,
    GroupShape,
)
from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.layout import BatchLayout, GroupLayout
from hotswap.plugins.attention.pages import begun_pages, rest_of_pages, zeros

SHORT = 16
"""Rows of at most so many queries (decoding, verification) share one call; longer ones get calls of their own."""

BLOCK = 256
"""Queries of a long row that are attended in one call: bounds the scores, and skips keys above the diagonal."""

MAX_GATHER = 1 << 13
"""Most keys gathered for one call of short rows (but one row at least): bounds the workspace, which then stays in the
processor's cache."""

Cache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values."""

Selection = slice | torch.Tensor
"""Tokens of the batch: a slice where they lie in a row, so that no copy is made."""


@dataclass
class _ShortRows:
    """Rows of m queries each and of similar length. ``blocks`` [R K P] says which [S, D] blocks of the cache hold their
    keys, head by head; ``mask`` is [R, 1, 1 or m G, P S] float32, added to the scores."""

    tokens: Selection
    rows: int
    queries: int
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass
class _LongRow:
    """One row. Its keys are the batch's own ``tokens`` where nothing came before them, else in ``blocks`` [K P].
    ``past`` counts the keys before its first query, from the first page that it can see."""

    tokens: slice
    past: int
    blocks: torch.Tensor | None


@dataclass
class _StaticRows:
    """What a captured step reads, at addresses that stay: R rows of m queries in parts that fit the workspace.
    ``cleared`` [R S K]: the vectors behind each row's last token, as far as its page goes."""

    slots: torch.Tensor
    cleared: torch.Tensor
    parts: list[_ShortRows]


@dataclass
class _State:
    """``slots`` [T K]: where each new token's vectors go, counted in vectors. ``opened``: pages that this step begins
    and does not fill; ``cleared``: vectors that captured steps set to zero instead."""

    group: str
    shape: GroupShape
    device: str
    dtype: torch.dtype
    slots: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    opened: torch.Tensor | None = None
    cleared: torch.Tensor | None = None
    short: list[_ShortRows] = field(default_factory=list)
    long: list[_LongRow] = field(default_factory=list)
    staircase: torch.Tensor = field(default_factory=lambda: torch.empty(BLOCK, 0))
    keys: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    values: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    static: dict[tuple[int, int], _StaticRows] = field(default_factory=dict)
    workspace: Cache | None = None

    @property
    def block_size(self) -> int:
        return self.shape.page_size * self.shape.head_dim

    def write(self, cache: Cache, k: torch.Tensor, v: torch.Tensor) -> None:
        """The rest of a page that is begun is set to zero: what another request left there, perhaps NaN, is masked
        when it is read, but NaN outlives any mask."""
        for tensor, new in zip(cache, (k, v), strict=True):
            vectors = tensor.view(-1, self.shape.head_dim)
            if self.opened is not None:
                tensor.index_fill_(0, self.opened, 0.0)
            if self.cleared is not None:
                vectors.index_fill_(0, self.cleared, 0.0)
            vectors.index_copy_(0, self.slots, new.reshape(-1, self.shape.head_dim))

    def gather(self, cache: Cache, blocks: torch.Tensor) -> Cache:
        """Keys and values of ``blocks`` [N], flat, in workspaces that the next call reuses."""
        size = self.block_size
        keys, values = (
            torch.index_select(x.view(-1, size), 0, blocks, out=space[: len(blocks) * size].view(-1, size))
            for x, space in zip(cache, (self.keys, self.values), strict=True)
        )
        return keys, values


class TorchAttention(AttentionBackend):
    """The reference, on any device: torch's scaled_dot_product_attention over gathered pages.

    Choose it where no kernel reads pages in place; it is also what other backends are compared with. Decoding rows of
    similar length are attended in one call, so that a step's cost grows with their tokens and not with their number.
    The query heads that share a key head are folded into the queries: nothing is repeated. Scores and sums are float32.
    """

    class Options(ComponentOptions):
        graphs: bool = False
        """Let decoding be captured in CUDA graphs. A row of a captured step costs as much as one of max_model_len
        tokens, since its shapes cannot follow its length: worth it for short contexts."""

    options: Options

    def support(self) -> AttentionSupport:
        level = GraphLevel.UNIFORM if self.options.graphs else GraphLevel.NEVER
        return AttentionSupport(
            dtypes=("float32", "bfloat16", "float16"), layouts=(HND,), needs_clean_pages=True,
            leaves_clean_pages=True, graph_level=level, rounding=1e-5)

    def allocate(self, shape: GroupShape, num_pages: int, limits: BatchLimits) -> Cache:
        """Two tensors [pages, K, S, D], zeroed: uninitialised memory may hold NaN. A head's keys in a page are one
        block, so that few long pieces are gathered, and a row's keys come out head by head."""
        size = (num_pages, shape.kv_heads, shape.page_size, shape.head_dim)
        dtype = getattr(torch, limits.dtype)
        return zeros(size, dtype, limits.device), zeros(size, dtype, limits.device)

    def bind(self, group: str, shape: GroupShape, limits: BatchLimits) -> _State:
        return _State(group, shape, limits.device, getattr(torch, limits.dtype))

    def plan(self, state: _State, layout: BatchLayout) -> None:
        if layout.static:
            _plan_static(state, layout)
            return
        state.cleared = None
        pages = layout.groups[state.group]
        queries, lengths = np.asarray(layout.query_lens), np.asarray(layout.kv_lens_max)
        starts = np.concatenate(([0], np.cumsum(queries)[:-1]))
        state.slots = _vectors(pages.slots, state)
        state.opened = begun_pages(pages, queries, lengths)
        short = queries <= SHORT
        state.short = [
            _plan_short(
                state, layout, pages, rows, int(queries[rows[0]]), starts[rows],
                _most_pages(state, int(queries[rows[0]]), lengths[rows]))
            for rows in _alike(np.flatnonzero(short), queries, lengths, state.shape.window)
        ]
        state.long = [
            _plan_long(state, pages, row, int(starts[row]), int(queries[row]), int(lengths[row]))
            for row in np.flatnonzero(~short).tolist()
        ]
        _make_room(state, int(lengths[~short].max(initial=0)))

    def run(
        self, state: _State, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: Cache, out: torch.Tensor,
    ) -> None:
        state.write(cache, k, v)
        for rows in state.short:
            _attend_short(state, rows, q, cache, out)
        for row in state.long:
            _attend_long(state, row, q, _keys_of(state, row, k, v, cache), out)


def _plan_static(state: _State, layout: BatchLayout) -> None:
    """The plan of rows that may have any length: all of them in short calls over as many pages as a row can see. Its
    tensors are copied to where the captured step looks for them."""
    queries, rows = layout.query_lens[0], len(layout.query_lens)
    pages, longest = layout.groups[state.group], layout.kv_lens_max[0]
    size, window = pages.page_size, state.shape.window
    most = whole = -(-longest // size)
    if window is not None:
        most = min(whole, (queries + window - 2) // size + 2)
    if state.workspace is None:
        space = torch.empty(
            max(MAX_GATHER, whole * size) * state.shape.kv_heads * state.shape.head_dim,
            dtype=state.dtype, device=state.device)
        state.workspace = space, torch.empty_like(space)
    rest = rest_of_pages(pages.slots.view(rows, queries)[:, -1], size)
    fresh = _StaticRows(
        _vectors(pages.slots, state), _vectors(rest.flatten(), state),
        [_plan_short(state, layout, pages, part, queries, part * queries, most)
         for part in np.array_split(np.arange(rows), min(rows, -(-rows * most * size // MAX_GATHER)))])
    kept = state.static.setdefault((rows, queries), fresh)
    if kept is not fresh:
        kept.slots.copy_(fresh.slots)
        kept.cleared.copy_(fresh.cleared)
        for old, new in zip(kept.parts, fresh.parts, strict=True):
            old.blocks.copy_(new.blocks)
            old.mask.copy_(new.mask)
    state.slots, state.opened, state.cleared, state.short, state.long = kept.slots, None, kept.cleared, kept.parts, []
    state.keys, state.values = state.workspace


def _make_room(state: _State, longest: int) -> None:
    """Workspaces and the mask of long rows grow to what this step needs, and stay."""
    if longest > state.staircase.shape[1]:
        state.staircase = _staircase(_round_up(longest), state.shape.window, state.dtype).to(state.device)
    blocks = [rows.blocks for rows in state.short] + [row.blocks for row in state.long if row.blocks is not None]
    most = max(map(len, blocks), default=0) * state.block_size
    if most > len(state.keys):
        state.keys = torch.empty(_round_up(most), dtype=state.dtype, device=state.device)
        state.values = torch.empty_like(state.keys)


def _vectors(slots: torch.Tensor, state: _State) -> torch.Tensor:
    """Slots [N] -> the vectors [N K] of their heads in the cache."""
    size = state.shape.page_size
    return _by_head(slots // size, state).mul_(size).add_((slots % size)[:, None]).flatten()


def _by_head(pages: torch.Tensor, state: _State) -> torch.Tensor:
    """Page ids [..., N] -> the blocks [..., N, K] of their heads, counted in blocks."""
    kv_heads = state.shape.kv_heads
    return pages[..., None].long() * kv_heads + torch.arange(kv_heads, device=pages.device)


def _alike(rows: IntArray, queries: IntArray, lengths: IntArray, window: int | None) -> list[IntArray]:
    """``rows`` in classes of one number of queries and, up to a factor of two, one number of visible keys."""
    visible = lengths[rows] if window is None else np.minimum(lengths[rows], queries[rows] + window - 1)
    doubling = np.ceil(np.log2(np.maximum(visible, 64))).astype(np.int64)
    _, kinds = np.unique(queries[rows] * 64 + doubling, return_inverse=True)
    classes: list[IntArray] = []
    for kind in range(kinds.max(initial=-1) + 1):
        alike = rows[kinds == kind]
        parts = -(-len(alike) * int(visible[kinds == kind].max()) // MAX_GATHER)
        classes += np.array_split(alike, min(parts, len(alike)))
    return classes


def _most_pages(state: _State, queries: int, lengths: IntArray) -> int:
    """Pages that rows of these ``lengths`` can see, the most of any."""
    window, size = state.shape.window, state.shape.page_size
    oldest = np.zeros_like(lengths) if window is None else np.maximum(lengths - queries - window + 1, 0)
    return int((-(-lengths // size) - oldest // size).max())


def _plan_short(
    state: _State, layout: BatchLayout, pages: GroupLayout, rows: IntArray, queries: int, starts: IntArray, most: int,
) -> _ShortRows:
    """Of each row ``most`` pages are read. Where it has fewer, its last one is read again, and masked."""
    m, window, size = queries, state.shape.window, pages.page_size
    index = torch.from_numpy(rows).to(state.device)
    ends = layout.kv_lens[index].long()[:, None]
    first = torch.zeros_like(ends) if window is None else (ends - m - window + 1).clamp_(min=0) // size
    logical = first + torch.arange(most, device=state.device)
    blocks = _by_head(pages.page_table[index].gather(1, torch.minimum(logical, (ends - 1) // size)), state)
    positions = (logical[:, :, None] * size + torch.arange(size, device=state.device)).flatten(1)
    asking = (ends - m + torch.arange(m, device=state.device))[:, :, None]
    visible = positions[:, None] <= asking
    if window is not None:
        visible &= positions[:, None] > asking - window
    mask = torch.zeros(visible.shape, device=state.device).masked_fill_(~visible, float("-inf"))
    if m > 1:
        mask = mask.repeat_interleave(state.shape.heads // state.shape.kv_heads, dim=1)
    tokens = (starts[:, None] + np.arange(m)).ravel()
    return _ShortRows(
        _selection(tokens, state.device), len(rows), m, blocks.transpose(1, 2).flatten(), mask[:, None])


def _plan_long(state: _State, pages: GroupLayout, row: int, start: int, queries: int, length: int) -> _LongRow:
    tokens, past = slice(start, start + queries), length - queries
    if past == 0:
        return _LongRow(tokens, past, None)
    window, size = state.shape.window, pages.page_size
    first = 0 if window is None else max(0, past - window + 1) // size
    blocks = _by_head(pages.page_table[row, first : -(-length // size)], state)
    return _LongRow(tokens, past - first * size, blocks.t().flatten())


def _attend_short(state: _State, rows: _ShortRows, q: torch.Tensor, cache: Cache, out: torch.Tensor) -> None:
    shape, n, m = state.shape, rows.rows, rows.queries
    group = shape.heads // shape.kv_heads
    q_RKXD = q[rows.tokens].reshape(n, m, shape.kv_heads, group, -1).transpose(1, 2).flatten(2, 3)
    k_RKLD, v_RKLD = (
        x.view(n, shape.kv_heads, -1, shape.head_dim) for x in state.gather(cache, rows.blocks)
    )
    o_RKXD = _explicit(q_RKXD, k_RKLD, v_RKLD, rows.mask, shape)
    out[rows.tokens] = o_RKXD.view(n, shape.kv_heads, m, group, -1).transpose(1, 2).reshape(n * m, shape.heads, -1)


def _keys_of(state: _State, row: _LongRow, k: torch.Tensor, v: torch.Tensor, cache: Cache) -> Cache:
    """A long row's keys and values [K, L, D], as far as it can see."""
    if row.blocks is None:
        return k[row.tokens].transpose(0, 1), v[row.tokens].transpose(0, 1)
    keys, values = state.gather(cache, row.blocks)
    size = (state.shape.kv_heads, -1, state.shape.head_dim)
    return keys.view(size), values.view(size)


def _attend_long(state: _State, row: _LongRow, q: torch.Tensor, keys: Cache, out: torch.Tensor) -> None:
    shape, past, count = state.shape, row.past, row.tokens.stop - row.tokens.start
    group = shape.heads // shape.kv_heads
    attend = _fused if shape.softcap is None else _explicit
    q_nKGD, o_nHD = q[row.tokens].reshape(count, shape.kv_heads, group, -1), out[row.tokens]
    for begin in range(0, count, BLOCK):
        end = min(begin + BLOCK, count)
        first = 0 if shape.window is None else max(0, past + begin - shape.window + 1)
        mask = state.staircase[begin - end:, first - past - end:]
        k_KGLD, v_KGLD = (x[:, None, first : past + end].expand(-1, group, -1, -1) for x in keys)
        o_KGnD = attend(q_nKGD[begin:end].permute(1, 2, 0, 3), k_KGLD, v_KGLD, mask, shape)
        o_nHD[begin:end] = o_KGnD.permute(2, 0, 1, 3).flatten(1, 2)


def _fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, shape: GroupShape,
) -> torch.Tensor:
    """[..., n, D], [..., L, D], mask [n, L] -> [..., n, D], without ever holding the scores."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=shape.scale)


def _explicit(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, shape: GroupShape,
) -> torch.Tensor:
    """The same, holding the scores (float32): faster than torch's fused kernel for few queries on a CPU, and able to
    squash them (softcap, as in Gemma 2)."""
    scores = (q.float() * shape.scale) @ k.float().transpose(-1, -2)
    if shape.softcap is not None:
        scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    return scores.add_(mask).softmax(-1).to(v.dtype) @ v


def _staircase(length: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
    """The causal mask of the last ``BLOCK`` queries over ``length`` keys, [BLOCK, length].

    What a query sees depends on its distance from the last key alone: the mask of any n <= BLOCK queries that end at
    the last of L keys is the lower right [n, L] corner of this one."""
    asking = torch.arange(length - BLOCK, length)[:, None]
    keys = torch.arange(length)
    hidden = keys > asking
    if window is not None:
        hidden |= keys <= asking - window
    return torch.zeros(BLOCK, length, dtype=dtype).masked_fill_(hidden, float("-inf"))


def _selection(tokens: IntArray, device: str) -> Selection:
    first, last = int(tokens[0]), int(tokens[-1])
    if last - first + 1 == len(tokens):  # they rise by one, being sorted and distinct
        return slice(first, last + 1)
    return torch.from_numpy(tokens).to(device)


def _round_up(size: int) -> int:
    return max(1024, 1 << (size - 1).bit_length())
