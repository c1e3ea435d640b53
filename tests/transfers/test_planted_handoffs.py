"""Faults that a transfer between engines can have, each planted in ours and found by the conformance kit."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from hotswap.core.interfaces.kv_transfer import NOTHING_KEPT, Attachment, Kept, TransferWorker
from hotswap.core.interfaces.kvcache import Grant
from hotswap.core.testing.kv_handoff import KVHandoffSuite
from hotswap.plugins.kv_transfer import peer
from hotswap.plugins.kv_transfer.peer_worker import Span
from hotswap.plugins.kv_transfer.tcp import TcpOptions, TcpTransfer, TcpWorker

Test = Callable[[KVHandoffSuite], None]


class ForgetsTheFence(TcpTransfer):
    """Pages go to others while a peer may still read them."""

    def finished(self, request: Any, tokens: Sequence[int], table: Grant, reason: str) -> Kept:
        return super().finished(request, tokens, table, reason)._replace(fence=None)


class KeepsForEver(TcpTransfer):
    """Nobody has told it that nobody will come."""

    def forget(self, request: Any) -> None:
        self._carried.pop(request.id, None)


class NeverExpires(TcpTransfer):
    def message(self, step_id: int) -> Any:
        self._keeping = {name: (key, float("inf")) for name, (key, _) in self._keeping.items()}
        return super().message(step_id)


class StartsBeforeThePagesHaveCome(TcpTransfer):
    def attach(self, *arguments: Any) -> Attachment:
        return super().attach(*arguments)._replace(fence=None)


class CountsWhenItLooks(TcpTransfer):
    def lookup(self, *arguments: Any, **named: Any) -> int:
        self._counts["looked"] += 1
        return super().lookup(*arguments, **named)


class HandsOverAnObject(TcpTransfer):
    def finished(self, *arguments: Any) -> Kept:
        kept = super().finished(*arguments)
        return kept if kept == NOTHING_KEPT else kept._replace(handle=peer.Ticket(**kept.handle))


class CountsPagesFromTheirIds(TcpTransfer):
    """The first logical page is taken for 0, which it is not behind a window."""

    def attach(self, request: Any, tokens: Sequence[int], table: Grant, cached: int, upto: int) -> Attachment:
        groups = {name: change._replace(first_live=0) for name, change in table.groups.items()}
        return super().attach(request, tokens, Grant(groups), cached, upto)


class _WithWorker(TcpTransfer):
    half: type[TcpWorker]

    def worker(self) -> TransferWorker:
        return self.half()


class MovesKeysOnly(_WithWorker):
    class half(TcpWorker):
        def answer(self, wanted: Any) -> bytes:
            data = super().answer(wanted)
            return data[: len(data) // 2] * 2


class SaysThatItIsThereTooEarly(_WithWorker):
    class half(TcpWorker):
        def _fetch(self, name: str, ticket: Any, cached: int, spans: Mapping[str, Span]) -> None:
            self.told(name)
            told, self.told = self.told, lambda *_: None  # type: ignore[method-assign]
            super()._fetch(name, ticket, cached, spans)
            self.told = told  # type: ignore[method-assign]


class GivesAwayWhatHasExpired(_WithWorker):
    """A reader who comes late gets what lies there now."""

    class half(TcpWorker):
        def expire(self, key: str) -> None:
            if (kept := self._kept.get(key)) is not None:
                self.told(kept.name, 0)


GOES_ON = "test_the_next_engine_goes_on_and_computes_nothing_twice"
FAULTS = {
    ForgetsTheFence: ("test_pages_stay_until_they_have_been_read",),
    KeepsForEver: ("test_an_abort_gives_everything_back_at_once_whatever_the_state", 6),
    NeverExpires: ("test_pages_that_nobody_reads_come_back_after_their_time_and_are_not_read_later",),
    StartsBeforeThePagesHaveCome: (GOES_ON, {"full": None}, "prefix"),
    CountsWhenItLooks: (GOES_ON, {"full": None}, "prefix"),
    HandsOverAnObject: (GOES_ON, {"full": None}, "prefix"),
    CountsPagesFromTheirIds: (GOES_ON, {"window": 3}, "prefix"),
    MovesKeysOnly: (GOES_ON, {"full": None}, "prefix"),
    SaysThatItIsThereTooEarly: (GOES_ON, {"full": None}, "prefix"),
    GivesAwayWhatHasExpired: (
        "test_pages_that_nobody_reads_come_back_after_their_time_and_are_not_read_later",),
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def run(transfer: type[TcpTransfer], test: str, *arguments: Any) -> None:
    class Suite(KVHandoffSuite):
        trials = 3

        def make(self) -> TcpTransfer:
            return transfer(TcpOptions(timeout_s=0.5))

    suite = Suite()
    suite._opened = []
    try:
        getattr(suite, test)(*arguments)
    finally:
        for joined in suite._opened:
            joined.close()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_kit_finds(fault: type[TcpTransfer]) -> None:
    test, *arguments = FAULTS[fault]
    run(TcpTransfer, test, *arguments)
    with pytest.raises((AssertionError, LookupError, TypeError, ValueError)):
        run(fault, test, *arguments)


def test_the_kit_finds_a_digest_that_leaves_the_salt_out(monkeypatch: Any) -> None:
    test = "test_each_part_of_the_cache_key_counts"
    run(TcpTransfer, test, "salt")
    monkeypatch.setattr(peer, "key_digest", lambda key: b"any")
    with pytest.raises(AssertionError):
        run(TcpTransfer, test, "salt")
