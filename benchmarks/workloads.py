"""The workloads, as plain token ids from a seeded generator, so that every engine gets and gives the same tokens.

End-of-sequence is ignored. Ids keep away from special tokens and stay below SmolLM2's vocabulary of 49,152. ``salt``
gives other ids of the same lengths: a run that must not find the last run's prefixes in the cache uses a new one.
"""

import random
from dataclasses import dataclass

SEED = 20261129
FIRST_ID, LAST_ID = 1000, 48000


@dataclass(frozen=True)
class Item:
    prompt: list[int]
    max_tokens: int


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(FIRST_ID, LAST_ID) for _ in range(count)]


def mixed(salt: int = 0) -> list[Item]:
    """64 requests of 32 to 512 tokens in, 16 to 128 out."""
    rng = random.Random(SEED + 1000 * salt)
    return [Item(_ids(rng, rng.randint(32, 512)), rng.randint(16, 128)) for _ in range(64)]


def single(salt: int = 0) -> list[Item]:
    """One request, 128 in, 128 out."""
    return [Item(_ids(random.Random(SEED + 1 + 1000 * salt), 128), 128)]


def batch8(salt: int = 0) -> list[Item]:
    """Eight requests, 128 in, 128 out."""
    rng = random.Random(SEED + 2 + 1000 * salt)
    return [Item(_ids(rng, 128), 128) for _ in range(8)]


def prefix(salt: int = 0) -> list[Item]:
    """32 requests that share 1,024 tokens and have 32 of their own; 32 out."""
    rng = random.Random(SEED + 3 + 1000 * salt)
    shared = _ids(rng, 1024)
    return [Item(shared + _ids(rng, 32), 32) for _ in range(32)]
