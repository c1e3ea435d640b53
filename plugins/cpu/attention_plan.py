"""How a step of attention is cut into items, once for all layers; :mod:`.attention_words` has the names of their words.

How a row is cut depends on the row alone. A part of its keys begins at a multiple of a size, so that as many partial
results are merged, in the same order, whoever computes them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import int64

from hotswap.plugins.cpu import attention_words as w
from hotswap.plugins.cpu.machine import called, int32_at, larger, smaller, words, words_at
from hotswap.plugins.cpu.team import Kernel


@called
def whole(amount, size):
    """How many times ``size`` covers ``amount``."""
    return (amount + size - 1) // size


@called
def item_at(at, number):
    return words_at(at[w.ITEMS] + number * w.NUM_FIELDS * 8)


@Kernel
def plan(data):
    """Cut a step into items. Where there is no room for them it counts on, and the host calls again with more."""
    at = words(data)
    starts = int32_at(at[w.STARTS])
    lengths = int32_at(at[w.LENGTHS])
    at[w.NUM_ITEMS] = at[w.NUM_PARTIALS] = at[w.NUM_ARRIVALS] = 0
    tile = larger(1, w.TILE_ROWS // at[w.GROUP])
    for long in (True, False):  # those that take long come first, so that no thread is left with one in the end
        for row in range(at[w.ROWS]):
            start, count = int64(starts[row]), int64(starts[row + 1] - starts[row])
            past = lengths[row] - count
            if (count * at[w.GROUP] > w.SHORT_ROWS) != long:
                continue
            if not long:
                _add_items(at, row, long, start, count, past, w.SHORT_PART)
                continue
            tiles = whole(count, tile)
            size = whole((past + count) * tiles, w.MOST_PARTS * w.LONG_PART) * w.LONG_PART
            for first in range((tiles - 1) * tile, -1, -tile):  # the last tile sees most keys
                _add_items(at, row, long, start + first, smaller(tile, count - first), past + first, size)


@called
def _add_items(at, row, long, token, count, position, size):
    """The items of ``count`` queries: for each key head the parts of ``size`` keys that the queries see."""
    begin, end = int64(0), position + count
    if at[w.WINDOW] > 0:
        begin = larger(0, position - at[w.WINDOW] + 1)
    first, parts = begin // size, (end - 1) // size - begin // size + 1
    room = count * at[w.GROUP] * (at[w.PADDED] + 2) if parts > 1 else int64(0)
    for part in range(parts):
        for head in range(at[w.KV_HEADS]):
            if at[w.NUM_ITEMS] < at[w.MAX_ITEMS]:
                item = item_at(at, at[w.NUM_ITEMS])
                item[w.ROW], item[w.LONG] = row, long
                item[w.TOKEN], item[w.COUNT], item[w.POSITION] = token, count, position
                item[w.HEAD], item[w.PART], item[w.PARTS] = head, part, parts
                item[w.BEGIN] = larger(begin, (first + part) * size)
                item[w.END] = smaller(end, (first + part + 1) * size)
                item[w.PARTIAL] = at[w.NUM_PARTIALS] + head * parts * room
                item[w.ARRIVAL] = at[w.NUM_ARRIVALS] + head
            at[w.NUM_ITEMS] += 1
    if parts > 1:
        at[w.NUM_PARTIALS] += at[w.KV_HEADS] * parts * room
        at[w.NUM_ARRIVALS] += at[w.KV_HEADS]
