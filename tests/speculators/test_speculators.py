"""The stock speculators: conformance, and what prompt lookup finds."""

import time

import numpy as np
import pytest
from pydantic import ValidationError

from hotswap.core.interfaces.speculator import Drafts, ProposeRow, Speculator, SpeculatorNeeds
from hotswap.core.testing.speculator import check_speculator
from hotswap.plugins.speculators.ngram import NgramSpeculator, continuation
from hotswap.plugins.speculators.none import NoSpeculator


def lookup(tokens, min_n=1, max_n=3, count=4):
    return continuation(np.array(tokens, np.int32), min_n, max_n, count)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [
    NoSpeculator, NgramSpeculator, lambda: NgramSpeculator(NgramSpeculator.Options(min_n=1, max_n=1, max_draft=9)),
])
def test_conforms(make, seed):
    check_speculator(make, seed=seed)


def test_none_looks_ahead_nowhere():
    assert NoSpeculator().needs() == SpeculatorNeeds()
    assert NoSpeculator().propose([ProposeRow("a", np.array([1, 1, 1]), 3)]).tokens == [[]]


def test_the_continuation_of_an_earlier_occurrence_is_copied():
    assert lookup([1, 2, 3, 4, 5, 6, 1, 2]) == [3, 4, 5, 6]


def test_the_most_recent_occurrence_is_preferred():
    assert lookup([1, 2, 7, 7, 1, 2, 8, 9, 1, 2], count=2) == [8, 9]


def test_a_longer_match_is_preferred_to_a_more_recent_one():
    assert lookup([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], count=1) == [7]


def test_no_more_than_max_n_tokens_are_compared():
    assert lookup([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], max_n=2, count=1) == [8]


def test_fewer_than_min_n_matching_tokens_are_no_match():
    tokens = [3, 2, 9, 4, 2]
    assert lookup(tokens, min_n=1, count=1) == [9]
    assert lookup(tokens, min_n=2) == []


def test_a_loop_is_continued_as_a_loop():
    assert lookup([9, 1, 2, 1, 2], count=5) == [1, 2, 1, 2, 1]
    assert lookup([7, 7], count=3) == [7, 7, 7]


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], []])
def test_nothing_is_proposed_without_an_earlier_occurrence(tokens):
    assert lookup(tokens) == []


def test_rows_without_slots_get_no_drafts():
    rows = [ProposeRow(name, np.array([1, 2, 1, 2], np.int32), slots) for name, slots in (("a", 0), ("b", 2))]
    assert NgramSpeculator().propose(rows).tokens == [[], [1, 2]]


def test_a_search_costs_microseconds():
    tokens = np.random.default_rng(0).integers(0, 50_000, 8192).astype(np.int32)
    times = []
    for _ in range(100):
        begun = time.perf_counter()
        continuation(tokens, 2, 4, 4)
        times.append(time.perf_counter() - begun)
    assert min(times) < 1e-3


def test_options_out_of_order_are_refused():
    with pytest.raises(ValidationError, match="min_n is 5 and max_n 4"):
        NgramSpeculator.Options(min_n=5)


class Greedy(Speculator):
    """Breaks the promise that it is told to break."""

    breaks = ""

    def needs(self):
        return SpeculatorNeeds(lookahead=3)

    def propose(self, rows):
        drafts = [[1] * row.slots for row in rows]
        for row, tokens in zip(rows, drafts, strict=True):
            if self.breaks == "slots":
                tokens += [1]
            if self.breaks == "vocabulary" and tokens:
                tokens[0] = 32
            if self.breaks == "tokens":
                base = row.tokens.base
                base[0] += 1
        return Drafts(drafts)


@pytest.mark.parametrize(("breaks", "message"), [
    ("slots", "slots"), ("vocabulary", "vocabulary"), ("tokens", "changed"),
])
def test_the_kit_finds_a_broken_promise(breaks, message):
    def make():
        speculator = Greedy()
        speculator.breaks = breaks
        return speculator

    check_speculator(Greedy)
    with pytest.raises(AssertionError, match=message):
        check_speculator(make)
