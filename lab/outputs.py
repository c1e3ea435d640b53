"""Whether arms said the same."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from hotswap.lab.metrics import succeeded
from hotswap.lab.records import BlockRecord

Tokens = tuple[int, ...]


def told_by_both(base: BlockRecord, arm: BlockRecord) -> Iterator[tuple[int, Tokens, Tokens]]:
    """(index, the base's tokens, the arm's) of each request that both answered, where both tell their tokens."""
    known = {record.index: record.tokens for record in succeeded(base.requests)}
    for record in succeeded(arm.requests):
        expected = known.get(record.index)
        if expected is not None and record.tokens is not None:
            yield record.index, expected, record.tokens


def divergences(
    both: Iterable[tuple[int, Tokens, Tokens]], arm: BlockRecord, text: Callable[[int], str],
) -> Iterator[dict[str, Any]]:
    """Where tokens first differ, of each request of which they do. A token is None where the answer had ended."""
    for index, expected, found in both:
        if expected == found:
            continue
        place = first_difference(expected, found)
        tokens = {"base": _at(expected, place), "arm": _at(found, place)}
        yield {
            "arm": arm.arm, "pair": arm.pair, "index": index, "position": place,
            **{f"{who}_token": token for who, token in tokens.items()},
            **{f"{who}_text": None if token is None else text(token) for who, token in tokens.items()}}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
