"""Faults that a tier of host memory can have, each planted in ours and found by the conformance kit's traffic."""

import logging
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from hotswap.core.engine.transfers import Transfers
from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kv_transfer import Attachment, Kept, KVTransfer, Saving, TransferWorker
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.scheduler import SuspendMode
from hotswap.core.testing.kv_transfer import KVTransferSuite
from hotswap.core.testing.kv_transfer_traffic import LateWorker, traffic
from hotswap.plugins.kv_transfer.copies import HostTierWorker, InOrder
from hotswap.plugins.kv_transfer.host import HostTier, HostTierOptions
from hotswap.plugins.kv_transfer.slots import Slot, SlotStore
from hotswap.plugins.kv_transfer.work import Record
from hotswap.plugins.kvcache.chain import Chain

TRIALS = 60
"""Far more than any of these faults needs; a tier without a fault passes as many in the conformance kit."""


def late(worker: TransferWorker, rng: random.Random) -> TransferWorker:
    return LateWorker(HostTierWorker(True, InOrder()), rng)


def is_found(tier: type[HostTier]) -> bool:
    """Whether random traffic over a tier, of which everything runs late, complains."""
    options = HostTierOptions(memory=1500, swap_overhead=20, overlap=True)
    logging.disable()
    try:
        for seed in range(TRIALS):
            run = traffic(lambda: tier(options), seed, Counter(), list(SuspendMode), late)
            run.run()
            run.check()
    except (AssertionError, KVInvariantError, LookupError):
        return True
    finally:
        logging.disable(logging.NOTSET)
    return False


class PublishesTooEarly(HostTier):
    """What is being saved can be found before its copy has ended."""

    def finished(self, request: Any, tokens: Sequence[int], table: Any, reason: str) -> Kept:
        kept = super().finished(request, tokens, table, reason)
        if kept.fence is not None:
            work = self._works[kept.fence]
            for slot in work.slots:
                slot.groups = work.fills[slot.number]
                self._store.publish(slot, work.nodes[slot.number])
        return kept


class ForgetsTheFence(HostTier):
    """The pages of a request that has ended are free before they have been read."""

    def finished(self, request: Any, tokens: Sequence[int], table: Any, reason: str) -> Kept:
        return super().finished(request, tokens, table, reason)._replace(fence=None)


class ForgetsTheFenceOfASwap(HostTier):
    """The pages of a suspended request are free once the step is over."""

    def save(self, *arguments: Any) -> Saving | None:
        saving = super().save(*arguments)
        return saving and saving._replace(fence=None)


class StartsTooEarly(HostTier):
    """A request steps before its pages have arrived."""

    def attach(self, *arguments: Any) -> Attachment:
        return super().attach(*arguments)._replace(fence=None)


class LeavesOutTheSalt(HostTier):
    """A weaker key than the first tier's."""

    def lookup(self, request: Any, *arguments: Any) -> Any:
        return super().lookup(_unsalted(request), *arguments)

    def attach(self, request: Any, *arguments: Any) -> Attachment:
        return super().attach(_unsalted(request), *arguments)

    def finished(self, request: Any, *arguments: Any) -> Kept:
        return super().finished(_unsalted(request), *arguments)


def _unsalted(request: Any) -> Any:
    return replace(request, cache_key=CacheKey())


class BelievesTheBound(HostTier):
    """The host's bound is taken for a suspended request's true length."""

    def suspended(self, request: Any, tokens: Sequence[int], computed: int) -> None:
        record = self._records.get(request.id)
        super().suspended(request, tokens, len(tokens) - 1 if record else computed)
        if record is not None and record.computed == 0:
            record.computed = computed


class ForgetsToUndoTheLoad(HostTier):
    """The load of a plan that was undone is carried out, into pages that are others' by then."""

    def _undo_attach(self, request_id: str, record: Record | None, name: str | None, counts: Mapping[str, int]) -> None:
        if name is not None:
            self._loads.append(self._loads[-1])
        super()._undo_attach(request_id, record, name, counts)


class NeverForgets(HostTier):
    """What was saved of a request stays after its end."""

    def forget(self, request_id: str) -> None:
        pass


