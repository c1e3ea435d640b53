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
from hotswap.plugins.cpu.linear_rows import shrink
from hotswap.plugins.cpu.machine import fetch_add, inlined, pause, watch, words
from hotswap.plugins.cpu.team import Kernel

FLOAT32, BFLOAT16 = np.float32(0), np.uint16(0)
"""Kinds of numbers: see :mod:`.vectors`."""

BITS_4, BITS_8, SPANS = np.int8(0), np.uint8(0), np.uint16(0)
"""Forms of weights; SPANS: 8 bits, with scales for spans of groups."""


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


@Kernel
def multiply_spans_float32(data):
    _multiply(words(data), SPANS, FLOAT32)


@Kernel
def multiply_spans_bfloat16(data):
    _multiply(words(data), SPANS, BFLOAT16)


@inlined
def _multiply(at, form, kind):
    """One thread: first rows are brought to 8 bits, and then tiles are multiplied with them: those of its own region,
    one behind the other, and when there are none left, those of others."""
    counters, tokens, row_bytes = at[w.COUNTERS], at[w.TOKENS], at[w.GROUPS] * w.ROW_BYTES
    own, regions = fetch_add(counters + 8 * w.ORDER, 1), min(at[w.THREADS], w.REGIONS)
    tiles, all_parts = (at[w.OUT_SIZE] + w.TILE - 1) // w.TILE, (tokens + w.PART - 1) // w.PART
    if all_parts <= w.PARTS:  # what it begins with, while it is busy with rows
        loops.approach(
            at[w.WEIGHTS] + tiles * (own % regions) // regions * at[w.GROUPS] * loops.bytes_of_block(form))
    alone = tokens <= w.FEW  # then it does so for itself: sooner than it would hear from the others
    numbers = at[w.NUMBERS] + (own * tokens * row_bytes if alone else 0)
    first = 0 if alone else fetch_add(counters + 8 * w.TAKEN, w.ROWS)
    while first < tokens:
        count = min(w.ROWS, tokens - first)
        for place in range(count):
            rows = w.ROWS if count == w.ROWS else 2 if place < count // 2 * 2 else 1
            block = first + place // rows * rows
            shrink(
                at[w.X] + (first + place) * at[w.X_ROW], at[w.SIZE], numbers + block * row_bytes, place % rows, rows,
                form, kind)
        if alone:
            first += w.ROWS
        else:
            fetch_add(counters + 8 * w.PREPARED, count)
            first = fetch_add(counters + 8 * w.TAKEN, w.ROWS)
    while not alone and watch(counters + 8 * w.PREPARED) < tokens:  # whoever has the last rows is at it
        pause()
    for i in range(regions):
        region = (own + i) % regions
        begin, end = all_parts * tiles * region // regions, all_parts * tiles * (region + 1) // regions
        while True:
            part = begin + fetch_add(counters + 8 * (w.NEXT + 8 * region), 1)
            if part >= end:
                break
            chunk = part // (tiles * w.PARTS)
            parts, place = min(w.PARTS, all_parts - chunk * w.PARTS), part - chunk * tiles * w.PARTS
            _part(at, numbers, place // parts, (chunk * w.PARTS + place % parts) * w.PART, form, kind)


@inlined
def _part(at, numbers, tile, token, form, kind):
    """Some rows times a tile's weights. Meanwhile the next tile's come near, a piece with each block of rows."""
    tokens, groups, size = at[w.TOKENS], at[w.GROUPS], loops.bytes_of_block(form)
    count = min(w.TILE, at[w.OUT_SIZE] - tile * w.TILE)
    weights = at[w.WEIGHTS] + tile * size * groups
    bias = at[w.BIAS] + tile * loops.bytes_of_bias(groups, form)
    out = at[w.OUT] + tile * w.TILE * loops.bytes_of(kind)
    chunk = token // (w.PART * w.PARTS) * w.PART * w.PARTS
    rows = min(w.PART * w.PARTS, tokens - chunk)
    blocks = rows // w.ROWS + (rows % w.ROWS + 1) // 2
    ahead_step, apart, ahead = size // blocks, 64 // blocks, weights
    if blocks > 1:  # else all comes as fast as it can, and what is asked for ahead is in its way
        ahead += (size + (token - chunk) // w.ROWS * ahead_step) * groups
    end = min(token + w.PART, tokens)
    while token < end:
        block, target, left = numbers + token * groups * w.ROW_BYTES, out + token * at[w.OUT_ROW], end - token
        if left >= 4:
            loops.multiply(
                block, groups, weights, ahead, ahead_step, apart, bias, target, at[w.OUT_ROW], count, 4, form, kind)
            rows = 4
        elif left >= 2:
            loops.multiply(
                block, groups, weights, ahead, ahead_step, apart, bias, target, at[w.OUT_ROW], count, 2, form, kind)
            rows = 2
        else:
            loops.multiply(
                block, groups, weights, ahead, ahead_step, apart, bias, target, at[w.OUT_ROW], count, 1, form, kind)
            rows = 1
        token, ahead = token + rows, ahead + ahead_step * groups
