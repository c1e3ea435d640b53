"""The words of the operators' kernels: the host fills them in, and the kernels read them, by these names.

An operator works on ``TOKENS`` rows of ``HEADS`` pieces of ``SIZE`` numbers. Strides are in bytes.
"""

NEXT = 0
"""The next row that nobody has taken; on a cache line of its own, since all threads change it."""

(
    COUNTER, OPERATOR, TOKENS, SHARE,  # where NEXT is; the rows that a thread takes at a time
    HEADS, SIZE, ITEMSIZE, X, X_TOKEN, X_HEAD,
    OTHER, OTHER_TOKEN,  # the residual, or the cosines
    VECTOR, VECTOR_TOKEN,  # the weight, or the sines
    OUT, EPS,  # the latter the bits of a float32
) = range(8, 24)  # fmt: skip

NORM, ADD_NORM, ROTATE, GATE = range(4)
"""Operators."""
