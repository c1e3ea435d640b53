"""The worker's tables of requests: pages follow grants to the letter, and nothing of a past request remains."""

import numpy as np
import pytest

from hotswap.core.execution.buffers import RequestTable
from hotswap.core.interfaces.kvcache import CachePlan, Grant, GroupGrant, GroupPlan
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams

DUMMY = 9


@pytest.fixture
def table():
    return RequestTable(CachePlan({"full": GroupPlan(100, 4, DUMMY), "window": GroupPlan(50, 2, DUMMY)}), 2, 40)


def new(name, tokens):
    return NewRequest(name, tokens, len(tokens), SamplingParams(), 0)


def pages(table, name, group="full", count=8):
    return table.tables[group].pages[table.get(name).slot, :count].tolist()


def test_a_grant_cuts_appends_and_drops_what_is_behind_the_window(table):
    table.add(new("a", [1, 2, 3]))
    table.grant("a", Grant({"full": GroupGrant(0, (11, 12, 13, 14))}))
    assert pages(table, "a") == [11, 12, 13, 14, DUMMY, DUMMY, DUMMY, DUMMY]
    table.grant("a", Grant({"full": GroupGrant(2, (21,))}))
    assert pages(table, "a") == [11, 12, 21, DUMMY, DUMMY, DUMMY, DUMMY, DUMMY]
    table.grant("a", Grant({"full": GroupGrant(3, (22, 23), first_live=2)}))
    assert pages(table, "a") == [DUMMY, DUMMY, 21, 22, 23, DUMMY, DUMMY, DUMMY]
    table.grant("a", Grant({"full": GroupGrant(5, (), first_live=4)}))
    assert pages(table, "a") == [DUMMY, DUMMY, DUMMY, DUMMY, 23, DUMMY, DUMMY, DUMMY]
    assert pages(table, "a", "window") == [DUMMY] * 8


def test_a_grant_may_begin_behind_everything_that_was_there(table):
    table.add(new("a", [1, 2, 3]))
    table.grant("a", Grant({"window": GroupGrant(0, (31, 32), first_live=3)}))
    assert pages(table, "a", "window") == [DUMMY, DUMMY, DUMMY, 31, 32, DUMMY, DUMMY, DUMMY]


@pytest.mark.parametrize("change", [
    lambda table: table.resume("a", 2),
    lambda table: table.add(new("a", [1])),
    lambda table: (table.remove("a"), table.add(new("a", [1]))),
])
def test_a_request_that_starts_again_has_an_empty_table(table, change):
    table.add(new("a", [1, 2, 3]))
    table.grant("a", Grant({"full": GroupGrant(0, (11, 12)), "window": GroupGrant(0, (31,))}))
    change(table)
    assert pages(table, "a") + pages(table, "a", "window") == [DUMMY] * 16
    assert table.tables["full"].ends[table.get("a").slot] == 0


def test_rows_are_copies_that_reach_as_far_as_asked(table):
    table.add(new("a", [1, 2, 3]))
    table.grant("a", Grant({"full": GroupGrant(0, (11, 12, 13))}))
    rows, page_size = table.page_rows(np.array([table.get("a").slot]), 9, ["full"])["full"]
    table.remove("a")
    assert (rows.tolist(), page_size) == ([[11, 12, 13]], 4)


def test_kept_tokens_go_behind_the_known_ones(table):
    for name, tokens in (("a", [1, 2, 3]), ("b", [4])):
        table.add(new(name, tokens))
    slots = np.array([table.get(name).slot for name in "ba"])
    table.append(slots, [[7, 8], []])
    table.append(slots, [[9], [5]])
    for name, tokens in (("a", [1, 2, 3, 5]), ("b", [4, 7, 8, 9])):
        slot = table.get(name).slot
        assert table.tokens[slot, : table.known[slot]].tolist() == tokens


def test_growing_keeps_everything_in_its_place(table):
    for name in "abc":
        table.add(new(name, [ord(name)] * 3))
        table.grant(name, Grant({"full": GroupGrant(0, (ord(name),))}))
    assert len({table.get(name).slot for name in "abc"}) == 3
    for name in "abc":
        assert table.tokens[table.get(name).slot, :3].tolist() == [ord(name)] * 3
        assert pages(table, name, count=2) == [ord(name), DUMMY]


def test_what_is_not_here_is_let_be(table):
    table.resume("ghost", 1)
    table.grant("ghost", Grant({"full": GroupGrant(0, (1,))}))
    table.fail(["ghost"], "planted")
    assert not table.remove("ghost")
    assert len(table) == 0
