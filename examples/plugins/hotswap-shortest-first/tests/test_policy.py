"""The policy's order."""

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from hotswap_shortest_first.policy import ShortestFirst


@dataclass
class View:
    prompt_length: int
    max_new: int
    arrival: float = 0.0
    sequence: int = 0


def first(policy, *views):
    return min(views, key=lambda view: policy.key(view, now=0.0))


def test_short_requests_come_first_and_equal_ones_in_order_of_arrival():
    policy = ShortestFirst()
    short, long = View(10, 5, sequence=2), View(10, 50, sequence=1)
    assert first(policy, long, short) is short
    assert first(policy, View(5, 10, sequence=3), short) is short


def test_a_long_request_is_overtaken_only_by_those_that_come_soon_after_it():
    policy = ShortestFirst(ShortestFirst.Options(tokens_per_second=10))
    long = View(100, 0, arrival=0.0)
    assert first(policy, long, View(20, 0, arrival=7.0)).prompt_length == 20
    assert first(policy, long, View(20, 0, arrival=9.0)) is long


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan"), "fast"])
def test_the_rate_is_a_positive_number(rate):
    with pytest.raises(ValidationError):
        ShortestFirst.Options(tokens_per_second=rate)
