"""Paged attention on a CPU: what a step's threads do. :mod:`.attention_words` has the names of their words.

FlashAttention's online softmax (Dao et al. 2022, arXiv:2205.14135) over pages that are read where they lie
(PagedAttention, Kwon et al. 2023, arXiv:2309.06180), with the keys of a row divided among the threads as in
Flash-Decoding (Dao, Haziza, Massa, Sizov 2023). :mod:`.attention_plan` cuts a step into items, once for all layers:
some queries of a row, one key head, and a part of the row's keys. How a row is cut depends on the row alone, and
partial results are merged in the order of the keys, whoever computes them: equal input gives equal bits, with any
neighbours and any number of threads.

An item packs the query heads that share a key head beside the queries: line i is query i // G and head i % G.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np
from numba import float32

from hotswap.plugins.cpu import attention_loops as loops
from hotswap.plugins.cpu import attention_products as products
from hotswap.plugins.cpu import attention_words as w
from hotswap.plugins.cpu import row_loops
from hotswap.plugins.cpu.attention_places import (
    ask_for_keys,
    ask_for_spared,
    ask_for_tile,
    clear_pages,
    find,
    find_all,
    line_of,
    position,
    write_tokens,
)
from hotswap.plugins.cpu.attention_plan import item_at, plan, whole
from hotswap.plugins.cpu.attention_softmax import LEAST, soften, softmax
from hotswap.plugins.cpu.machine import (
    called,
    clear,
    copy,
    fetch_add,
    float32_at,
    float_of,
    inlined,
    larger,
    pause,
    smaller,
    watch,
    words,
)
from hotswap.plugins.cpu.team import Kernel

__all__ = [
    "attend_bfloat16", "attend_bfloat16_64", "attend_bfloat16_128", "attend_bfloat16_odd", "attend_float16",
    "attend_float32", "plan"]

FLOAT32, BFLOAT16, FLOAT16 = np.float32(0), np.uint16(0), np.int16(0)
"""Kinds of numbers: see :mod:`.vectors`."""

NOTHING = np.float32(-np.inf)
"""The score of a key that a query does not see."""

PAIRS, SINGLES = (np.uint8(0),), (np.int8(0),)
PAIRS_64, PAIRS_128 = PAIRS * 5, PAIRS * 9
"""Forms of products, told by their types: see :mod:`.attention_loops`."""


@Kernel
def attend_float32(data):
    _attend(words(data), FLOAT32, SINGLES)


@Kernel
def attend_bfloat16(data):
    _attend(words(data), BFLOAT16, PAIRS)


@Kernel
def attend_bfloat16_64(data):
    _attend(words(data), BFLOAT16, PAIRS_64)


@Kernel
def attend_bfloat16_128(data):
    _attend(words(data), BFLOAT16, PAIRS_128)


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
    places, later = scratch + at[w.PLACES], scratch + at[w.PLACES] + w.ROOM * 8
    blocks = whole(at[w.TOKENS], w.WRITE_TOKENS) + 1
    end = blocks + at[w.NUM_ITEMS]
    near = False  # whether memory has been asked for the item at hand
    work = fetch_add(counters + 8 * w.NEXT, 1)
    while work < end:
        if work < blocks:
            if work == 0:
                clear_pages(at)
            else:
                write_tokens(at, (work - 1) * w.WRITE_TOKENS)
            fetch_add(counters + 8 * w.WRITTEN, 1)
            work = fetch_add(counters + 8 * w.NEXT, 1)
            continue
        item = item_at(at, work - blocks)
        if not item[w.LONG] and not near:
            find_all(at, item, places)
            ask_for_keys(at, item, places, 0)
        while watch(counters + 8 * w.WRITTEN) < blocks:  # whoever writes the last block is at it
            pause()
        if item[w.LONG]:
            _attend_long(at, item, scratch, places, later, kind, form)
            work = fetch_add(counters + 8 * w.NEXT, 1)
        else:
            _score_short(at, item, scratch, places, kind, form)
            work = fetch_add(counters + 8 * w.NEXT, 1)
            near = work < end  # it is of a short row, too: these come last
            if near:
                find_all(at, item_at(at, work - blocks), later)
            _weigh_short(at, item, scratch, places, later if near else places, kind, form)
            if near:
                ask_for_keys(at, item_at(at, work - blocks), later, smaller(item[w.END] - item[w.BEGIN], w.AHEAD))
                ask_for_spared(at, at[w.KEY_CACHE], later, item[w.END] - item[w.BEGIN], 0, 2)
            places, later = later, places
        _finish(at, item, scratch, kind)
        if near:
            ask_for_spared(at, at[w.KEY_CACHE], places, item[w.END] - item[w.BEGIN], 2, 4)


@called
def _hide(at, item, line, begin, count, scores, room):
    """Squash a line's scores of the ``count`` keys from ``begin`` on, and hide those that its query does not see."""
    if at[w.SOFTCAP] != 0:
        row_loops.squash(scores, room // row_loops.lanes(), float_of(at[w.SOFTCAP]), float_of(at[w.MOST_SCORE]))
    last = position(at, item, line)
    if at[w.WINDOW] > 0:
        row_loops.fill(scores, NOTHING, 0, smaller(room, larger(0, last - at[w.WINDOW] + 1 - begin)))
    row_loops.fill(scores, NOTHING, larger(0, smaller(count, last + 1 - begin)), room)


@called
def _take_queries(at, item, lines, scratch, kind, form):
    """As rows of float32; of pairs of bfloat16 as they are, with zeros behind them, since nobody writes there."""
    for line in range(lines):
        query = line_of(at, item, line, at[w.QUERIES], at[w.Q_TOKEN], at[w.Q_HEAD])
        if loops.in_pairs(kind, form):
            copy(scratch + line * at[w.PADDED] * 4, query, at[w.ROW_BYTES])
        else:
            row_loops.take(query, at[w.HEAD_DIM], float32(1), scratch + line * at[w.PADDED] * 4, kind)


@inlined
def _score_short(at, item, scratch, places, kind, form):
    """Few lines: keys and values are read once for up to four of them, and never stored in another form."""
    lines, stride, width = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4, w.SHORT_PART * 4
    scores, begin, count = scratch + at[w.SCORES], item[w.BEGIN], item[w.END] - item[w.BEGIN]
    columns = whole(count, row_loops.lanes()) * row_loops.lanes()
    _take_queries(at, item, lines, scratch, kind, form)
    for first in range(0, lines, 4):
        loops.score(
            scratch + first * stride, stride, at[w.KEY_CACHE], places, count, at[w.HEAD_DIM],
            scores + first * width, width, float_of(at[w.SCALE]), lines - first, at[w.VALUE_CACHE], kind, form)
    for line in range(lines):
        if line < 3:
            ask_for_spared(at, at[w.VALUE_CACHE], places, count, line, line + 1)
        row = scores + line * width
        _hide(at, item, line, begin, count, row, columns)
        softmax(row, columns, scratch + at[w.GREATEST] + line * 4, scratch + at[w.TOTALS] + line * 4, kind, form)
    ask_for_spared(at, at[w.VALUE_CACHE], places, count, smaller(lines, 3), 4)


@inlined
def _weigh_short(at, item, scratch, places, later, kind, form):
    lines, stride, width = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4, w.SHORT_PART * 4
    scores, sums, lanes = scratch + at[w.SCORES], scratch + at[w.SUMS], row_loops.lanes()
    count = whole(item[w.END] - item[w.BEGIN], lanes) * lanes
    for first in range(0, lines, 4):
        loops.weigh(
            scores + first * width, width, at[w.VALUE_CACHE], places, count, at[w.HEAD_DIM],
            sums + first * stride, stride, lines - first, at[w.KEY_CACHE], later, kind, form)


@inlined
def _attend_long(at, item, scratch, places, later, kind, form):
    """Many lines: some keys at a time are turned, some values converted, and all lines multiplied with them."""
    lines, stride = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4
    lane_totals, totals = scratch + at[w.LANE_TOTALS], float32_at(scratch + at[w.TOTALS])
    groups = whole(lines, w.ROWS_AT_ONCE)
    share = whole(w.TILE_KEYS, groups)  # of the next keys, asked for by each group of lines
    row_loops.fill(scratch + at[w.GREATEST], LEAST, 0, lines)
    clear(scratch + at[w.SUMS], groups * w.ROWS_AT_ONCE * stride)
    clear(lane_totals, lines * row_loops.lanes() * 4)
    _take_queries(at, item, lines, scratch, kind, form)
    find(at, item, item[w.BEGIN], smaller(item[w.END], item[w.BEGIN] + w.TILE_KEYS), places, w.TILE_KEYS)
    ask_for_tile(at, places, w.TILE_KEYS)
    for begin in range(item[w.BEGIN], item[w.END], w.TILE_KEYS):
        end = smaller(begin + w.TILE_KEYS, item[w.END])
        _turn(at, places, whole(end - begin, row_loops.lanes()) * row_loops.lanes(), scratch, kind, form)
        if end < item[w.END]:
            find(at, item, end, smaller(end + w.TILE_KEYS, item[w.END]), later, share * groups)
        for group in range(groups):
            if end < item[w.END]:
                ask_for_tile(at, later + group * share * 8, share)
            first = group * w.ROWS_AT_ONCE
            some = smaller(w.ROWS_AT_ONCE, lines - first)
            early, late = position(at, item, first), position(at, item, first + some - 1)
            if begin <= late and (at[w.WINDOW] == 0 or early - at[w.WINDOW] + 1 < end):  # one of them sees a key
                _attend_tile(at, item, scratch, first, some, early, late, begin, end, kind, form)
        places, later = later, places
    for line in range(lines):
        totals[line] = row_loops.total(lane_totals + line * row_loops.lanes() * 4)


@called
def _turn(at, places, count, scratch, kind, form):
    """The keys at ``places`` as columns, and the values as rows; where they are multiplied in pairs, in pairs."""
    columns, rows = scratch + at[w.COLUMNS], scratch + at[w.LINES]
    dims, width, stride = at[w.HEAD_DIM], w.TILE_KEYS * 4, at[w.PADDED] * 4
    if loops.in_pairs(kind, form):
        products.transpose(at[w.KEY_CACHE], places, count, dims // 2, columns, width, FLOAT32, form)
        products.pair_up(at[w.VALUE_CACHE], places, count, dims, rows, stride, form)
    else:
        products.transpose(at[w.KEY_CACHE], places, count, dims, columns, width, kind, form)
        products.gather(at[w.VALUE_CACHE], places, count, dims, rows, stride, kind)


@called
def _attend_tile(at, item, scratch, first, some, early, late, begin, end, kind, form):
    """``some`` lines from ``first`` on, their queries at the positions from ``early`` to ``late``, and the keys from
    ``begin`` to before ``end``. Keys behind ``late``, which none of the lines sees, are left out."""
    lanes, stride, width = row_loops.lanes(), at[w.PADDED] * 4, w.TILE_KEYS * 4
    depth = 2 if loops.in_pairs(kind, form) else 1  # numbers in a place
    scores, sums = scratch + at[w.SCORES] + first * width, scratch + at[w.SUMS] + first * stride
    seen = whole(smaller(end, late + 1) - begin, lanes) * lanes
    products.multiply(
        scratch + first * stride, stride, scratch + at[w.COLUMNS], width, scores, width, at[w.HEAD_DIM] // depth, seen,
        float_of(at[w.SCALE]), kind, form)
    if begin + seen > smaller(end, early + 1) or at[w.SOFTCAP] != 0 or (
            at[w.WINDOW] > 0 and begin <= late - at[w.WINDOW]):
        for line in range(some):
            _hide(at, item, first + line, begin, end - begin, scores + line * width, seen)
    soften(
        scores, width, some, seen, scratch + at[w.GREATEST] + first * 4,
        scratch + at[w.LANE_TOTALS] + first * lanes * 4, sums, stride, at[w.PADDED], kind, form)
    products.multiply_add(
        scores, width, scratch + at[w.LINES], stride, sums, stride, seen // depth, at[w.PADDED], kind, form)


@called
def _finish(at, item, scratch, kind):
    """Give out what an item has found; of an item of several parts, the last one to come merges all."""
    lines, stride, vectors = item[w.COUNT] * at[w.GROUP], at[w.PADDED] * 4, at[w.PADDED] // row_loops.lanes()
    sums = scratch + at[w.SUMS]
    most = float32_at(scratch + at[w.GREATEST])
    totals = float32_at(scratch + at[w.TOTALS])
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
        target = line_of(at, item, line, at[w.OUT], at[w.OUT_TOKEN], at[w.OUT_HEAD])
        row_loops.give(sums + line * stride, float32(1) / totals[line], target, at[w.HEAD_DIM], kind)


@called
def _merge(parts, lines, first, size, stride, sums, most, totals, vectors):
    """The parts' sums, in their order, each brought to the greatest score of all."""
    for line in range(lines):
        highest = LEAST
        for part in range(parts):
            numbers = float32_at(first + part * size + lines * stride)
            highest = larger(highest, numbers[line])
        totals[line] = float32(0)
        row_loops.fill(sums + line * stride, float32(0), 0, stride // 4)
        for part in range(parts):
            numbers = float32_at(first + part * size + lines * stride)
            if numbers[lines + line] == 0:
                continue  # it sees none of them
            factor = row_loops.power(numbers[line] - highest)
            totals[line] += factor * numbers[lines + line]
            row_loops.add(sums + line * stride, first + part * size + line * stride, factor, vectors)
