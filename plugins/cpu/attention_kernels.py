"""Paged attention on a CPU: what a step's threads do. :mod:`.attention_words` has the names of their words.

FlashAttention's online softmax (Dao et al. 2022, arXiv:2205.14135) over pages that are read where they lie
(PagedAttention, Kwon et al. 2023, arXiv:2309.06180), with the keys of a row divided among the threads as in
Flash-Decoding (Dao, Haziza, Massa, Sizov 2023). ``plan`` cuts a step into items, once for all layers: some queries of a
row, one key head, and a part of the row's keys. How a row is cut depends on the row alone, and partial results are
merged in the order of the keys, whoever computes them: equal input gives equal bits, with any neighbours and any number
of threads.

An item packs the query heads that share a key head beside the queries: line i is query i // G and head i % G.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import numpy as np
from numba import carray, float32, int32, int64

from hotswap.plugins.cpu import attention_loops as loops
from hotswap.plugins.cpu import attention_words as w
from hotswap.plugins.cpu import row_loops
from hotswap.plugins.cpu.machine import called, clear, copy, fetch_add, float_of, inlined, pause, pointer, watch, words
from hotswap.plugins.cpu.team import Kernel

FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.uint16(0), np.int16(0)
"""Kinds of numbers: see :mod:`.vectors`."""

NOTHING = np.float32(-np.inf)
"""The score of a key that a query does not see."""

PAIRS, SINGLES = np.uint8(0), np.int8(0)
"""Forms of products, told by their types: see :mod:`.attention_loops`."""


@Kernel
def plan(data):
    """Cut a step into items. Where there is no room for them it counts on, and the host calls again with more."""
    at = words(data)
    starts = carray(pointer(at[w.STARTS]), at[w.ROWS] + 1, int32)
    lengths = carray(pointer(at[w.LENGTHS]), at[w.ROWS], int32)
    at[w.NUM_ITEMS] = at[w.NUM_PARTIALS] = at[w.NUM_ARRIVALS] = 0
    tile = max(1, w.TILE_ROWS // at[w.GROUP])
    for long in (True, False):  # those that take long come first, so that no thread is left with one in the end
        for row in range(at[w.ROWS]):
            start, count = int64(starts[row]), int64(starts[row + 1] - starts[row])
            past = lengths[row] - count
            if (count * at[w.GROUP] > w.SHORT_ROWS) != long:
                continue
            if not long:
                _add_items(at, row, long, start, count, past, w.SHORT_PART)
                continue
            tiles = _whole(count, tile)
            size = _whole((past + count) * tiles, w.MOST_PARTS * w.LONG_PART) * w.LONG_PART
            for first in range((tiles - 1) * tile, -1, -tile):  # the last tile sees most keys
                _add_items(at, row, long, start + first, min(tile, count - first), past + first, size)


@called
def _whole(amount, size):
    """How many times ``size`` covers ``amount``."""
    return (amount + size - 1) // size


@called
def _add_items(at, row, long, token, count, position, size):
    """The items of ``count`` queries: for each key head the parts of ``size`` keys that the queries see."""
    begin, end = int64(0), position + count
    if at[w.WINDOW] > 0:
        begin = max(int64(0), position - at[w.WINDOW] + 1)
    first, parts = begin // size, (end - 1) // size - begin // size + 1
    room = count * at[w.GROUP] * (at[w.PADDED] + 2) if parts > 1 else int64(0)
    for part in range(parts):
        for head in range(at[w.KV_HEADS]):
            if at[w.NUM_ITEMS] < at[w.MAX_ITEMS]:
                item = carray(pointer(at[w.ITEMS] + at[w.NUM_ITEMS] * w.NUM_FIELDS * 8), w.NUM_FIELDS, int64)
                item[w.ROW], item[w.LONG] = row, long
                item[w.TOKEN], item[w.COUNT], item[w.POSITION] = token, count, position
                item[w.HEAD], item[w.PART], item[w.PARTS] = head, part, parts
                item[w.BEGIN] = max(begin, (first + part) * size)
                item[w.END] = min(end, (first + part + 1) * size)
                item[w.PARTIAL] = at[w.NUM_PARTIALS] + head * parts * room
                item[w.ARRIVAL] = at[w.NUM_ARRIVALS] + head
            at[w.NUM_ITEMS] += 1
    if parts > 1:
        at[w.NUM_PARTIALS] += at[w.KV_HEADS] * parts * room
        at[w.NUM_ARRIVALS] += at[w.KV_HEADS]


@Kernel
def attend_float32(data):
    _attend(words(data), FLOAT32, SINGLES)


@Kernel
def attend_bfloat16(data):
    _attend(words(data), BFLOAT16, PAIRS)


@Kernel
def attend_bfloat16_odd(data):
    """For heads whose last number has no other beside it."""
    _attend(words(data), BFLOAT16, SINGLES)


@Kernel
def attend_float16(data):
    _attend(words(data), FLOAT16, SINGLES)


@inlined
def _attend(at, kind, form):
    """One thread of a layer: first the new keys and values are written, and when all are, the items are computed."""
    counters = at[w.COUNTERS]
    scratch = at[w.SCRATCH] + fetch_add(counters + 8 * w.MEMBERS, 1) * at[w.SCRATCH_BYTES]
    blocks = _whole(at[w.TOKENS], w.WRITE_TOKENS) + 1
    while True:
        work = fetch_add(counters + 8 * w.NEXT, 1)
        if work < blocks:
            if work == 0:
                _clear(at)
            else:
                _write(at, (work - 1) * w.WRITE_TOKENS)
            fetch_add(counters + 8 * w.WRITTEN, 1)
            continue
        if work >= blocks + at[w.NUM_ITEMS]:
            return
        while watch(counters + 8 * w.WRITTEN) < blocks:  # whoever writes the last block is at it
            pause()
        item = carray(pointer(at[w.ITEMS] + (work - blocks) * w.NUM_FIELDS * 8), w.NUM_FIELDS, int64)
        if item[w.LONG]:
            _attend_long(at, item, scratch, kind, form)
        else:
            _attend_short(at, item, scratch, kind, form)
        _finish(at, item, scratch, kind)


@called
def _write(at, first):
    """The keys and values of some tokens to their slots."""
    slots = carray(pointer(at[w.SLOTS]), at[w.TOKENS], int64)
    size = at[w.ROW_BYTES]
    for token in range(first, min(first + w.WRITE_TOKENS, at[w.TOKENS])):
        page, offset = slots[token] // at[w.PAGE_SIZE], slots[token] % at[w.PAGE_SIZE]
        for head in range(at[w.KV_HEADS]):
            there = ((page * at[w.KV_HEADS] + head) * at[w.PAGE_SIZE] + offset) * size
            copy(at[w.KEY_CACHE] + there, at[w.KEYS] + token * at[w.K_TOKEN] + head * at[w.K_HEAD], size)
            copy(at[w.VALUE_CACHE] + there, at[w.VALUES] + token * at[w.V_TOKEN] + head * at[w.V_HEAD], size)


@called
def _clear(at):
    """Zeros behind the last tokens of rows that begin a page: backends that read pages to their ends may go on."""
    starts = carray(pointer(at[w.STARTS]), at[w.ROWS] + 1, int32)
    lengths = carray(pointer(at[w.LENGTHS]), at[w.ROWS], int32)
    table = carray(pointer(at[w.TABLE]), (at[w.ROWS], at[w.TABLE_WIDTH]), int32)
    page_size, size = at[w.PAGE_SIZE], at[w.ROW_BYTES]
    for row in range(at[w.ROWS]):
        last, used = (lengths[row] - 1) // page_size, lengths[row] % page_size
        if used > 0 and lengths[row] - (starts[row + 1] - starts[row]) <= last * page_size:
            for head in range(at[w.KV_HEADS]):
                there = ((int64(table[row, last]) * at[w.KV_HEADS] + head) * page_size + used) * size
                clear(at[w.KEY_CACHE] + there, (page_size - used) * size)
                clear(at[w.VALUE_CACHE] + there, (page_size - used) * size)


@called
def _line_of(at, item, line, base, token_stride, head_stride):
    """Where a line of the item lies in a tensor of queries or results."""
    token, head = item[w.TOKEN] + line // at[w.GROUP], item[w.HEAD] * at[w.GROUP] + line % at[w.GROUP]
    return base + token * token_stride + head * head_stride


@called
def _find(at, item, begin, end, places, room):
    """The places of an item's keys from ``begin`` to before ``end``; the last one again as far as there is ``room``."""
    found = carray(pointer(places), room, int64)
    size = at[w.PAGE_SIZE]
    table = carray(pointer(at[w.TABLE] + item[w.ROW] * at[w.TABLE_WIDTH] * 4), at[w.TABLE_WIDTH], int32)
    page, offset = begin // size, begin % size
    filled = 0
    while filled < end - begin:
        base = (int64(table[page]) * at[w.KV_HEADS] + item[w.HEAD]) * size
        stop = min(size, offset + end - begin - filled)
        for i in range(offset, stop):
            found[filled + i - offset] = base + i
        filled += stop - offset
        page, offset = page + 1, int64(0)
    for i in range(filled, room):
        found[i] = found[filled - 1]


