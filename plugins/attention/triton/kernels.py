"""The kernels: keys and values into pages, attention over ragged tiles, and attention over splits of the keys.

Imported where the backend is bound, and nowhere before: ``triton`` decides then whether to compile or to interpret.

Legend: T tokens, R rows, K key-value heads, H query heads, GROUP = H / K, D head size; D_PAD and GROUP_PAD are the
next powers of two. All strides count elements; what they multiply is int64, since a pool may hold more than 2^31.

A tile packs the GROUP query heads that share a key head beside the queries, so that each key is read once for all of
them: packed line i of a tile is query i // GROUP and head i % GROUP. Scores are kept in base 2: exp2 is what the
hardware has.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter (3.6 to 3.9) multiplies the bits of bfloat16 as if they were integers, and rounds to bfloat16 by
cutting bits off. In it, what a GPU would multiply is rounded as a GPU does, and multiplied as float32."""


@triton.jit(do_not_specialize=["tokens"])
def write_kv(
    k, v, k_cache, v_cache, slots, tokens,
    k_token, k_head, v_token, v_head, page_stride, head_stride, slot_stride,
    KV_HEADS: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):
    """k, v [T, K, D] to ``slots`` [T]. Each program writes BLOCK vectors; vector i is token i // K, head i % K."""
    vector = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    token, head = vector // KV_HEADS, vector % KV_HEADS
    real = token < tokens
    slot = tl.load(slots + token, mask=real, other=0)
    target = slot // PAGE_SIZE * page_stride + slot % PAGE_SIZE * slot_stride + head * head_stride
    dims = tl.arange(0, D_PAD)
    inside = real[:, None] & (dims < D)[None, :]
    new_k = tl.load(k + (token * k_token + head * k_head)[:, None] + dims[None, :], mask=inside)
    new_v = tl.load(v + (token * v_token + head * v_head)[:, None] + dims[None, :], mask=inside)
    tl.store(k_cache + target[:, None] + dims[None, :], new_k, mask=inside)
    tl.store(v_cache + target[:, None] + dims[None, :], new_v, mask=inside)


@triton.jit
def attend_tiles(
    q, k_cache, v_cache, out, tiles, query_starts, kv_lens, tables,
    scale, softcap, q_token, q_head, out_token, out_head,
    page_stride, head_stride, slot_stride, table_stride,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Tile i of ``tiles`` [.., 2] (row, first query) and each key head: FlashAttention-2's forward pass over the row's
    pages. Grid (tiles, K)."""
    row = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1)
    start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - start
    past = tl.load(kv_lens + row) - count
    line = tl.arange(0, BLOCK_M)
    query = first + line // GROUP
    last = tl.minimum(first + BLOCK_M // GROUP, count)
    real = query < last
    place_q = (start + query).to(tl.int64) * q_token + (kv_head * GROUP + line % GROUP) * q_head
    place_out = (start + query).to(tl.int64) * out_token + (kv_head * GROUP + line % GROUP) * out_head
    dims = tl.arange(0, D_PAD)
    inside = real[:, None] & (dims < D)[None, :]
    q_tile = tl.load(q + place_q[:, None] + dims[None, :], mask=inside, other=0.0)
    begin = _first_visible(past + first, WINDOW)
    acc, total, _ = _attend(
        q_tile, tl.where(real, past + query, -1), tables + row * table_stride,
        k_cache + kv_head * head_stride, v_cache + kv_head * head_stride, begin, past + last, scale, softcap,
        page_stride, slot_stride, D, D_PAD, PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_M, BLOCK_N)
    o_tile = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place_out[:, None] + dims[None, :], _round(o_tile, out.dtype.element_ty), mask=inside)


@triton.jit
def attend_splits(
    q, k_cache, v_cache, partial, lse, rows, query_starts, kv_lens, tables,
    scale, softcap, q_token, q_head,
    page_stride, head_stride, slot_stride, table_stride,
    GROUP: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr, SLOTS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):
    """Row ``rows[i]``, all of its queries, each key head and each split of the keys (Flash-Decoding): what the split
    alone would give, and the logarithm of its sum of exponentials. Grid (rows, K, SPLITS).

    ``partial`` [rows, K, SLOTS, GROUP, D] and ``lse`` [rows, K, SLOTS, GROUP] float32: query i's split s is in slot
    i * splits + s. Slots of splits that have no keys are neither written nor read."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    kv_head = tl.program_id(1)
    start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - start
    kv_len = tl.load(kv_lens + row)
    splits, oldest, size = _division(count, kv_len, WINDOW, BLOCK_N, SPLITS, SLOTS, MIN_SPLIT)
    begin = oldest + tl.program_id(2) * size
    if begin >= kv_len:
        return
    line = tl.arange(0, BLOCK_M)
    query = line // GROUP
    real = query < count
    dims = tl.arange(0, D_PAD)
    inside = real[:, None] & (dims < D)[None, :]
    place_q = (start + query).to(tl.int64) * q_token + (kv_head * GROUP + line % GROUP) * q_head
    q_tile = tl.load(q + place_q[:, None] + dims[None, :], mask=inside, other=0.0)
    acc, total, top = _attend(
        q_tile, tl.where(real, kv_len - count + query, -1), tables + row * table_stride,
        k_cache + kv_head * head_stride, v_cache + kv_head * head_stride, begin, tl.minimum(begin + size, kv_len),
        scale, softcap, page_stride, slot_stride, D, D_PAD, PAGE_SIZE, WINDOW, SOFTCAP, BLOCK_M, BLOCK_N)
    seen = total > 0
    unit = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head
    slot = unit * SLOTS + query * splits + tl.program_id(2)
    place = slot * GROUP + line % GROUP
    o_tile = acc / tl.where(seen, total, 1.0)[:, None]
    tl.store(partial + place[:, None] * D + dims[None, :], o_tile, mask=inside)
    tl.store(lse + place, tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("-inf")), mask=real)


