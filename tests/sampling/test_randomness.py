"""Draws are Philox's, uniform, and a function of (seed, position, stream) alone."""

import numpy as np
import pytest
from scipy import stats

from hotswap.core.execution.randomness import Stream, philox_4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_known_answers_of_its_authors(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = philox_4x32(np.array(counter, np.uint64)[:, None], np.array(key, np.uint64)[:, None])
    assert words[:, 0].tolist() == expected


@pytest.mark.parametrize("vary", ["seed", "position", "stream"])
def test_draws_are_uniform_and_uncorrelated_along_each_coordinate(vary: str) -> None:
    many = np.arange(20_000)
    same = np.full_like(many, 7)
    if vary == "stream":
        draws = np.array([uniforms(same[:1], same[:1], stream)[0] for stream in range(2_000)])
    else:
        draws = uniforms(many if vary == "seed" else same, many if vary == "position" else same, Stream.SAMPLE)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert stats.kstest(draws, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 4 / np.sqrt(len(draws))


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    rng = np.random.default_rng(0)
    seeds = rng.integers(-(2**63), 2**63, 50)
    positions = rng.integers(0, 10_000, 50)
    together = uniforms(seeds, positions, Stream.ACCEPT)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1], Stream.ACCEPT)[0] for i in range(50)]
    order = rng.permutation(50)
    assert together.tolist() == alone
    assert uniforms(seeds[order], positions[order], Stream.ACCEPT).tolist() == together[order].tolist()


def test_streams_seeds_and_positions_each_change_the_draw() -> None:
    def draw(seed: int, position: int, stream: Stream) -> float:
        return float(uniforms(np.array([seed]), np.array([position]), stream)[0])

    draws = {draw(s, p, stream) for s in (0, 1, -1, 2**40) for p in (0, 1, 2**33) for stream in Stream}
    assert len(draws) == 4 * 3 * len(Stream)
