"""The words of the kernels that multiply with quantised weights: the host fills them in, and the kernels read them, by
these names.

Weights lie in tiles of ``TILE`` output features, one behind the other, in the order in which they are read. A tile has
a block for each ``GROUP`` input features: for every four of them, or eight where numbers have 4 bits, the numbers of
all its output features; then their scales and, of 4-bit numbers, their least values, float16. A number q of 4 bits
stands for q * scale + least, one of 8 bits for (q - ``MIDDLE``) * scale. Four numbers of one output feature, then those
of the next one: that is what the processor multiplies at once. Where numbers have 4 bits, a byte has two: the high ones
are those of the four input features behind. Where numbers of 8 bits share their scale over spans of ``SPAN`` groups,
blocks have none: behind the tile's biases stand for each span the scales of its output features, float32.

Rows in 8 bits lie in blocks of ``ROWS``; what is left is a block of two, and one of one. A block has for each group its
rows' numbers, then for each row the scale, float32, then for each row what the sum of its numbers adds: with weights of
4 bits that times the scale, float32; with those of 8 bits that times -``MIDDLE``, int32. So all that a product reads of
them lies in one line.

Strides are in bytes.
"""

VECTOR = 16
"""Output features in a register."""

VECTORS = 3
"""Of a tile: with ``ROWS`` rows, their sums and totals fill the processor's registers."""

TILE = VECTORS * VECTOR

GROUP = 32
"""Weights of an output feature that share a scale; numbers of a row, too."""

SPAN = 6
"""Groups whose products are added up before they are scaled, of weights with a scale for so many."""

MIDDLE = 128
"""What stands for zero, of 8-bit weights."""

ROWS = 4
"""Of a block."""

ROW_BYTES = GROUP + 8
"""Of a row's group."""

PART = 16
"""Rows that a thread takes at least, of a tile: a multiple of ROWS."""

PARTS = 4
"""So many of them are multiplied with all tiles before the next ones: the nearest caches hold them."""

FEW = 8
"""Up to so many rows each thread brings to 8 bits for itself."""

REGIONS = 16
"""A thread begins with a region of its own of what is to be multiplied, which has no more than so many; it lies in one
piece, since finding another place in memory takes longer than reading on."""

(
    ORDER,  # threads that have begun
    TOKENS, THREADS, X, X_ROW,  # rows; threads that are at it
    NUMBERS,  # of the rows in 8 bits: [TOKENS, GROUPS, ROW_BYTES] bytes; up to FEW rows, one such for each thread
    OUT,
) = range(7)  # fmt: skip
"""What changes with each product, on one cache line, which another core gets at once."""

TAKEN, PREPARED, NEXT, LAYER = 8, 16, 24, 24 + 8 * REGIONS
"""Counters, each on a cache line of its own: rows that threads have taken to bring to 8 bits, rows that are ready, and
of each region what has been taken of it. They and ORDER begin at zero."""

(
    COUNTERS,  # where ORDER is
    SIZE, GROUPS,  # input features, and groups of them
    WEIGHTS,
    BIAS,  # float32, for whole tiles; of each tile, where blocks have no scales, those of spans come next
    OUT_ROW, OUT_SIZE,
    NUM_WORDS,
) = range(LAYER, LAYER + 8)  # fmt: skip
"""What stays the same."""


def block_bytes(bits: int, scales: bool = True) -> int:
    """Of a tile's group, which has ``scales`` or not."""
    return TILE * (GROUP * bits // 8 + (0 if not scales else 2 if bits == 8 else 4))
