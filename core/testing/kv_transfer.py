"""The conformance kit of KV transfers that keep what may be used again. A test module of a transfer's author::

    class TestMine(KVTransferSuite):
        def make(self, **options):
            return Mine(Mine.Options(**options))

The suite drives whole engine loops on the fake device, which runs late, poisons pages and checks every slot it reads,
with requests that are suspended in every mode, aborted in every state, and plans that fail half-way and are undone. For
transfers between engines there is :mod:`hotswap.core.testing.kv_handoff`.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from hotswap.core.interfaces.kv_transfer import REUSE, SWAP, KVTransfer, TransferWorker
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.scheduler import Answer, SuspendMode
from hotswap.core.request import Request, SamplingParams
from hotswap.core.testing.kv_transfer_traffic import LateWorker, OnDemand, traffic
from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig

PAGE = 4


class KVTransferSuite:
    """What a KV transfer that offers "reuse" keeps, and one that offers "swap". ``make(**options)`` gives a new
    component; ``late`` are options with which everything runs behind fences, None where it cannot."""

    late: dict[str, Any] | None = None
    trials = 20

    def make(self, **options: Any) -> KVTransfer:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def offers_something(self) -> None:
        if not self.make().describe().offers:
            pytest.skip("it offers nothing, so that no engine asks it for anything")

    def late_worker(self, worker: TransferWorker, rng: random.Random) -> TransferWorker:
        """The worker half of a transfer with the options ``late``, which does things some time later."""
        return LateWorker(worker, rng)

    def rig(self, *, late: bool = False, **settings: Any) -> Rig:
        """An engine whose scheduler suspends on demand."""
        if late and self.late is None:
            pytest.skip("it does everything within the step")
        rng, options = random.Random(7), (self.late or {}) if late else {}
        return make_rig(
            OnDemand(build("scheduler", "chunked")), page_size=PAGE, transfer=self.make(**options),
            wrap_transfer=(lambda worker: self.late_worker(worker, rng)) if late else lambda worker: worker, **settings)

    def needs(self, offer: str) -> None:
        if offer not in self.make().describe().offers:
            pytest.skip(f"it does not offer {offer!r}")

    def test_a_worker_half_that_was_never_registered_can_be_closed(self) -> None:
        """As where an engine's start fails before its pages have been divided."""
        self.make().worker().close()

    # ------------------------------------------------------------------ random traffic

    def test_random_traffic_reads_only_what_it_wrote_and_gives_everything_back(self) -> None:
        seen: Counter[str] = Counter()
        for seed in range(self.trials):
            run = traffic(self.make, seed, seen, list(SuspendMode))
            run.run()
            run.check()
        self._met(seen)

    def test_transfers_that_run_late_change_nothing(self) -> None:
        if self.late is None:
            pytest.skip("it does everything within the step")
        options, seen = self.late, Counter[str]()
        for seed in range(self.trials):
            run = traffic(lambda: self.make(**options), seed, seen, list(SuspendMode), self.late_worker)
            run.run()
            run.check()
        self._met(seen, "filling")

    def _met(self, seen: Counter[str], *more: str) -> None:
        wanted = ["plans undone", "two steps in flight", "accepted drafts", "abort running", "abort waiting", *more]
        if SWAP in self.make().describe().offers:
            wanted += ["suspended by swap", "suspended by recompute"]
        missed = [what for what in wanted if not seen[what]]
        assert not missed, f"{self.trials} runs of traffic prove nothing: there was no {' and no '.join(missed)}"

    # ------------------------------------------------------------------ reuse

    @pytest.mark.parametrize("field", ["model_revision", "dtype", "adapter", "salt"])
    def test_each_part_of_the_cache_key_counts(self, field: str) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(), list(range(12))
        key = CacheKey("revision", "float32", "adapter", "salt")
        rig.add("a", prompt, 4, cache_key=key)
        rig.run()
        assert look_up(rig, prompt, key) == 12
        assert look_up(rig, prompt, replace(key, **{field: "other"})) == 0

    def test_what_is_found_is_a_prefix(self) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(), list(range(12))
        rig.add("a", prompt, 8)
        rig.run()
        tokens = prompt + rig.client.tokens("a")
        assert look_up(rig, tokens[:-1]) == 16
        for place, length in ((0, 0), (3, 0), (4, 4), (11, 8), (13, 12)):
            other = [*tokens[:place], 99, *tokens[place + 1:-1]]
            assert look_up(rig, other) == length, f"another token at {place}"

    @pytest.mark.parametrize("late", [False, True])
    def test_a_prompt_comes_back_after_the_cache_has_forgotten_it(self, late: bool) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(late=late), list(range(12)) * 2
        requests = [rig.add("a", prompt, 4)]
        rig.run()
        rig.loop.parts.kv.reset()
        requests.append(rig.add("b", prompt, 4))
        rig.run()
        assert [rig.client.tokens(request.id) for request in requests] == [expected(request) for request in requests]
        assert rig.client.last("b").cached_tokens == 20  # whole pages, and never the last token
        assert_clean(rig)

    def test_nothing_is_found_before_its_copy_has_ended(self) -> None:
        self.needs(REUSE)
        rig, prompt = self.rig(late=True), list(range(12))
        mover = rig.worker.transfer
        assert isinstance(mover, LateWorker), "late_worker() returns a LateWorker"
        mover.patience = 1.0
        rig.add("a", prompt, 2)
        for _ in range(50):
            rig.loop.turn()
        assert rig.client.endings("a")
        assert look_up(rig, prompt) == 0
        mover.patience = 0.0
        rig.run()
        assert look_up(rig, prompt) == 12

    @pytest.mark.parametrize("late", [False, True])
    def test_two_requests_that_each_need_most_of_the_pool_run_one_after_the_other(self, late: bool) -> None:
        self.needs(REUSE)
        rig, rng = self.rig(late=late, num_pages=11, max_model_len=40), random.Random(1)
        heads = [[rng.randrange(13) for _ in range(16)] for _ in range(2)]
        for number, head in enumerate(heads):
            rig.add(f"first{number}", head, 2)
            rig.run()
        rig.loop.parts.kv.reset()
        requests = [rig.add(f"r{number}", [*head, *range(10)], 3) for number, head in enumerate(heads)]
        rig.run()
        for request in requests:
            assert rig.client.tokens(request.id) == expected(request)
            assert rig.client.last(request.id).cached_tokens == 16
        assert_clean(rig)

    # ------------------------------------------------------------------ on its way

    def filling(self, **settings: Any) -> tuple[Rig, LateWorker, Request]:
        """A rig in which request "b" has started and waits for the pages of its prompt, which do not come."""
        self.needs(REUSE)
        rig, prompt = self.rig(late=True, **settings), [*range(13), *range(7)]
        mover = rig.worker.transfer
        assert isinstance(mover, LateWorker), "late_worker() returns a LateWorker"
        rig.add("a", prompt, 2)
        rig.run()
        rig.loop.parts.kv.reset()
        mover.patience = 1.0
        request = rig.add("b", prompt, 4)
        while not rig.loop.transfers.filling:
            rig.loop.turn()
        return rig, mover, request

    def test_a_request_whose_pages_are_on_their_way_shares_nothing(self) -> None:
        """It is suspended, and another with its prompt comes: nothing of it may be found in the cache."""
        rig, mover, request = self.filling()
        self.suspend(rig, "b", after=0)
        for _ in range(20):
            rig.loop.turn()
        mover.patience = 0.0
        other = rig.add("c", request.prompt_token_ids, 4)
        rig.run()
        assert rig.client.tokens("b") == rig.client.tokens("c") == expected(other)
        assert_clean(rig)

    def test_pages_that_are_still_being_filled_go_to_nobody(self) -> None:
        """The request is aborted, and another needs the room."""
        rig, mover, _ = self.filling(num_pages=11, max_model_len=40)
        rig.loop.abort("b")
        other = rig.add("c", list(range(9, 0, -1)) * 2, 20)
        for _ in range(60):
            rig.loop.turn()
        assert not rig.client.endings("c"), "there was no room for it"
        mover.patience = 0.0
        rig.run()
        assert rig.client.tokens("c") == expected(other)
        assert_clean(rig)

    # ------------------------------------------------------------------ swap

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("windows", [{"full": None}, {"full": None, "window": 3}, {"window": 6}])
    def test_a_request_that_was_swapped_goes_on_where_it_was(self, windows: Any, late: bool) -> None:
        """Though it was suspended with a step in flight, whose length the host did not know."""
        rig = self.swapping(late, windows=windows, depth=2)
        request = rig.add("a", list(range(9)), 12)
        self.suspend(rig, "a", after=5)
        rig.run()
        assert rig.client.tokens("a") == expected(request)
        resumes = [resume.computed for message in rig.executor.messages for resume in message.resumes]
        suspended = [message for message in rig.executor.messages if message.suspensions]
        assert [mode for message in suspended for _, mode in message.suspensions] == [SuspendMode.SWAP]
        again = next(m for m in rig.executor.messages if m.rows and m.step_id > suspended[0].step_id)
        assert resumes[0] == 0 and resumes[1] >= 9 + 5
        assert [row.n_tokens for row in again.rows] == [1], "its tokens are computed again"
        assert_clean(rig)

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("turns", range(8))
    def test_an_abort_gives_everything_back_whatever_the_state(self, turns: int, late: bool) -> None:
        """So many turns after its suspension: suspending, swapped out, being filled, running again."""
        rig = self.swapping(late, depth=2)
        rig.add("a", list(range(9)), 12)
        self.suspend(rig, "a", after=3)
        for _ in range(turns):
            rig.loop.turn()
        rig.loop.abort("a")
        other = rig.add("b", list(range(9)), 3)
        rig.run()
        assert rig.client.endings("a") == ["abort"]
        assert rig.client.tokens("b") == expected(other)
        assert_clean(rig)

    def swapping(self, late: bool, **settings: Any) -> Rig:
        self.needs(SWAP)
        return self.rig(late=late, kv="paged", **settings)

    def suspend(self, rig: Rig, request_id: str, after: int) -> None:
        """Suspend a request once so many of its tokens have come."""
        scheduler = rig.loop.parts.scheduler
        assert isinstance(scheduler, OnDemand)
        while len(rig.client.tokens(request_id)) < after:
            rig.loop.turn()
        scheduler.victim = request_id
        while scheduler.victim is not None:
            rig.loop.turn()


def look_up(rig: Rig, tokens: list[int], key: CacheKey | None = None) -> int | Answer:
    """How many tokens a stranger would find elsewhere."""
    transfer = rig.loop.transfers.component
    assert transfer is not None
    request = Request("stranger", tokens, SamplingParams(), cache_key=key or CacheKey())
    return transfer.lookup(request, tokens, 0, len(tokens))
