"""Whether arms said the same."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hotswap.lab.metrics import succeeded
from hotswap.lab.records import BlockRecord


def divergences(base: BlockRecord, arm: BlockRecord, text: Callable[[int], str]) -> Iterator[dict[str, Any]]:
    """Of each request that both arms answered: where its tokens first differ, if they do. A token is None where the
    answer had ended."""
    known = {record.index: record.tokens for record in succeeded(base.requests)}
    for record in succeeded(arm.requests):
        expected, found = known.get(record.index), record.tokens
        if expected is None or found is None or expected == found:
            continue
        place = first_difference(expected, found)
        tokens = {"base": _at(expected, place), "arm": _at(found, place)}
        yield {
            "arm": arm.arm, "pair": arm.pair, "index": record.index, "position": place,
            **{f"{who}_token": token for who, token in tokens.items()},
            **{f"{who}_text": None if token is None else text(token) for who, token in tokens.items()}}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _at(tokens: Sequence[int], place: int) -> int | None:
    return tokens[place] if place < len(tokens) else None
