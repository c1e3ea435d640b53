"""The conformance kit of KV transfers between engines. A test module of a transfer's author::

    class TestMine(KVHandoffSuite):
        def make(self):
            return Mine(Mine.Options(timeout_s=0.5))

The suite joins two engine loops on the fake device as a deployment would: one computes prompts and hands the requests
over, the other reads the pages and goes on. Bytes travel as they do in a server; the device checks every key and value
it reads, so that pages that came from somewhere else, too late, or were given away in the middle show at once.
"""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from hotswap.core.interfaces.kv_transfer import HANDOFF, KVTransfer
from hotswap.core.interfaces.kvcache import CacheKey
from hotswap.core.interfaces.scheduler import Scheduler, SuspendMode
from hotswap.core.request import FinishReason, Handoff, Request, RequestOutput, SamplingParams
from hotswap.core.testing.kv_transfer_traffic import Restless
from hotswap.core.testing.rig import Rig, assert_clean, build, expected, make_rig, random_prompt

PAGE = 4
WAIT_S = 0.002
PROMPT = [*range(13), *range(7)]


class Joined:
    """Two engines. Requests start at ``keeper`` and go on at ``reader``; between the two they lie in ``between``."""

    def __init__(self, keeper: Rig, reader: Rig) -> None:
        self.keeper, self.reader, self.both = keeper, reader, (keeper, reader)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.endings: dict[str, list[str]] = {}
        self.cached: dict[str, int] = {}
        """Of requests that have ended: what the engine where they did found or was brought."""
        self.between: list[Request] = []
        self.aborted: set[str] = set()

    def add(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Request:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        request = Request(name, prompt, sampling, hands_over=True, **fields)
        self.requests[name], self.tokens[name], self.endings[name] = request, [], []
        self.keeper.loop.add(request, partial(self._hear, request))
        return request

    def hand_on(self) -> None:
        """Everything that lies between the engines, to the second one."""
        waiting, self.between = self.between, []
        for request in waiting:
            self.reader.loop.add(request, partial(self._hear, request))
            if request.id in self.aborted:  # only now, so that its pages are given up by who would have read them
                self.reader.loop.abort(request.id)

    def abort(self, name: str) -> None:
        self.aborted.add(name)
        self.keeper.loop.abort(name)
        self.reader.loop.abort(name)

    def turn(self) -> bool:
        did = [rig.loop.turn() for rig in self.both]
        for rig in self.both:
            rig.loop.parts.kv.check()
            rig.clock.advance(0.001)
        return any(did) or any(rig.loop.in_flight or rig.loop.pool.states for rig in self.both)

    def run(self, most: int = 1200) -> None:
        for _ in range(most):
            self.hand_on()
            if not self.turn() and not self.between:
                return
        raise AssertionError(f"no end: {[(rig.loop.pool.snapshot(), rig.loop.transfers.pending) for rig in self.both]}")

    def hand_over(self, *prompts: list[int], **fields: Any) -> None:
        """Requests "a", "b" ..., run at the first engine, until they all lie between the two."""
        for name, prompt in zip("abcdefgh", prompts, strict=False):
            self.add(name, prompt, **fields)
        for _ in range(50):  # more than enough, also for the worker half to have heard of it
            self.turn()
        assert len(self.between) == len(prompts), "they do not end at the first engine"

    def check(self) -> None:
        """Everybody got what an undisturbed engine gives, once, and nothing is held anywhere."""
        for name, request in self.requests.items():
            if name not in self.aborted:
                assert self.tokens[name] == expected(request), name
            assert len(self.endings[name]) == 1, name
        for rig in self.both:
            assert_clean(rig)

    def close(self) -> None:
        for rig in self.both:
            if rig.worker.transfer is not None:
                rig.worker.transfer.close()
            rig.loop.transfers.close()

    def _hear(self, request: Request, output: RequestOutput) -> None:
        name = request.id
        self.tokens[name] += output.token_ids
        if output.finish_reason is FinishReason.HANDOFF:
            handoff = Handoff(tuple(self.tokens[name]), output.handoff)
            self.between.append(replace(request, hands_over=False, continued=handoff))
        elif output.finish_reason is not None:
            self.endings[name].append(output.finish_reason.value)
            self.cached[name] = output.cached_tokens


class KVHandoffSuite:
    """What a KV transfer keeps that offers "handoff". ``make()`` gives a new component, of the same server as the
    others; it keeps pages that nobody reads for some seconds, and at most for ``hold_s``."""

    hold_s = 3600.0
    trials = 12

    def make(self) -> KVTransfer:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def nothing_left(self) -> Iterator[None]:
        """Whatever a test started is ended, and no thread of it goes on."""
        before, self._opened = set(threading.enumerate()), list[Joined]()
        yield
        for joined in self._opened:
            joined.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive(), f"the thread {thread.name} outlives its engine"

    def join(self, schedulers: tuple[Scheduler | str, Scheduler | str] = ("chunked", "chunked"),
             sizes: tuple[int, int] = (64, 64), **settings: Any) -> Joined:
        """Two engines with the same layout, of ``sizes`` pages."""
        settings = {"page_size": PAGE, "wait_s": WAIT_S, **settings}
        joined = Joined(*(
            make_rig(scheduler, num_pages=size, transfer=self.make(), seed=number, **settings)
            for number, (scheduler, size) in enumerate(zip(schedulers, sizes, strict=True))))
        self._opened.append(joined)
        return joined

    # ------------------------------------------------------------------ what arrives

    def test_it_says_that_it_hands_over(self) -> None:
        assert HANDOFF in self.make().describe().offers

    @pytest.mark.parametrize("windows", [{"full": None}, {"full": None, "window": 6}, {"window": 3}])
    @pytest.mark.parametrize("kv", ["prefix", "radix", "paged"])
    def test_the_next_engine_goes_on_and_computes_nothing_twice(self, windows: Any, kv: str) -> None:
        joined = self.join(windows=windows, kv=kv, depth=2)
        for number, name in enumerate("abc"):
            joined.add(name, [number, *PROMPT], 9)
        joined.run()
        joined.check()
        rows = [row for message in joined.reader.executor.messages for row in message.rows]
        assert {row.n_tokens for row in rows} == {1}, "it computes again what had been brought"
        assert all(joined.cached[name] == len(PROMPT) + 1 for name in "abc")

    def test_what_the_next_engine_has_already_is_not_written_again(self) -> None:
        """It is shared with a request that reads it."""
        joined = self.join()
        joined.add("a", PROMPT, 90)
        for _ in range(50):
            joined.hand_on()
            joined.turn()
        assert joined.reader.loop.pool.running
        joined.add("b", PROMPT, 30)
        joined.run()
        joined.check()

    # ------------------------------------------------------------------ who keeps what, and for how long

    def test_pages_stay_until_they_have_been_read(self) -> None:
        """Another request needs their room, and does not get it before."""
        joined = self.join(sizes=(1 + 8, 64), kv="paged", max_model_len=32)
        joined.hand_over(PROMPT)
        joined.add("b", [5, *PROMPT], 4)
        for _ in range(30):
            joined.turn()
        assert joined.keeper.loop.parts.kv.usage().fenced == 5
        assert not joined.tokens["b"], "there was no room for it"
        joined.run()
        joined.check()

    def test_pages_that_nobody_reads_come_back_after_their_time_and_are_not_read_later(self) -> None:
        joined = self.join(sizes=(1 + 8, 64), kv="paged", max_model_len=32)
        joined.hand_over(PROMPT)
        joined.keeper.clock.advance(self.hold_s + 1)
        joined.add("b", [5, *PROMPT], 1)  # which overwrites them
        for _ in range(100):
            joined.turn()
        assert joined.endings["b"], "there is still no room for it"
        joined.run(most=20_000)  # the reader may take its time to find out
        joined.check()

    @pytest.mark.parametrize("turns", range(0, 16, 2))
    def test_an_abort_gives_everything_back_at_once_whatever_the_state(self, turns: int) -> None:
        """So many turns after its start: waiting, at the first engine, between the two, being filled, running."""
        joined = self.join(depth=2)
        joined.add("a", PROMPT, 20)
        for turn in range(turns):
            if turn > 6:
                joined.hand_on()
            joined.turn()
        joined.abort("a")
        joined.add("b", PROMPT, 3)
        joined.run()  # which ends when no transfer is pending, and takes less time than pages are held for
        joined.check()
        assert joined.endings["a"] == ["abort"]

    def test_who_was_handed_over_and_cannot_be_read_from_costs_a_computation(self) -> None:
        joined = self.join()
        joined.hand_over(PROMPT)
        keeper = joined.keeper.worker.transfer
        assert keeper is not None
        keeper.close()
        joined.hand_on()
        joined.reader.run(most=20_000)  # it may take its time to find out
        assert joined.tokens["a"] == expected(joined.requests["a"])
        assert_clean(joined.reader)

    # ------------------------------------------------------------------ what is believed

    @pytest.mark.parametrize("field", ["model_revision", "dtype", "adapter", "salt"])
    def test_each_part_of_the_cache_key_counts(self, field: str) -> None:
        joined = self.join()
        key = CacheKey("revision", "float32", "adapter", "salt")
        joined.hand_over(PROMPT, cache_key=key)
        [request] = joined.between
        joined.between = [replace(request, cache_key=replace(key, **{field: "other"}))]
        self.all_is_computed(joined)

    def test_pages_of_other_tokens_are_not_taken(self) -> None:
        joined = self.join()
        joined.hand_over(PROMPT, [3, *PROMPT[1:]])
        first, second = joined.between
        assert first.continued is not None and second.continued is not None
        joined.between = [
            replace(first, continued=replace(first.continued, pages=second.continued.pages)),
            replace(second, continued=replace(second.continued, pages=first.continued.pages))]
        self.all_is_computed(joined)

    @pytest.mark.parametrize("pages", [None, 7, "text", {}, {"name": "what another transfer would say"}])
    def test_what_is_no_handle_of_this_transfer_is_computed(self, pages: Any) -> None:
        joined = self.join()
        joined.hand_over(PROMPT)
        [request] = joined.between
        assert request.continued is not None
        joined.between = [replace(request, continued=replace(request.continued, pages=pages))]
        self.all_is_computed(joined)

    def all_is_computed(self, joined: Joined) -> None:
        """What lies between the engines goes on, with nothing that the first one had."""
        joined.hand_on()
        joined.reader.run()
        joined.keeper.clock.advance(self.hold_s + 1)  # nobody reads them, and perhaps nobody says so
        joined.run()
        joined.check()
        assert set(joined.cached.values()) == {0}

    # ------------------------------------------------------------------ random traffic

    def test_random_traffic_reads_only_what_was_written_and_gives_everything_back(self) -> None:
        seen: Counter[str] = Counter()
        for seed in range(self.trials):
            joined = self.traffic(seed, seen)
            joined.check()
            seen["handed over"] += sum(
                message.transfer is not None for message in joined.reader.executor.messages)
            seen["two steps in flight"] += joined.reader.loop.max_depth_seen >= 2
            seen["read and gone on"] += sum(joined.cached[name] > 0 for name in joined.cached)
            joined.close()
        wanted = ("plans undone", "two steps in flight", "handed over", "read and gone on", "aborted", "filling")
        missed = [what for what in wanted if not seen[what]]
        assert not missed, f"{self.trials} runs of traffic prove nothing: none had {' and none '.join(missed)}"

    def traffic(self, seed: int, seen: Counter[str]) -> Joined:
        """Random requests through two engines with restless schedulers, until nothing is left to do."""
        rng, longest = random.Random(seed), 64
        page_size = rng.choice([1, 2, 4, 8])
        schedulers = tuple(
            Restless(build("scheduler", rng.choice(["chunked", "continuous"])), rng, list(SuspendMode), seen)
            for _ in range(2))
        sizes = [1 + -(-int(longest * rng.uniform(1.0, 2.5)) // page_size) for _ in range(2)]
        joined = self.join(
            (schedulers[0], schedulers[1]), (sizes[0], sizes[1]), kv=rng.choice(["prefix", "radix", "paged"]),
            windows=rng.choice([{"full": None}, {"full": None, "window": rng.choice([1, 3, 6, 13])}]),
            page_size=page_size, max_model_len=longest, max_batch_tokens=rng.choice([9, 16, 40]),
            max_running=rng.choice([3, 6]), depth=2 - seed % 2, lookahead=rng.choice([0, 0, 3]),
            reuse_tail=rng.choice([0, 0, 1, 5]))
        shared = [rng.randrange(13) for _ in range(17)]
        arrivals = Counter(rng.randrange(50) for _ in range(10))
        aborts = {rng.randrange(5, 80): f"r{rng.randrange(10)}" for _ in range(5)}
        for turn in range(max([*arrivals, *aborts]) + 1):
            for _ in range(arrivals[turn]):
                prompt = random_prompt(rng, 30, shared)
                joined.add(
                    f"r{len(joined.requests)}", prompt, rng.randrange(1, longest - len(prompt)), seed=rng.randrange(3),
                    cache_key=CacheKey(salt=rng.choice(["", "", "other"])),
                    eos_token_ids=frozenset(rng.choice([(), (5,), (1, 2)])))
            name = aborts.get(turn)
            if name in joined.requests and not joined.endings[name] and name not in joined.aborted:
                seen["aborted"] += 1
                joined.abort(name)
            if rng.random() < 0.5:
                joined.hand_on()
            joined.turn()
            seen["filling"] += bool(joined.reader.loop.transfers.filling)
        joined.run()
        return joined
