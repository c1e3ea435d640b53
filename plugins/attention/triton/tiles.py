"""How large the kernels' tiles are: fixed choices by head size, bounded by a GPU's shared memory. Nothing is tuned."""

from dataclasses import dataclass

from hotswap.core.interfaces.attention import GroupShape

SLOTS = 16
"""Splits of a decoding row's keys, at most. A row of n queries gets a nth of them, so that it needs no more room."""

MIN_SPLIT = 256
"""Keys of a split, at least: what a split writes and the reduction reads is then a few per cent of what it loads."""

WRITE_BLOCK = 32
"""Vectors that one program writes to the cache."""

SHARED_MEMORY = 96 * 1024
"""Bytes that a tile of queries and two stages of keys and values may take. Ampere and later let a program have 99 KiB
(sm_86, sm_89) to 227 KiB (sm_90)."""

STAGES = 2


@dataclass(frozen=True)
class Tiles:
    """``block_m``: lines (queries x heads of a group) of a tile of a long row; ``block_n``: keys loaded at once.
    ``queries``: whole queries in ``block_m``. ``short``: most queries of a row that the decoding kernel takes.
    ``head_dim``: padded to a power of two."""

    group: int
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = STAGES

    @property
    def queries(self) -> int:
        return self.block_m // self.group

    @property
    def short(self) -> int:
        return min(SLOTS, self.queries)

    def short_block_m(self, queries: int) -> int:
        """Lines of a tile that holds all ``queries`` of a short row. The hardware multiplies 16 lines at least."""
        return max(16, power_of_two(queries * self.group))


def choose_tiles(shape: GroupShape, itemsize: int) -> Tiles:
    """64 lines and 64 keys, fewer where shared memory asks for it, more lines where a group has more heads."""
    group, head_dim = shape.heads // shape.kv_heads, max(16, power_of_two(shape.head_dim))
    least = max(16, power_of_two(group))
    block_m, block_n = max(64, least), 64

    def taken() -> int:
        return itemsize * head_dim * (block_m + 2 * STAGES * block_n)

    while taken() > SHARED_MEMORY and block_n > 16:
        block_n //= 2
    while taken() > SHARED_MEMORY and block_m > least:
        block_m //= 2
    return Tiles(group, head_dim, block_m, block_n, num_warps=8 if block_m > 64 else 4)


def power_of_two(size: int) -> int:
    """The least one that is no smaller than ``size``."""
    return 1 << (size - 1).bit_length()
