"""What every router must do. The whole test file of a router::

    class TestMine(RouterSuite):
        def make_router(self) -> Router:
            return Mine()

``balances`` says whether it promises more than that.
"""

import random
from collections.abc import Sequence

from hotswap.core.interfaces.deployment import Candidate, Loads, Router
from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.request import Request, SamplingParams


def candidates(*dispatched: int, reported: Sequence[int] | None = None, skip: int | None = None) -> list[Candidate]:
    """Engine i with ``dispatched[i]`` requests sent to it, of which it reports ``reported[i]``; all but ``skip``."""
    reported = reported or [0] * len(dispatched)
    return [
        Candidate(number, "", Loads(told, 0, 0.0, sent))
        for number, (sent, told) in enumerate(zip(dispatched, reported, strict=True)) if number != skip]


def request(number: int = 0, tokens: Sequence[int] = (1, 2, 3)) -> Request:
    return Request(f"r{number}", list(tokens), SamplingParams(temperature=0, max_tokens=4))


class RouterSuite:
    """Subclass it and provide ``make_router``."""

    balances = True
    """Whether a burst is spread by what was sent, however stale the reports are."""

    def make_router(self) -> Router:
        raise NotImplementedError("return a new router")

    def test_it_chooses_one_of_the_candidates_whoever_is_missing(self) -> None:
        router, rng = self.make_router(), random.Random(1)
        for number in range(300):
            counts = [rng.randrange(6) for _ in range(rng.randrange(1, 6))]
            skip = rng.randrange(len(counts)) if len(counts) > 1 and rng.random() < 0.5 else None
            offered = candidates(*counts, skip=skip)
            assert router.pick(request(number, [rng.randrange(9)] * rng.randrange(1, 40)), offered) in {
                candidate.engine for candidate in offered}

    def test_a_lone_candidate_is_chosen(self) -> None:
        assert self.make_router().pick(request(), candidates(9, 0, skip=1)) == 0

    def test_a_request_that_was_prepared_is_placed_like_one_that_was_not(self) -> None:
        prepared, plain = self.make_router(), self.make_router()
        for number in range(50):
            offered, wanted = candidates(number % 3, number % 2, 1), request(number, range(number))
            assert prepared.prepare(wanted)(offered) == plain.pick(wanted, offered)

    def test_a_prepared_request_that_an_engine_refuses_goes_to_another(self) -> None:
        """What ``prepare`` has returned is called again, with those that are left."""
        router, everyone = self.make_router(), candidates(2, 0, 1, 0)
        for number in range(20):
            pick, left = router.prepare(request(number, [number] * 8)), everyone
            while left:
                chosen = pick(left)
                assert chosen in {one.engine for one in left}, f"engine {chosen} has refused, and is chosen again"
                left = [one for one in left if one.engine != chosen]

    def test_picking_changes_none_of_what_it_was_given(self) -> None:
        router, offered = self.make_router(), candidates(2, 1, 0)
        before = list(offered)
        router.pick(request(), offered)
        assert offered == before

    def test_a_burst_is_spread_evenly_although_no_engine_has_reported_any_of_it(self) -> None:
        if not self.balances:
            return
        for engines, size in ((2, 16), (4, 40), (3, 9)):
            router, sent = self.make_router(), [0] * engines
            for number in range(size):
                sent[router.pick(request(number), candidates(*sent))] += 1
            assert max(sent) - min(sent) <= 1, f"{size} requests over {engines} engines went {sent}"

    def test_every_engine_gets_requests(self) -> None:
        router, sent = self.make_router(), [0] * 3
        for number in range(60):
            sent[router.pick(request(number, [number] * 8), candidates(*sent))] += 1
        assert all(sent), f"60 different requests went {sent}"

    def test_events_it_does_not_know_do_no_harm(self) -> None:
        router = self.make_router()
        for event in (CacheEvent("evicted", "full", ("ab",), 4), CacheEvent("reset", "odd"), CacheEvent("new", "x")):
            router.observe(1, [event])
        assert router.pick(request(), candidates(0, 0)) in (0, 1)
