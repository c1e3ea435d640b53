"""The routers, each against the kit, and the kit against planted faults."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from hotswap.core.interfaces.deployment import Candidate, EngineFactory, EventListener, Loads, Router
from hotswap.core.interfaces.kvcache import CacheEvent, CacheKey
from hotswap.core.request import FinishReason, OutputSink, Request, RequestOutput, SamplingParams
from hotswap.core.testing.rig import build
from hotswap.core.testing.router import RouterSuite, candidates, request
from hotswap.plugins.parallel import cached_pages
from hotswap.plugins.parallel.cached_pages import Union, prompt_digests
from hotswap.plugins.parallel.fleet import Fleet
from hotswap.plugins.parallel.routers import LeastLoaded, PrefixAware, RoundRobin

PAGE = 4


class TestRoundRobin(RouterSuite):
    def make_router(self) -> Router:
        return build("router", "round_robin")

    def test_engines_take_turns_and_one_that_is_away_is_passed_over(self) -> None:
        router = self.make_router()
        assert [router.pick(request(), candidates(0, 0, 0)) for _ in range(4)] == [0, 1, 2, 0]
        assert router.pick(request(), candidates(0, 0, 0, skip=1)) == 2
        assert router.pick(request(), candidates(0, 0, 0)) == 0


class TestLeastLoaded(RouterSuite):
    def make_router(self) -> Router:
        return build("router", "least_loaded")

    def test_what_engines_report_of_other_senders_counts_too(self) -> None:
        assert self.make_router().pick(request(), candidates(1, 3, reported=[5, 0])) == 1

    def test_an_old_report_never_hides_what_was_sent(self) -> None:
        assert self.make_router().pick(request(), candidates(7, 3, reported=[0, 3])) == 1


class TestPrefixAware(RouterSuite):
    def make_router(self) -> Router:
        return build("router", "prefix_aware", max_imbalance=2)


class TestPrefixes:
    def router(self, cached: dict[int, Sequence[int]], page_size: int = PAGE) -> PrefixAware:
        """A router that was told of prompts cached at engines."""
        router: PrefixAware = build("router", "prefix_aware", max_imbalance=2)
        for engine, tokens in cached.items():
            router.observe(engine, [CacheEvent(
                "stored", "full", tuple(prompt_digests(request(0, tokens), page_size)), page_size)])
        return router

    def test_the_engine_with_the_longest_cached_beginning_gets_the_request(self) -> None:
        shared = list(range(20))
        router = self.router({1: shared[:8], 2: shared[:16]})
        assert router.pick(request(0, [*shared, 5]), candidates(0, 0, 0)) == 2
        assert router.pick(request(0, [*shared[:9], 7, 7, 7, 7]), candidates(0, 1, 0)) in (1, 2)
        assert router.pick(request(0, [9, 9, 9, 9, 9]), candidates(0, 1, 1)) == 0

    def test_a_prefix_counts_only_as_long_as_its_engine_is_not_much_busier(self) -> None:
        router = self.router({1: range(16)})
        assert router.pick(request(0, range(16)), candidates(0, 2)) == 1
        assert router.pick(request(0, range(16)), candidates(0, 3)) == 0

    def test_only_a_contiguous_beginning_counts(self) -> None:
        router = self.router({1: range(16)})
        first = prompt_digests(request(0, range(16)), PAGE)[0]
        router.observe(1, [CacheEvent("evicted", "full", (first,), PAGE)])
        assert router.pick(request(0, range(16)), candidates(0, 0)) == 0

    def test_a_reset_is_heard(self) -> None:
        router = self.router({1: range(16)})
        router.observe(1, [CacheEvent("reset", "full", page_size=PAGE)])
        assert router.pick(request(0, range(16)), candidates(0, 0)) == 0

    def test_another_salt_finds_nothing(self) -> None:
        router = self.router({1: range(16)})
        salted = Request("r", list(range(16)), SamplingParams(), cache_key=CacheKey(salt="other"))
        assert router.pick(salted, candidates(0, 0)) == 0

    def test_engines_may_have_pages_of_different_sizes(self) -> None:
        router = self.router({1: range(16)})
        router.observe(0, [CacheEvent("stored", "full", tuple(prompt_digests(request(0, range(24)), 8)), 8)])
        assert router.pick(request(0, range(24)), candidates(0, 0)) == 0

    def test_several_engines_seen_as_one_have_what_any_of_them_has(self) -> None:
        union = Union()
        assert union.merge(0, [CacheEvent("stored", "full", ("a", "b"), 4)])[0].keys == ("a", "b")
        assert union.merge(1, [CacheEvent("stored", "full", ("b", "c"), 4)])[0].keys == ("c",)
        assert union.merge(0, [CacheEvent("evicted", "full", ("b",), 4)]) == []
        last = union.merge(1, [CacheEvent("reset", "full", page_size=4)])
        assert [(event.kind, event.keys) for event in last] == [("evicted", ("b", "c"))]


class Engine:
    """Takes everything, and answers when it is told to."""

    failure: str | None = None

    def __init__(self) -> None:
        self.sinks: dict[str, OutputSink] = {}

    def health(self) -> None:
        return None

    def loads(self) -> Loads:
        return Loads(0, 0, 0.0)

    def watch(self, listener: EventListener) -> None:
        self.listener = listener

    def add(self, request: Request, sink: OutputSink) -> None:
        self.sinks[request.id] = sink


def test_pages_of_a_lost_engine_attract_nothing_any_more() -> None:
    """Of fleets within a fleet: the outer router knows the inner ones by what they say that they have."""
    engines: list[Any] = [Engine() for _ in range(3)]

    def fleet(*members: Any) -> Any:
        return Fleet(
            [(EngineFactory(str(number), "", lambda: None), one) for number, one in enumerate(members)],  # type: ignore
            build("router", "prefix_aware"))

    inner = fleet(engines[0], engines[1])
    outer = fleet(inner, engines[2])
    for number in (0, 2):  # the first has cached most of it, another fleet some
        digests = prompt_digests(request(0, range(24)), PAGE)[: 6 if number == 0 else 2]
        engines[number].listener([CacheEvent("stored", "full", tuple(digests), PAGE)])
    engines[1].listener([CacheEvent("stored", "full", ("other",), PAGE)])
    outer.add(request(1, range(24)), lambda output: None)
    assert list(engines[0].sinks) == ["r1"]
    engines[0].failure = "killed"
    outer.add(request(2, range(24)), lambda output: None)
    assert list(engines[2].sinks) == ["r2"]
    assert outer._router._pages.count(0) == 1, "what the others of the fleet have stays"


def test_outputs_and_events_wait_for_no_prompt_to_be_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Engine()
    fleet = Fleet([(EngineFactory("0", "", lambda: engine), engine)], build("router", "prefix_aware"))
    stored = CacheEvent("stored", "full", ("a",), PAGE)
    engine.listener([stored])
    fleet.add(request(1), lambda output: None)
    begun, go_on = threading.Event(), threading.Event()

    def hash_slowly(*_: Any) -> list[str]:
        begun.set()
        go_on.wait(10)
        return []

    monkeypatch.setattr(cached_pages, "prompt_digests", hash_slowly)
    adding = threading.Thread(target=fleet.add, args=(request(2), lambda output: None))
    adding.start()
    assert begun.wait(5)

    def others() -> None:
        engine.sinks["r1"](RequestOutput("r1", [], "", finish_reason=FinishReason.STOP))
        engine.listener([stored])

    free = threading.Thread(target=others, daemon=True)
    free.start()
    free.join(2)
    waited = free.is_alive()
    go_on.set()
    adding.join(5)
    free.join(5)
    assert not waited
    assert "r2" in engine.sinks


class Stuck(LeastLoaded):
    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        return candidates[0].engine


class Outside(LeastLoaded):
    """Chooses by position, which is no engine's number once one is away."""

    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        return min(range(len(candidates)), key=lambda place: candidates[place].loads.dispatched)


class Stale(LeastLoaded):
    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        return min(candidates, key=lambda one: one.loads.running).engine


class Sorting(RoundRobin):
    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        candidates.sort(key=lambda one: one.loads.dispatched)  # type: ignore[attr-defined]
        return super().pick(request, candidates)


@pytest.mark.parametrize("faulty", [Stuck, Outside, Stale, Sorting])
def test_the_kit_finds_a_router_that(faulty: type[Router]) -> None:
    suite = RouterSuite()
    suite.make_router = faulty  # type: ignore[method-assign]
    complaints = 0
    for name in [name for name in dir(RouterSuite) if name.startswith("test_")]:
        try:
            getattr(suite, name)()
        except AssertionError:
            complaints += 1
    assert complaints
