"""A decoder's elementwise operators on a CPU: what the threads of a step do. :mod:`.operator_words` has the names of
their words.

Threads take rows, and each row is one thread's from beginning to end: equal input gives equal bits, with any neighbours
and any number of threads. What goes through memory twice in other libraries (a sum and its norm, a gate and its
product) goes once.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import numpy as np
from numba import float32

from hotswap.plugins.cpu import operator_loops as loops
from hotswap.plugins.cpu import operator_words as w
from hotswap.plugins.cpu.machine import fetch_add, float_of, inlined, words
from hotswap.plugins.cpu.team import Kernel

FLOAT32, BFLOAT16 = np.float32(0), np.uint16(0)
"""Kinds of numbers: see :mod:`.vectors`."""


@Kernel
def operate_float32(data):
    _operate(words(data), FLOAT32)


@Kernel
def operate_bfloat16(data):
    _operate(words(data), BFLOAT16)


@inlined
def _operate(at, kind):
    """One thread: row after row, as long as there are any."""
    while True:
        first = fetch_add(at[w.COUNTER], at[w.SHARE])
        if first >= at[w.TOKENS]:
            return
        for token in range(first, min(first + at[w.SHARE], at[w.TOKENS])):
            for head in range(at[w.HEADS]):
                _row(at, token, head, kind)


@inlined
def _row(at, token, head, kind):
    size = at[w.SIZE]
    x = at[w.X] + token * at[w.X_TOKEN] + head * at[w.X_HEAD]
    other, vector = at[w.OTHER] + token * at[w.OTHER_TOKEN], at[w.VECTOR] + token * at[w.VECTOR_TOKEN]
    out = at[w.OUT] + (token * at[w.HEADS] + head) * size * at[w.ITEMSIZE]
    if at[w.OPERATOR] == w.ROTATE:
        loops.rotate(x, other, vector, size, kind)
    elif at[w.OPERATOR] == w.GATE:
        loops.gate(x, out, size, kind)
    else:
        total = loops.squares(x, size, kind) if at[w.OPERATOR] == w.NORM else loops.add_squares(x, other, size, kind)
        factor = float32(1.0) / math.sqrt(total / float32(size) + float_of(at[w.EPS]))
        loops.scaled_by(x, factor, vector, out, size, kind)
