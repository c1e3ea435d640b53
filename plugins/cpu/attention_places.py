"""Where the keys, values, queries and results of attention lie, and the writing of new ones into their pages."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from numba import int64

from hotswap.plugins.cpu import attention_loops as loops
from hotswap.plugins.cpu import attention_words as w
from hotswap.plugins.cpu.attention_plan import whole
from hotswap.plugins.cpu.machine import called, clear, copy, int32_at, larger, smaller, words_at
from hotswap.plugins.cpu.vectors import BLOCK


@called
def _slot(at, token, head):
    """Where the new vector of a token and head goes."""
    slot = words_at(at[w.SLOTS])[token]
    page, offset = slot // at[w.PAGE_SIZE], slot % at[w.PAGE_SIZE]
    return ((page * at[w.KV_HEADS] + head) * at[w.PAGE_SIZE] + offset) * at[w.ROW_BYTES]


@called
def write_tokens(at, first):
    """The keys and values of some tokens to their slots. Memory is asked for all of these first."""
    size, end = at[w.ROW_BYTES], smaller(first + w.WRITE_TOKENS, at[w.TOKENS])
    for token in range(first, end):
        for head in range(at[w.KV_HEADS]):
            there = _slot(at, token, head)
            loops.ask_for(at[w.KEY_CACHE] + there, size)
            loops.ask_for(at[w.VALUE_CACHE] + there, size)
    for token in range(first, end):
        for head in range(at[w.KV_HEADS]):
            there = _slot(at, token, head)
            copy(at[w.KEY_CACHE] + there, at[w.KEYS] + token * at[w.K_TOKEN] + head * at[w.K_HEAD], size)
            copy(at[w.VALUE_CACHE] + there, at[w.VALUES] + token * at[w.V_TOKEN] + head * at[w.V_HEAD], size)


@called
def clear_pages(at):
    """Zeros behind the last tokens of rows that begin a page: backends that read pages to their ends may go on."""
    starts = int32_at(at[w.STARTS])
    lengths = int32_at(at[w.LENGTHS])
    table = int32_at(at[w.TABLE])
    page_size, size = at[w.PAGE_SIZE], at[w.ROW_BYTES]
    for row in range(at[w.ROWS]):
        last, used = (lengths[row] - 1) // page_size, lengths[row] % page_size
        if used > 0 and lengths[row] - (starts[row + 1] - starts[row]) <= last * page_size:
            for head in range(at[w.KV_HEADS]):
                page = int64(table[row * at[w.TABLE_WIDTH] + last])
                there = ((page * at[w.KV_HEADS] + head) * page_size + used) * size
                clear(at[w.KEY_CACHE] + there, (page_size - used) * size)
                clear(at[w.VALUE_CACHE] + there, (page_size - used) * size)


@called
def line_of(at, item, line, base, token_stride, head_stride):
    """Where a line of the item lies in a tensor of queries or results."""
    token, head = item[w.TOKEN] + line // at[w.GROUP], item[w.HEAD] * at[w.GROUP] + line % at[w.GROUP]
    return base + token * token_stride + head * head_stride


@called
def find(at, item, begin, end, places, room):
    """The places of an item's keys from ``begin`` to before ``end``; the last one again as far as there is ``room``."""
    size = at[w.PAGE_SIZE]
    table = int32_at(at[w.TABLE] + item[w.ROW] * at[w.TABLE_WIDTH] * 4)
    page, offset = begin // size, begin % size
    filled = 0
    while filled < end - begin:
        base = (int64(table[page]) * at[w.KV_HEADS] + item[w.HEAD]) * size
        stop = smaller(size, offset + end - begin - filled)
        loops.count_on(places + filled * 8, stop - offset, (base + offset) * at[w.ROW_BYTES], at[w.ROW_BYTES])
        filled += stop - offset
        page, offset = page + 1, 0
    last = words_at(places)[filled - 1]
    loops.count_on(places + filled * 8, room - filled, last, 0)


@called
def find_all(at, item, places):
    """The places of an item's keys, to whole vectors, and as far as memory may be asked for them."""
    count = item[w.END] - item[w.BEGIN]
    find(at, item, item[w.BEGIN], item[w.END], places, larger(whole(count, 16) * 16, w.AHEAD))


@called
def ask_for_keys(at, item, places, asked):
    """Have the first keys on their way, but for those ``asked`` for before."""
    first = smaller(item[w.END] - item[w.BEGIN], w.AHEAD)
    if first > asked:
        loops.approach(at[w.KEY_CACHE], places + asked * 8, first - asked, at[w.ROW_BYTES])


@called
def ask_for_spared(at, base, places, count, quarter, end):
    """Of what loops over ``count`` keys or values leave to be asked for between them (``SPARED``), some quarters."""
    count = whole(count, 16) * 16
    last, near = count - BLOCK, smaller(count, w.AHEAD)
    asked = larger(0, near - last + (last - last // w.SPARED) // BLOCK * BLOCK)
    first, stop = asked + (near - asked) * quarter // 4, asked + (near - asked) * end // 4
    loops.approach(base, places + first * 8, stop - first, at[w.ROW_BYTES])


@called
def ask_for_tile(at, places, count):
    """Have ``count`` keys and values on their way."""
    loops.approach(at[w.KEY_CACHE], places, count, at[w.ROW_BYTES])
    loops.approach(at[w.VALUE_CACHE], places, count, at[w.ROW_BYTES])


@called
def position(at, item, line):
    return item[w.POSITION] + line // at[w.GROUP]
