"""The words of the kernel that multiplies with bfloat16 weights: the host fills them in, and the kernel reads them, by
these names.

Weights lie in tiles of ``TILE`` output features, one behind the other. A tile has, for every two input features, both
weights of each output feature side by side: that is what the processor multiplies at once. The last tile has as many
vectors as its output features need.

Strides are in bytes.
"""

VECTOR, VECTORS = 16, 3
"""Output features of a vector, and vectors of a tile: with eight rows their sums fill 24 of the 32 registers."""

TILE = VECTOR * VECTORS

NEXT = 0
"""The counter, on a cache line of its own: the next item that no thread has taken."""

(
    COUNTERS, TOKENS, PAIRS,  # where NEXT is; rows; pairs of input features
    X, X_ROW, WEIGHTS, TILES,
    ITEM_TILES, ITEM_ROWS,  # what a thread takes at a time
    BIAS, BIAS_TILE,  # float32; from one tile's to the next's: 0 where all have the same
    OUT, OUT_ROW, OUT_SIZE,
    NUM_WORDS,
) = range(8, 23)  # fmt: skip