class LooksNotBehindTheWindow(HostTier):
    """A prefix is found although pages inside its window are missing."""

    def _last_miss(self, *arguments: Any) -> int:
        return -1


class SharesPartialPages(HostTier):
    """The last page of a swapped request is published although it is not full."""

    def suspended(self, request: Any, tokens: Sequence[int], computed: int) -> None:
        size = self._page_size
        super().suspended(request, tokens, computed)
        record = self._records.get(request.id)
        if record is not None and computed % size and len(tokens) >= -(-computed // size) * size:
            page, chain = computed // size, Chain(list(tokens), request.cache_key, size, self.digest)
            chain.grow(page + 1)
            record.nodes[page] = chain.nodes[page + 1]


class _UnpinnedStore(SlotStore):
    def pin(self, slot: Slot) -> None:
        pass

    def unpin(self, slots: Any) -> None:
        for slot in slots:
            if slot.number not in self._idle:
                slot.pins = 1
                super().unpin([slot])


class ReusesWhatIsRead(HostTier):
    """A slot is evicted while a transfer reads it."""

    def configure(self, layout: Any) -> Any:
        terms = super().configure(layout)
        self._store = _UnpinnedStore(terms["slots"])
        return terms

    def check(self) -> None:
        pass


class _StaleStore(SlotStore):
    def _withdraw(self, slot: Slot) -> None:
        slot.node = None


class LeavesTheMapping(HostTier):
    """An evicted page can still be found."""

    def configure(self, layout: Any) -> Any:
        terms = super().configure(layout)
        self._store = _StaleStore(terms["slots"])
        return terms

    def check(self) -> None:
        pass


FAULTS = [
    ForgetsTheFence, ForgetsTheFenceOfASwap, StartsTooEarly, BelievesTheBound, ForgetsToUndoTheLoad, NeverForgets,
    LooksNotBehindTheWindow, SharesPartialPages, ReusesWhatIsRead, LeavesTheMapping,
]


@pytest.mark.parametrize("tier", FAULTS, ids=lambda tier: tier.__name__)
def test_the_kit_finds(tier: type[HostTier]) -> None:
    assert is_found(tier)


class Suite(KVTransferSuite):
    """The kit over another tier."""

    late = {"overlap": True}

    def __init__(self, tier: type[HostTier]) -> None:
        self.tier = tier

    def make(self, **options: Any) -> KVTransfer:
        return self.tier(HostTierOptions(memory=4096, **options))

    def late_worker(self, worker: TransferWorker, rng: random.Random) -> TransferWorker:
        return late(worker, rng)


def test_the_kit_finds_a_key_that_leaves_something_out() -> None:
    Suite(HostTier).test_each_part_of_the_cache_key_counts("salt")
    with pytest.raises(AssertionError):
        Suite(LeavesOutTheSalt).test_each_part_of_the_cache_key_counts("salt")


def test_the_kit_finds_what_can_be_found_too_early() -> None:
    Suite(HostTier).test_nothing_is_found_before_its_copy_has_ended()
    with pytest.raises(AssertionError):
        Suite(PublishesTooEarly).test_nothing_is_found_before_its_copy_has_ended()


def test_the_kit_finds_an_engine_that_frees_pages_into_which_a_transfer_still_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Suite(HostTier).test_pages_that_are_still_being_filled_go_to_nobody()
    detach = Transfers.detach
    monkeypatch.setattr(Transfers, "detach", lambda transfers, state: (detach(transfers, state), None)[1])
    with pytest.raises(AssertionError):
        Suite(HostTier).test_pages_that_are_still_being_filled_go_to_nobody()


def test_the_kit_finds_an_engine_that_takes_pending_tokens_for_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    Suite(HostTier).test_a_request_whose_pages_are_on_their_way_shares_nothing()
    attach = Transfers.attach

    def hasty(transfers: Transfers, state: Any, *arguments: Any) -> Any:
        state.verified = state.computed
        return attach(transfers, state, *arguments)

    monkeypatch.setattr(Transfers, "attach", hasty)
    with pytest.raises(AssertionError):
        Suite(HostTier).test_a_request_whose_pages_are_on_their_way_shares_nothing()
