"""Which engine of a deployment gets a request."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.deployment import Candidate, Loads, Router
from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.request import Request
from hotswap.plugins.parallel.cached_pages import CachedPages


def load(loads: Loads) -> int:
    """Live requests. What was sent and what is reported are two counts of the same requests, the first of which is
    never late, and the second of which also knows those of other senders."""
    return max(loads.dispatched, loads.running + loads.waiting)


class RoundRobin(Router):
    """One engine after the other.

    Choose it for requests that cost about the same, or as a baseline.
    """

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._last = -1

    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        self._last = min(
            (candidate.engine for candidate in candidates), key=lambda engine: (engine <= self._last, engine))
        return self._last


class LeastLoaded(Router):
    """The engine with the fewest live requests, of several the one with the most free pages.

    Choose it for requests of different lengths. Requests are counted when they are sent, so that a burst is spread
    before an engine has reported any of it.
    """

    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        return min(candidates, key=lambda one: (load(one.loads), one.loads.kv_usage, one.engine)).engine


class PrefixAware(Router):
    """The engine that has cached most of the prompt, as long as it is not much busier than the idlest; a prompt that
    nobody knows goes to the idlest, of several to the one that has cached least.

    Choose it where prompts share beginnings (a system prompt, a conversation that goes on). It keeps the digests of the
    pages that the engines have told to be cached, so it needs a KV manager that tells (``prefix``); without, it is
    ``least_loaded``. After the cache-aware routing of SGLang (its router, 2024) and the KV events of NVIDIA Dynamo.
    """

    reads_events = True

    class Options(ComponentOptions):
        max_imbalance: Annotated[int, Field(ge=0)] = 4
        """How many more live requests than the idlest engine one may have and still be chosen for its cache."""

    options: Options

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._pages = CachedPages()

    def observe(self, engine: int, events: Sequence[CacheEvent]) -> None:
        self._pages.apply(engine, events)

    def prepare(self, request: Request) -> Callable[[Sequence[Candidate]], int]:
        return partial(self._pick, request, self._pages.digests(request))

    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        return self.prepare(request)(candidates)

    def _pick(self, request: Request, digests: dict[int, list[str]], candidates: Sequence[Candidate]) -> int:
        most = min(load(one.loads) for one in candidates) + self.options.max_imbalance
        eligible = [one for one in candidates if load(one.loads) <= most]
        cached = self._pages.reusable(request, [one.engine for one in eligible], digests)
        return min(eligible, key=lambda one: (
            -cached[one.engine], load(one.loads), self._pages.count(one.engine), one.engine)).engine
