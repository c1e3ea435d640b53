"""Products with quantised weights on a CPU: what the threads of a layer do. :mod:`.linear_words` has the names of their
words, and says how weights lie.

Rows are brought to 8 bits, in groups of 32 with a scale each, as llama.cpp does; then 8-bit numbers are multiplied with
the weights' 4-bit or 8-bit numbers, four at a time, exactly, and each group's sum is scaled. Weights are read once for
up to eight rows and stay in the nearest cache for the others; they are never stored in another form. What a row becomes
does not depend on its neighbours, their number, or the number of threads: equal input gives equal bits.
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
    """One thread: first rows are brought to 8 bits, and when all are, tiles are multiplied with them."""
    counters, tokens, groups = at[w.COUNTERS], at[w.TOKENS], at[w.GROUPS]
    while True:
        token = fetch_add(counters + 8 * w.TAKEN, 1)
        if token >= tokens:
            break
        loops.shrink(
            at[w.X] + token * at[w.X_ROW], at[w.SIZE], at[w.NUMBERS] + token * groups * w.GROUP,
            at[w.SCALES] + token * groups * 4, at[w.SUMS] + token * groups * 4, kind)
        fetch_add(counters + 8 * w.PREPARED, 1)
    while True:
        first = fetch_add(counters + 8 * w.NEXT, at[w.SHARE])
        if first >= at[w.TILES]:
            return
        while watch(counters + 8 * w.PREPARED) < tokens:  # whoever has the last row is at it
            pause()
        for tile in range(first, min(first + at[w.SHARE], at[w.TILES])):
            _tile(at, tile, form, kind)


@inlined
def _tile(at, tile, form, kind):
    """All rows times one tile's weights, eight rows at a time."""
    token, left = 0, at[w.TOKENS]
    groups, count = at[w.GROUPS], min(w.TILE, at[w.OUT_SIZE] - tile * w.TILE)
    weights = at[w.WEIGHTS] + tile * groups * loops.bytes_of_block(form)
    bias, out = at[w.BIAS] + tile * w.TILE * 4, at[w.OUT] + tile * w.TILE * loops.bytes_of(kind)
    while left > 0:
        numbers, scales = at[w.NUMBERS] + token * groups * w.GROUP, at[w.SCALES] + token * groups * 4
        sums, target = at[w.SUMS] + token * groups * 4, out + token * at[w.OUT_ROW]
        if left >= 8:
            loops.multiply(
                numbers, scales, sums, groups, weights, bias, target, at[w.OUT_ROW], count, 8, form, kind)
            done = 8
        elif left >= 4:
            loops.multiply(
                numbers, scales, sums, groups, weights, bias, target, at[w.OUT_ROW], count, 4, form, kind)
            done = 4
        elif left >= 2:
            loops.multiply(
                numbers, scales, sums, groups, weights, bias, target, at[w.OUT_ROW], count, 2, form, kind)
            done = 2
        else:
            loops.multiply(
                numbers, scales, sums, groups, weights, bias, target, at[w.OUT_ROW], count, 1, form, kind)
            done = 1
        token, left = token + done, left - done
