"""The words of the attention kernels: the host fills them in, and the kernels read them, by these names.

Sizes in numbers or pieces, strides in bytes. The cache is HND: vector (page K + head) S + token.
"""

NEXT, WRITTEN, MEMBERS = 0, 8, 16
"""Counters, each on a cache line of its own: the next item; blocks written; threads that have come. They begin at
zero."""

(
    # the tensors of one layer, new for each run
    QUERIES, KEYS, VALUES, KEY_CACHE, VALUE_CACHE, OUT,
    Q_TOKEN, Q_HEAD, K_TOKEN, K_HEAD, V_TOKEN, V_HEAD, OUT_TOKEN, OUT_HEAD,
    # the step's layout
    TABLE, TABLE_WIDTH, SLOTS, STARTS, LENGTHS, ROWS, TOKENS,
    # the group's shape; WINDOW is 0 where there is none; SCALE, SOFTCAP and MOST_SCORE are the bits of a float32
    KV_HEADS, GROUP, HEAD_DIM, PADDED, ROW_BYTES, PAGE_SIZE, WINDOW, SCALE, SOFTCAP, MOST_SCORE,
    # what `plan` finds, and how much room there is for it
    ITEMS, MAX_ITEMS, NUM_ITEMS, PARTIALS, MAX_PARTIALS, NUM_PARTIALS, ARRIVALS, MAX_ARRIVALS, NUM_ARRIVALS,
    # where NEXT is, and scratch memory for each thread, by offsets
    COUNTERS, SCRATCH, SCRATCH_BYTES, SUMS, SCORES, PLACES, COLUMNS, LINES, GREATEST, TOTALS, LANE_TOTALS,
    NUM_WORDS,
) = range(24, 76)

(ROW, LONG, TOKEN, COUNT, POSITION, HEAD, BEGIN, END, PART, PARTS, PARTIAL, ARRIVAL, NUM_FIELDS) = range(13)
"""Of an item: ``COUNT`` queries, from ``TOKEN`` of the batch and ``POSITION`` of ``ROW`` on, with the keys of ``HEAD``
from ``BEGIN`` to before ``END``: part ``PART`` of ``PARTS``, whose results go to ``PARTIAL``. The last of them to
arrive, by the counter ``ARRIVAL``, merges. ``LONG``: whether the row is; its last tile may have few queries, too."""

SHORT_ROWS = 8
"""Queries times heads of a group up to which a row is short: its keys are read as they are. Of others the keys are
converted and turned first, which is worth it when more rows read them."""

SHORT_PART, LONG_PART = 512, 512
"""Keys of a part, for short rows and, at the least, others. Parts begin at multiples: where does not depend on a row's
neighbours."""

MOST_PARTS = 32
"""About how many parts the tiles of a long row have together: enough to share the row among many cores. More keys or
more tiles make greater parts, so that partial results take bounded memory, and a row of so many tiles is not divided
further. Those of a short row take some hundredths of the memory of the keys that they stand for."""

TILE_ROWS = 96
"""Queries times heads of a group that share the converted keys: queries of a longer row are cut into tiles."""

TILE_KEYS = 64
"""Keys that are converted at a time."""

SLACK = 8
"""By how many powers of two a score may exceed what a long row's weights are brought to: until then they stay as they
are, however many keys follow. Sums and weights are of floating point, and lose nothing by it."""

ROWS_AT_ONCE = 6
"""Rows of a product that are held in registers; scratch memory reaches to a multiple."""

AHEAD = 96
"""How many keys, or values, ahead memory is asked for the next ones: their pages lie anywhere, and the processor does
not guess that. A multiple of four."""

SPARED = 6
"""Of how many keys, or values, one is asked for outside of the loops that read them, between scores and softmax and the
like: memory would be idle there, and cannot catch up, since it is what these loops wait for."""

ROOM = SHORT_PART + AHEAD
"""Places that are found at a time, at most, and some that are written beyond."""

WRITE_TOKENS = 16
"""Tokens whose keys and values one thread writes before it asks for more work."""
