"""Random numbers that are a function of (seed, position, stream) and of nothing else.

Each draw is Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), with the request's
seed as key and the position as counter. No generator has state, so a draw does not depend on the batch, on the order
of rows, on preemption, on speculation or on how the model is laid out over devices.
"""

from enum import IntEnum
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_LOW = np.uint64(0xFFFF_FFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.array([[0xD251_1F53], [0xCD9E_8D57]], dtype=np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E37_79B9], [0xBB67_AE85]], dtype=np.uint64)


class Stream(IntEnum):
    """What a draw is for. Two draws for one position must come from two streams, or they would be equal."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def philox_4x32(counter: Array, key: Array) -> Array:
    """Ten rounds of Philox: ``counter`` [4, N] and ``key`` [2, N], 32-bit words in uint64 -> [4, N], likewise."""
    even, odd = counter[0::2], counter[1::2]
    for round_key in (key + _KEY_STEPS) & _LOW:
        product = (even * _MULTIPLIERS)[::-1]
        even, odd = (product >> _SHIFT) ^ odd ^ round_key, product & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def keys(seeds: Array, positions: Array, stream: int) -> Array:
    """64 random bits, uint64, for each row of ``seeds`` [N] and ``positions`` [N].

    Both are taken modulo 2**64. ``positions`` are the indices, in the sequence, of the tokens to be drawn.
    """
    seeds, positions = seeds.astype(np.uint64), positions.astype(np.uint64)
    key = np.stack([seeds & _LOW, seeds >> _SHIFT])
    counter = np.zeros((4, len(positions)), dtype=np.uint64)
    counter[0], counter[1], counter[2] = positions & _LOW, positions >> _SHIFT, stream
    words = philox_4x32(counter, key)
    result: Array = (words[0] << _SHIFT) | words[1]
    return result


def uniforms(seeds: Array, positions: Array, stream: int) -> Array:
    """One float64 in [0, 1) with 53 random bits for each row: of its :func:`keys`."""
    result: Array = (keys(seeds, positions, stream) >> np.uint64(11)) * 2.0**-53
    return result