@triton.jit
def reduce_splits(
    partial, lse, out, rows, query_starts, kv_lens, out_token, out_head,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr, MIN_SPLIT: tl.constexpr,
):
    """The splits of one query and key head, weighed by their sums of exponentials. Grid (rows, K, most queries)."""
    row = tl.load(rows + tl.program_id(0)).to(tl.int64)
    kv_head = tl.program_id(1)
    query = tl.program_id(2)
    start = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - start
    kv_len = tl.load(kv_lens + row)
    if query >= count:
        return
    splits, oldest, size = _division(count, kv_len, WINDOW, BLOCK_N, SPLITS, SLOTS, MIN_SPLIT)
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, D_PAD)
    real = heads < GROUP
    inside = real[:, None] & (dims < D)[None, :]
    unit = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, D_PAD], tl.float32)
    for split in range(tl.cdiv(kv_len - oldest, size)):
        place = (unit * SLOTS + query * splits + split) * GROUP + heads
        weight = tl.load(lse + place, mask=real, other=float("-inf"))
        o_tile = tl.load(partial + place[:, None] * D + dims[None, :], mask=inside, other=0.0)
        new_top = tl.maximum(top, weight)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        older, newer = tl.exp2(top - shift), tl.exp2(weight - shift)
        total = total * older + newer
        acc = acc * older[:, None] + o_tile * newer[:, None]
        top = new_top
    place_out = (start + query).to(tl.int64) * out_token + (kv_head * GROUP + heads) * out_head
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place_out[:, None] + dims[None, :], _round(acc, out.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    q, positions, table, k_cache, v_cache, begin, end, scale, softcap,
    page_stride, slot_stride,
    D: tl.constexpr, D_PAD: tl.constexpr, PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """One tile q [BLOCK_M, D_PAD] at ``positions`` [BLOCK_M] (-1: no query) over the keys begin..end of one row and key
    head: the unscaled sum of values, the sum of exponentials and the greatest score (base 2) of each line.

    The online softmax: a running maximum, and what was summed under an older one is scaled down. While a line has seen
    no key its maximum is -inf, and 0 stands in, since -inf - -inf is no number. Nothing outside begin..end is loaded:
    zeros stand there, for NaN times the weight 0 would still be NaN."""
    dims = tl.arange(0, D_PAD)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    if INTERPRETED:
        q = q.to(tl.float32)
    for first in range(begin, end, BLOCK_N):
        keys = first + tl.arange(0, BLOCK_N)
        present = keys < end
        pages = tl.load(table + keys // PAGE_SIZE, mask=present, other=0).to(tl.int64)
        places = pages * page_stride + keys % PAGE_SIZE * slot_stride
        inside = present[:, None] & (dims < D)[None, :]
        k = tl.load(k_cache + places[:, None] + dims[None, :], mask=inside, other=0.0)
        if INTERPRETED:
            k = k.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            scores = _tanh(scores / softcap) * softcap
        visible = present[None, :] & (keys[None, :] <= positions[:, None])
        if WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        older = tl.exp2(top - shift)
        total = total * older + tl.sum(weights, 1)
        v = tl.load(v_cache + places[:, None] + dims[None, :], mask=inside, other=0.0)
        weights = _round(weights, v.dtype)
        if INTERPRETED:
            weights, v = weights.to(tl.float32), v.to(tl.float32)
        acc = tl.dot(weights, v, acc * older[:, None], input_precision="ieee")
        top = new_top
    return acc, total, top


@triton.jit
def _division(
    count, kv_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """How a row of ``count`` queries divides its keys: into how many splits at most, from which key on, of what size.
    It depends on the row alone, so that its result does not depend on its neighbours."""
    splits = tl.minimum(SPLITS, SLOTS // count)
    oldest = _first_visible(kv_len - count, WINDOW)
    size = tl.cdiv(tl.cdiv(kv_len - oldest, splits), BLOCK_N) * BLOCK_N
    return splits, oldest, tl.maximum(size, MIN_SPLIT)


@triton.jit
def _first_visible(position, WINDOW: tl.constexpr):
    """The first key that a query at ``position`` sees."""
    return tl.maximum(position - WINDOW + 1, 0) if WINDOW else position * 0


@triton.jit
def _tanh(x):
    """As Cephes' tanhf: a polynomial near 0, where the quotient of exponentials would cancel. About one ulp."""
    square = x * x
    series = -5.70498872745e-3
    series = series * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    far = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - far) / (1.0 + far)
    return tl.where(tl.abs(x) < 0.625, x + x * square * series, tl.where(x < 0, -far, far))


@triton.jit
def _round(x, dtype: tl.constexpr):
    """float32 x as ``dtype``, to the nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