@called
def _hide(at, item, line, begin, count, scores, room):
    """Squash a line's scores of the ``count`` keys from ``begin`` on, and hide those that its query does not see."""
    if at[w.SOFTCAP] != 0:
        row_loops.squash(scores, room // row_loops.lanes(), float_of(at[w.SOFTCAP]))
    position = item[w.POSITION] + line // at[w.GROUP]
    if at[w.WINDOW] > 0:
        row_loops.fill(scores, NOTHING, 0, min(room, max(int64(0), position - at[w.WINDOW] + 1 - begin)))
    row_loops.fill(scores, NOTHING, max(int64(0), min(count, position + 1 - begin)), room)


@called
def _take_queries(at, item, lines, scratch, kind, form):
    """As rows of float32; of pairs of bfloat16 as they are, with zeros behind them, since nobody writes there."""
    for line in range(lines):
        query = _line_of(at, item, line, at[w.QUERIES], at[w.Q_TOKEN], at[w.Q_HEAD])
        if loops.in_pairs(kind, form):
            copy(scratch + line * at[w.PADDED] * 4, query, at[w.ROW_BYTES])
        else:
            row_loops.take(query, at[w.HEAD_DIM], float32(1), scratch + line * at[w.PADDED] * 4, kind)


@inlined
def _attend_short(at, item, scratch, kind, form):
    """Few lines: keys and values are read once for up to four of them, and never stored in another form."""
    lines, stride, dims, size = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4, at[w.HEAD_DIM], at[w.ROW_BYTES]
    places, scores, sums = scratch + at[w.PLACES], scratch + at[w.SCORES], scratch + at[w.SUMS]
    most = carray(pointer(scratch + at[w.GREATEST]), lines, float32)
    totals = carray(pointer(scratch + at[w.TOTALS]), lines, float32)
    begin, count, width = item[w.BEGIN], item[w.END] - item[w.BEGIN], w.SHORT_PART * 4
    vectors = _whole(count, row_loops.lanes())
    _take_queries(at, item, lines, scratch, kind, form)
    _find(at, item, begin, item[w.END], places, vectors * row_loops.lanes() + w.AHEAD)
    loops.approach(at[w.VALUE_CACHE], places, w.AHEAD, size)
    for first in range(0, lines, 4):
        loops.score(
            scratch + first * stride, stride, at[w.KEY_CACHE], places, count, size, dims, scores + first * width, width,
            float_of(at[w.SCALE]), lines - first, kind, form)
    for line in range(lines):
        row = scores + line * width
        _hide(at, item, line, begin, count, row, vectors * row_loops.lanes())
        most[line] = row_loops.greatest(row, vectors)
        totals[line] = row_loops.exponentials(row, vectors, float32(0) if most[line] == NOTHING else most[line])
    for first in range(0, lines, 4):
        loops.weigh(
            scores + first * width, width, at[w.VALUE_CACHE], places, count, size, dims, sums + first * stride, stride,
            lines - first, kind)


@inlined
def _attend_long(at, item, scratch, kind, form):
    """Many lines: some keys at a time are turned, some values converted, and all lines multiplied with them."""
    lines, stride, dims, size = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4, at[w.HEAD_DIM], at[w.ROW_BYTES]
    places, scores, sums = scratch + at[w.PLACES], scratch + at[w.SCORES], scratch + at[w.SUMS]
    columns, rows, width = scratch + at[w.COLUMNS], scratch + at[w.LINES], w.TILE_KEYS * 4
    most = carray(pointer(scratch + at[w.GREATEST]), lines, float32)
    totals = carray(pointer(scratch + at[w.TOTALS]), lines, float32)
    most[:], totals[:] = NOTHING, float32(0)
    row_loops.fill(sums, float32(0), 0, _whole(lines, w.ROWS_AT_ONCE) * w.ROWS_AT_ONCE * at[w.PADDED])
    pairs = loops.in_pairs(kind, form)
    depth = 2 if pairs else 1  # numbers in a place
    _take_queries(at, item, lines, scratch, kind, form)
    for begin in range(item[w.BEGIN], item[w.END], w.TILE_KEYS):
        count = min(w.TILE_KEYS, item[w.END] - begin)
        _find(at, item, begin, begin + count, places, w.TILE_KEYS)
        if pairs:
            loops.transpose(at[w.KEY_CACHE], places, w.TILE_KEYS, size, dims // 2, columns, width, FLOAT32)
            loops.pair_up(at[w.VALUE_CACHE], places, w.TILE_KEYS, size, dims, rows, stride)
        else:
            loops.transpose(at[w.KEY_CACHE], places, w.TILE_KEYS, size, dims, columns, width, kind)
            loops.gather(at[w.VALUE_CACHE], places, w.TILE_KEYS, size, dims, rows, stride, kind)
        for first in range(0, lines, w.ROWS_AT_ONCE):
            loops.multiply(
                scratch + first * stride, stride, columns, width, scores + first * width, width, dims // depth,
                w.TILE_KEYS, float_of(at[w.SCALE]), kind, form)
        for line in range(lines):
            row = scores + line * width
            _hide(at, item, line, begin, count, row, w.TILE_KEYS)
            _follow(row, sums + line * stride, at[w.PADDED] // row_loops.lanes(), most, totals, line)
            if pairs:
                row_loops.shrink(row, w.TILE_KEYS // row_loops.lanes())
        for first in range(0, lines, w.ROWS_AT_ONCE):
            loops.multiply_add(
                scores + first * width, width, rows, stride, sums + first * stride, stride, w.TILE_KEYS // depth,
                at[w.PADDED], kind, form)


@called
def _follow(scores, sums, sum_vectors, most, totals, line):
    """The online softmax: the weights of more scores, and what was summed before brought to their greatest one."""
    vectors = w.TILE_KEYS // row_loops.lanes()
    greatest = max(most[line], row_loops.greatest(scores, vectors))
    shift = float32(0) if greatest == NOTHING else greatest
    if greatest != most[line]:
        factor = float32(math.exp(most[line] - shift))
        row_loops.scale(sums, factor, sum_vectors)
        totals[line] *= factor
        most[line] = greatest
    totals[line] += row_loops.exponentials(scores, vectors, shift)


@called
def _finish(at, item, scratch, kind):
    """Give out what an item has found; of an item of several parts, the last one to come merges all."""
    lines, stride, vectors = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4, at[w.PADDED] // row_loops.lanes()
    sums = scratch + at[w.SUMS]
    most = carray(pointer(scratch + at[w.GREATEST]), lines, float32)
    totals = carray(pointer(scratch + at[w.TOTALS]), lines, float32)
    if item[w.PARTS] > 1:
        # Of each part the sums of all lines, then their greatest scores, then their totals.
        size, first = lines * (stride + 8), at[w.PARTIALS] + item[w.PARTIAL] * 4
        mine = first + item[w.PART] * size
        copy(mine, sums, lines * stride)
        copy(mine + lines * stride, scratch + at[w.GREATEST], lines * 4)
        copy(mine + lines * (stride + 4), scratch + at[w.TOTALS], lines * 4)
        arrival = at[w.ARRIVALS] + item[w.ARRIVAL] * 8
        if fetch_add(arrival, 1) < item[w.PARTS] - 1:
            return
        fetch_add(arrival, -item[w.PARTS])  # for the next layer
        _merge(item[w.PARTS], lines, first, size, stride, sums, most, totals, vectors)
    for line in range(lines):
        target = _line_of(at, item, line, at[w.OUT], at[w.OUT_TOKEN], at[w.OUT_HEAD])
        row_loops.give(sums + line * stride, float32(1) / totals[line], target, at[w.HEAD_DIM], kind)


@called
def _merge(parts, lines, first, size, stride, sums, most, totals, vectors):
    """The parts' sums, in their order, each brought to the greatest score of all."""
    for line in range(lines):
        highest = NOTHING
        for part in range(parts):
            numbers = carray(pointer(first + part * size + lines * stride), 2 * lines, float32)
            highest = max(highest, numbers[line])
        totals[line] = float32(0)
        row_loops.fill(sums + line * stride, float32(0), 0, stride // 4)
        for part in range(parts):
            numbers = carray(pointer(first + part * size + lines * stride), 2 * lines, float32)
            if numbers[line] == NOTHING and numbers[lines + line] == 0:
                continue  # it sees none of them
            factor = float32(math.exp(numbers[line] - highest))
            totals[line] += factor * numbers[lines + line]
            row_loops.add(sums + line * stride, first + part * size + line * stride, factor, vectors)
