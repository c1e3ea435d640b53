"""The words of the kernel that replays others: the host fills them in, and the kernel reads them, by these names."""

(
    CALLS, COUNT,  # the address of the first call, and how many there are
    PARALLEL, THREADS,  # what runs a kernel on so many threads, and 0 where nothing does
) = range(4)

(KERNEL, WORDS, KEPT, SIZE, SHARED, NUM_FIELDS) = range(6)
"""Of a call: the kernel's address; where its words are, of which those that it began with lie in ``SIZE`` bytes at
``KEPT``; and whether all threads run it."""
