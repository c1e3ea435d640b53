"""Queue policies: in which order requests are served. The one that keeps accounts is ``fair_share.py``."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView


class FirstComeFirstServed(QueuePolicy):
    """In order of arrival. Choose it when no request matters more than another.

    A suspended request keeps its place, since its arrival does not change.
    """

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        return (view.sequence,)


class Priority(QueuePolicy):
    """By the request's ``priority``, smaller is sooner (as in vLLM), then by arrival.

    A waiting request of a better priority suspends a running one of a worse priority when there is no room for both.
    Choose it when some clients must not wait for others; the worst priority can starve.
    """

    preemptive = True

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        return (view.priority, view.sequence)


class ShortestFirst(QueuePolicy):
    """Requests with few tokens go first, which makes the mean time that requests wait as short as it can be (Smith,
    "Various Optimizers for Single-Stage Production", 1956). Choose it when short questions must not wait behind long
    ones, and clients say how much they want: ``max_tokens`` counts as if it were used up, the whole context where it is
    left out.

    A request counts as shorter the longer it waits: only those that arrive within (difference of the lengths ÷
    ``tokens_per_second``) seconds of it can overtake it, so nobody waits for ever.
    """

    class Options(ComponentOptions):
        tokens_per_second: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 100.0
        """By how much a request counts as shorter for each second that it waits. 0: length alone; long requests can
        starve."""

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        # Length minus rate * (now - arrival). ``now`` is the same for all: without it the key stays, and fits a heap.
        length = view.prompt_length + view.max_new
        return (length + self.options.tokens_per_second * view.arrival, view.sequence)


class LongestPrefixFirst(QueuePolicy):
    """Requests that find the longest prefix of theirs in the cache go first (Zheng et al., "SGLang: Efficient Execution
    of Structured Language Model Programs", 2024, whose RadixAttention shows that this order finds the most hits).

    Choose it with ``prefix`` or ``radix`` where more prompts share prefixes than the cache can hold: requests of one
    family run together, before their prefix is evicted. A request that was overtaken by ``max_overtaken`` others goes
    before all that were not, so that one without a hit waits for those at most and for whoever waited before it.
    """

    dynamic = True
    probes: ClassVar[int] = 64
    """Matching costs time in proportion to the prompts, so those far back in a long queue count as without a hit."""

    class Options(ComponentOptions):
        max_overtaken: Annotated[int, Field(ge=0)] = 32
        """So many requests may start while another waits, which then goes first."""

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._started = 0
        self._before: dict[str, int] = {}
        """How many had started when a request arrived."""

    def admit(self, view: RequestView) -> None:
        self._before.setdefault(view.id, self._started)

    def start(self, view: RequestView) -> None:
        self._started += 1

    def drop(self, request_id: str) -> None:
        self._before.pop(request_id, None)

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        overtaken = self._started - self._before.get(view.id, self._started)
        if view.running or overtaken >= self.options.max_overtaken:
            return (0, 0, view.sequence)
        return (1, -view.reusable, view.sequence)
