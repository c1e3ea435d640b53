"""The words of the kernels that multiply with quantised weights: the host fills them in, and the kernels read them, by
these names.

Weights lie in tiles of ``TILE`` output features, one behind the other. A tile has a block for each ``GROUP`` input
features: their numbers, of 8 bits or of 4, then a scale and a least value for each output feature, both float16. A
number q stands for q * scale + least. Four numbers of one output feature, then those of the next one: that is what the
processor multiplies at once. Where numbers have 4 bits, a byte has two: the high ones are those of the four input
features behind.

Strides are in bytes.
"""

TILE = 16

GROUP = 32
"""Weights of an output feature that share a scale; numbers of a row, too."""

TAKEN, PREPARED, NEXT = 0, 8, 16
"""Counters, each on a cache line of its own: rows that threads have taken to bring to 8 bits, rows that are ready, and
the next tile that nobody has taken."""

(
    COUNTERS, TOKENS, SIZE, GROUPS,  # where TAKEN is; rows; input features, and groups of them
    X, X_ROW,
    NUMBERS, SCALES, SUMS,  # of the rows in 8 bits: [TOKENS, GROUPS * GROUP], and [TOKENS, GROUPS] float32 twice
    WEIGHTS, TILES, SHARE,  # SHARE: tiles that a thread takes at a time
    BIAS,  # float32, for whole tiles
    OUT, OUT_ROW, OUT_SIZE,
    NUM_WORDS,
) = range(24, 41)  # fmt: skip


def block_bytes(bits: int) -> int:
    """Of a tile's group."""
    return TILE * (GROUP * bits // 8 + 4)
