"""The host half of transfers between engines: what requests carry is believed or not, counted once, and forgotten."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hotswap.core.interfaces.kv_transfer import TransferLayout
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec, Grant, GroupGrant, GroupPlan
from hotswap.core.request import Handoff, Request, SamplingParams
from hotswap.core.testing.rig import build
from hotswap.plugins.kv_transfer.peer import FAILURES, SHUN_S, PeerTransfer
from hotswap.plugins.kv_transfer.remembered import REMEMBERED, Remembered

PROMPT = list(range(8))
TABLE = Grant({"full": GroupGrant(0, (1, 2))})


class Pair:
    """The host halves of two engines, and their clock."""

    def __init__(self, use: str = "tcp") -> None:
        self.now, self.use = 0.0, use
        self.keeper, self.reader = self.engine(), self.engine()

    def engine(self) -> PeerTransfer:
        made = build("kv_transfer", self.use)
        assert isinstance(made, PeerTransfer)
        made.configure(TransferLayout(
            (CacheSpec("full", (0,), 1, 1, 8),), CachePlan({"full": GroupPlan(9, 4)}), 1, lambda: self.now))
        return made

    def handed_over(self, name: str = "r", **changes: Any) -> Request:
        """A request whose pages the keeper has kept."""
        request = Request(name, PROMPT, SamplingParams())
        handle = self.keeper.finished(request, PROMPT, TABLE, "handoff").handle
        return replace(request, continued=Handoff((), {**handle, **changes}))

    def look(self, request: Request, times: int = 1) -> int:
        [found] = {self.reader.lookup(request, PROMPT, 0, len(PROMPT)) for _ in range(times)}
        assert isinstance(found, int)
        return found

    def start(self, request: Request) -> Any:
        return self.reader.attach(request, PROMPT, TABLE, 0, self.look(request))

    def fail(self, engine: str) -> None:
        request = self.handed_over("failing", engine=engine)
        fence = self.start(request).fence
        self.reader.ended(fence, 0)
        self.reader.forget(request)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.keeper.close()
    made.reader.close()


def test_looking_counts_nothing_and_asks_for_nothing(pair: Pair) -> None:
    """However often; what a request carries is told of when the request starts."""
    wrong, foreign, ours = (
        pair.handed_over("a", digest="another"), pair.handed_over("b", wire="pigeon"), pair.handed_over("c"))
    own = replace(ours, id="d", continued=Handoff((), {**ours.continued.pages, "engine": pair.reader._engine}))
    before = dict(pair.reader.counters())
    assert [pair.look(request, times=5) for request in (wrong, foreign, ours, own)] == [0, 0, 8, 0]
    assert (pair.reader.counters(), pair.reader.message(1), pair.reader.pending) == (before, None, False)
    fences = [pair.start(request).fence for request in (wrong, foreign, ours, own)]
    assert [fence is not None for fence in fences] == [False, False, True, False]
    assert pair.reader.counters()["refused"] == 2
    work = pair.reader.message(2)
    assert ["fetch" in each or "release" in each for each in work] == [True, True]


@pytest.mark.parametrize("pages", [{"name": "no ticket"}, "text", 7])
def test_what_is_no_ticket_is_refused_and_the_prompt_computed(pair: Pair, pages: Any, caplog: Any) -> None:
    request = Request("r", PROMPT, SamplingParams(), continued=Handoff((), pages))
    assert pair.look(request) == 0
    assert pair.start(request).fence is None
    pair.reader.forget(request)
    assert "it has no ticket" in caplog.text
    assert (pair.reader.counters()["refused"], pair.reader.leaks(), pair.reader.message(1)) == (1, {}, None)


@pytest.mark.parametrize("changes", [{}, {"digest": "another"}], ids=["fetch", "refused"])
def test_a_start_that_is_undone_counts_nothing(pair: Pair, changes: dict[str, str]) -> None:
    request, before = pair.handed_over(**changes), dict(pair.reader.counters())
    attachment = pair.start(request)
    pair.reader.undo(attachment.entry)
    assert (pair.reader.counters(), pair.reader.message(1)) == (before, None)
    assert (pair.start(request).fence is None) == bool(changes), "it is there again"


def test_a_request_that_never_starts_gives_its_pages_up(pair: Pair) -> None:
    request = pair.handed_over()
    pair.look(request)
    pair.reader.forget(request)
    assert list(pair.reader.message(1)[0]) == ["release"]
    assert not pair.reader.leaks()


def test_what_is_remembered_of_engines_has_an_end(pair: Pair) -> None:
    pair.reader._troubles._most = 3  # type: ignore[attr-defined]
    for number in range(10):
        for _ in range(FAILURES):
            pair.fail(f"engine{number}")
    assert list(pair.reader._troubles) == ["engine7", "engine8", "engine9"]
    assert pair.look(pair.handed_over("x", engine="engine9")) == 0
    assert pair.look(pair.handed_over("y", engine="engine1")) == 8
    pair.now += SHUN_S
    assert pair.look(pair.handed_over("z", engine="engine9")) == 8


def test_a_table_of_the_newest_drops_the_oldest() -> None:
    table: Remembered[int, str] = Remembered()
    for number in range(REMEMBERED + 5):
        table.setdefault(number, "new")
        table[number] = "changed"
    assert (len(table), min(table)) == (REMEMBERED, 5)
    table[5] = "again"
    assert (len(table), table[5]) == (REMEMBERED, "again")


def test_what_a_late_reader_leaves_goes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotswap.plugins.kv_transfer.shm.LATE", 3)
    pair = Pair("shm")
    keeper = pair.keeper
    assert keeper.folder is not None
    for number in range(10):
        keeper.finished(Request(f"r{number}", PROMPT, SamplingParams()), PROMPT, TABLE, "handoff")
        [work] = keeper.message(number)
        keeper.ended(work["keep"], 0)
        (keeper.folder / f"{work['key']}.done.late").touch()
    assert len(list(keeper.folder.glob("*.done.late"))) == 3
    keeper.close()
    pair.reader.close()
