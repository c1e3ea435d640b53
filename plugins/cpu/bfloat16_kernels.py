"""Products with bfloat16 weights on a CPU: what the threads of a layer do. :mod:`.bfloat16_words` has the names of
their words, and says how weights lie.

Weights are read once for up to eight rows, from the nearest cache for the others. What a row becomes does not depend on
its neighbours, their number, or the number of threads: equal input gives equal bits.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from hotswap.plugins.cpu import bfloat16_loops as loops
from hotswap.plugins.cpu import bfloat16_words as w
from hotswap.plugins.cpu.machine import fetch_add, inlined, words
from hotswap.plugins.cpu.team import Kernel


@Kernel
def multiply_bfloat16(data):
    """One thread: some rows times some tiles, until there are none left."""
    at = words(data)
    tokens, tiles = at[w.TOKENS], at[w.TILES]
    blocks = (tokens + at[w.ITEM_ROWS] - 1) // at[w.ITEM_ROWS]
    items = (tiles + at[w.ITEM_TILES] - 1) // at[w.ITEM_TILES] * blocks
    while True:
        item = fetch_add(at[w.COUNTERS] + 8 * w.NEXT, 1)
        if item >= items:
            return
        # The same tiles with other rows come next: they are still in a cache.
        tile, token = item // blocks * at[w.ITEM_TILES], item % blocks * at[w.ITEM_ROWS]
        stop = min(token + at[w.ITEM_ROWS], tokens)
        for each in range(tile, min(tile + at[w.ITEM_TILES], tiles)):
            _multiply(at, each, token, stop)


@inlined
def _multiply(at, tile, token, stop):
    """Rows from ``token`` to before ``stop`` times one tile's weights, eight rows at a time."""
    pairs, count = at[w.PAIRS], min(w.TILE, at[w.OUT_SIZE] - tile * w.TILE)
    vectors = (count + w.VECTOR - 1) // w.VECTOR
    weights, bias = at[w.WEIGHTS] + tile * pairs * w.TILE * 4, at[w.BIAS] + tile * at[w.BIAS_TILE]
    while token < stop:
        left = stop - token
        x = at[w.X] + token * at[w.X_ROW]
        out = at[w.OUT] + token * at[w.OUT_ROW] + tile * w.TILE * 2
        if left > 4:
            loops.multiply(x, at[w.X_ROW], left, weights, vectors, pairs, bias, out, at[w.OUT_ROW], count, 8)
        elif left > 2:
            loops.multiply(x, at[w.X_ROW], left, weights, vectors, pairs, bias, out, at[w.OUT_ROW], count, 4)
        elif left > 1:
            loops.multiply(x, at[w.X_ROW], left, weights, vectors, pairs, bias, out, at[w.OUT_ROW], count, 2)
        else:
            loops.multiply(x, at[w.X_ROW], left, weights, vectors, pairs, bias, out, at[w.OUT_ROW], count, 1)
        token += 8
