"""Products with quantised weights on a CPU: what the threads of a layer do. :mod:`.linear_words` has the names of their
words, and says how weights lie.

Rows are brought to 8 bits, in groups of 32 with a scale each, as llama.cpp does; then 8-bit numbers are multiplied with
the weights' 4-bit or 8-bit numbers, four at a time, exactly, and each group's sum is scaled. Four rows are multiplied
with the weights of three tiles at once, so that what is read is used several times, and those weights stay in the
nearest caches for the next rows; they are never stored in another form. What a row becomes does not depend on its
neighbours, their number, or the number of threads: equal input gives equal bits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import numpy as np

from hotswap.plugins.cpu import linear_loops as loops
from hotswap.plugins.cpu import linear_words as w
from hotswap.plugins.cpu.machine import fetch_add, inlined, pause, watch, words
from hotswap.plugins.cpu.team import Kernel

FLOAT32, BFLOAT16 = np.float32(0), np.uint16(0)
"""Kinds of numbers: see :mod:`.vectors`."""

BITS_4, BITS_8 = np.int8(0), np.uint8(0)
"""Forms of weights."""


@Kernel
def multiply_4_float32(data):
    _multiply(words(data), BITS_4, FLOAT32)


@Kernel
def multiply_4_bfloat16(data):
    _multiply(words(data), BITS_4, BFLOAT16)


@Kernel
def multiply_8_float32(data):
    _multiply(words(data), BITS_8, FLOAT32)


@Kernel
def multiply_8_bfloat16(data):
    _multiply(words(data), BITS_8, BFLOAT16)


@inlined
def _multiply(at, form, kind):
    """One thread: first rows are brought to 8 bits, and when all are, tiles are multiplied with them. Of what is left a
    thread takes a part, so that shares are large in the beginning, and in the end nobody waits for long."""
    counters, tokens = at[w.COUNTERS], at[w.TOKENS]
    while True:
        first = fetch_add(counters + 8 * w.TAKEN, w.ROWS)
        if first >= tokens:
            break
        count = min(w.ROWS, tokens - first)
        for token in range(first, first + count):
            block, rows = _block(token, tokens)
            loops.shrink(
                at[w.X] + token * at[w.X_ROW], at[w.SIZE], at[w.NUMBERS] + block * at[w.GROUPS] * w.ROW_BYTES,
                token - block, rows, form, kind)
        fetch_add(counters + 8 * w.PREPARED, count)
    tiles = (at[w.OUT_SIZE] + w.TILE - 1) // w.TILE
    total = (tokens + w.PART - 1) // w.PART * tiles
    while True:
        share = max(1, (total - watch(counters + 8 * w.NEXT)) // (2 * at[w.THREADS]))
        first = fetch_add(counters + 8 * w.NEXT, share)
        if first >= total:
            return
        while watch(counters + 8 * w.PREPARED) < tokens:  # whoever has the last row is at it
            pause()
        for part in range(first, min(first + share, total)):
            chunk = part // (tiles * w.PARTS)
            parts = min(w.PARTS, (tokens + w.PART - 1) // w.PART - chunk * w.PARTS)
            place = part - chunk * tiles * w.PARTS
            _part(at, place // parts, (chunk * w.PARTS + place % parts) * w.PART, form, kind)


@inlined
def _block(token, tokens):
    """The first row of the block that has this one, and how many rows it has."""
    whole = tokens // w.ROWS * w.ROWS
    if token < whole:
        return token // w.ROWS * w.ROWS, w.ROWS
    if tokens - whole >= 2 and token < whole + 2:
        return whole, 2
    return token, 1


@inlined
def _part(at, tile, token, form, kind):
    """Some rows times a tile's weights. Meanwhile the next tile's come near, a piece with each block of rows."""
    tokens, groups, size = at[w.TOKENS], at[w.GROUPS], loops.bytes_of_block(form)
    count = min(w.TILE, at[w.OUT_SIZE] - tile * w.TILE)
    weights = at[w.WEIGHTS] + tile * size * groups
    bias = at[w.BIAS] + tile * w.TILE * 4
    out = at[w.OUT] + tile * w.TILE * loops.bytes_of(kind)
    chunk = token // (w.PART * w.PARTS) * w.PART * w.PARTS
    rows = min(w.PART * w.PARTS, tokens - chunk)
    blocks = rows // w.ROWS + (rows % w.ROWS + 1) // 2
    ahead_step, apart, ahead = size // blocks, 64 // blocks, weights
    if blocks > 1:  # else all comes as fast as it can, and what is asked for ahead is in its way
        ahead += (size + (token - chunk) // w.ROWS * ahead_step) * groups
    end = min(token + w.PART, tokens)
    while token < end:
        _, rows = _block(token, tokens)
        numbers, target = at[w.NUMBERS] + token * groups * w.ROW_BYTES, out + token * at[w.OUT_ROW]
        if rows == 4:
            loops.multiply(
                numbers, groups, weights, ahead, ahead_step, apart, bias, target, at[w.OUT_ROW], count, 4,
                form, kind)
        elif rows == 2:
            loops.multiply(
                numbers, groups, weights, ahead, ahead_step, apart, bias, target, at[w.OUT_ROW], count, 2,
                form, kind)
        else:
            loops.multiply(
                numbers, groups, weights, ahead, ahead_step, apart, bias, target, at[w.OUT_ROW], count, 1,
                form, kind)
        token, ahead = token + rows, ahead + ahead_step * groups
