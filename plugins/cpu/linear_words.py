"""The words of the kernels that multiply with quantised weights: the host fills them in, and the kernels read them, by
these names.

Weights lie in tiles of ``TILE`` output features, one behind the other, in the order in which they are read. A tile has
a block for each ``GROUP`` input features: for every four of them, or eight where numbers have 4 bits, the numbers of
all its output features, and then their scales, float16. A number q of 8 bits stands for (q - ``MIDDLE``) * scale, one
of 4 bits for q * scale and a least value. Four numbers of one output feature, then those of the next one: that is what
the processor multiplies at once. Where numbers have 4 bits, a byte has two: the high ones are those of the four input
features behind.

Least values are int16, since the processor multiplies two such at once, and no floating-point numbers. A tile begins
with what one stands for, float32 for each output feature; then come, for every two groups, those of all its output
features, two by two; then the blocks. The greatest of an output feature becomes ``largest_least``.

Rows in 8 bits lie in blocks of ``ROWS``; what is left is a block of two, and one of one. A block has for each group
its rows' numbers, and then their scales, float32. With weights of 8 bits it has behind them for each row the sum of its
numbers times -``MIDDLE``, int32. With weights of 4 bits it begins with the sums, as tiles do with least values: for
each row what one stands for, the greatest becoming ``LARGEST_SUM``, then for every two groups those of all rows, int16,
two by two. So all that a product reads of rows lies in one line.

Strides are in bytes.
"""

VECTOR = 16
"""Output features in a register."""

VECTORS = 3
"""Of a tile: with ``ROWS`` rows, their sums and totals fill the processor's registers."""

TILE = VECTORS * VECTOR

GROUP = 32
"""Weights of an output feature that share a scale; numbers of a row, too."""

MIDDLE = 128
"""What stands for zero, of 8-bit weights."""

ROWS = 4
"""Of a block."""

LARGEST_SUM = (1 << 14) - 1
"""Of a row, in steps of which its groups' sums are multiplied with least values."""

SUMMED = 16
"""Pairs of groups whose products of sums and least values are added up before they become float32."""

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
    NUMBERS,  # of the rows in 8 bits, ROW_BYTES each; up to FEW rows, for each thread
    BETWEEN,  # for each thread SHRINK_BYTES
    OUT,
) = range(8)  # fmt: skip
"""What changes with each product, on one cache line, which another core gets at once."""

TAKEN, PREPARED, NEXT, LAYER = 8, 16, 24, 24 + 8 * REGIONS
"""Counters, each on a cache line of its own: rows that threads have taken to bring to 8 bits, rows that are ready, and
of each region what has been taken of it. They and ORDER begin at zero."""

(
    COUNTERS,  # where ORDER is
    SIZE, GROUPS,  # input features, and groups of them
    ROW_BYTES, SHRINK_BYTES,
    WEIGHTS, TILE_BYTES,
    BIAS,  # float32, for whole tiles
    OUT_ROW, OUT_SIZE,
    NUM_WORDS,
) = range(LAYER, LAYER + 11)  # fmt: skip
"""What stays the same."""


def block_bytes(bits: int) -> int:
    """Of a tile's group."""
    return TILE * (GROUP * bits // 8 + 2)


def tile_bytes(bits: int, groups: int) -> int:
    return groups * block_bytes(bits) + (4 * TILE * (1 + (groups + 1) // 2) if bits == 4 else 0)


def row_bytes(bits: int, groups: int) -> int:
    """Of a row in 8 bits, its part of the block's beginning counted."""
    return groups * (GROUP + 8) if bits == 8 else groups * (GROUP + 4) + 4 * (1 + (groups + 1) // 2)


def shrink_bytes(groups: int) -> int:
    """Of memory that a thread needs while it brings a row to 8 bits: some of the row in float32, two for each group."""
    return 4 * (4 * GROUP + 2 * -(-groups // VECTOR) * VECTOR)


def largest_least(groups: int) -> int:
    """So that products of as many groups as are added up stay int32."""
    return min((1 << 15) - 1, ((1 << 31) - 1) // (LARGEST_SUM * min(2 * SUMMED, groups)))
