"""Fair shares by the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024)."""

from collections import Counter
from heapq import heappop, heappush
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.interfaces.component import ComponentOptions
from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView, StepOutcome

REMEMBERED = 4096
"""At most so many tenants without a request are remembered; of more, those that have got least are forgotten."""

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class FairShare(QueuePolicy):
    """The tenant that has been served least goes first, counted in weighted tokens. Choose it when several clients
    share a server and none may crowd out the others, however many requests it sends.

    Prompt tokens are charged when a request starts, output tokens as they are kept. A tenant that comes back after a
    pause is lifted to the least counter of those that wait: idle time earns no credit. Once that has passed its own
    counter, a tenant without a request need not be remembered, and is not. While tenants have requests waiting, what
    two of them got differs by a bounded amount. Within a tenant, requests go by arrival.
    """

    dynamic = True

    class Options(ComponentOptions):
        input_weight: Weight = 1.0
        """Cost of a prompt token."""
        output_weight: Weight = 2.0
        """Cost of an output token; twice a prompt token's, as in the paper."""
        tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
        """Shares of the tenants, 1 for those that are not named: one of weight 2 gets twice as much."""

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self.counters: dict[str, float] = {}
        """What each tenant was served, in weighted tokens divided by its weight."""
        self._tenants: dict[str, str] = {}  # of the requests that live
        self._live: Counter[str] = Counter()  # how many live, by tenant that has one
        self._ended: dict[str, str] = {}  # of those that have ended since the last step was observed
        self._waiting: set[str] = set()
        self._queued: Counter[str] = Counter()  # how many wait, by tenant that has one
        self._charged: dict[str, float] = {}  # for prompts, by request
        self._floor = 0.0  # the least counter of those that wait, or that of the last to leave the queue; never sinks
        self._idle: list[tuple[float, str]] = []  # heap of counters; stale where a tenant has come back

    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        self._know(view)  # those that ran when this policy took over
        return (self.counters.get(view.tenant, 0.0), view.sequence)

    def admit(self, view: RequestView) -> None:
        self._know(view)
        # What was charged for a start is given back: it is charged again at the next one.
        self._charge(view.tenant, -self._charged.pop(view.id, 0.0))
        if view.tenant not in self._queued:
            self.counters[view.tenant] = max(self.counters[view.tenant], self._raise_floor())
        if view.id not in self._waiting:
            self._waiting.add(view.id)
            self._queued[view.tenant] += 1

    def start(self, view: RequestView) -> None:
        self._leave_queue(view.id)
        cost = self._charged[view.id] = self.options.input_weight * view.prompt_length
        self._charge(view.tenant, cost)

    def observe(self, outcome: StepOutcome) -> None:
        for request_id, kept in outcome.kept:
            if (tenant := self._tenants.get(request_id, self._ended.get(request_id))) is not None:
                self._charge(tenant, self.options.output_weight * kept)
        for tenant in self._ended.values():
            if tenant not in self._live and tenant in self.counters:
                heappush(self._idle, (self.counters[tenant], tenant))
        self._ended.clear()
        if self._idle:
            self._forget_up_to(self._raise_floor())

    def drop(self, request_id: str) -> None:
        self._leave_queue(request_id)
        if (tenant := self._tenants.pop(request_id, None)) is not None:
            _take_one(self._live, tenant)
            self._ended[request_id] = tenant  # its last tokens are observed after it was dropped
        self._charged.pop(request_id, None)

    def _know(self, view: RequestView) -> None:
        if view.id not in self._tenants:
            self._tenants[view.id] = view.tenant
            self._live[view.tenant] += 1

    def _leave_queue(self, request_id: str) -> None:
        if request_id in self._waiting:
            self._waiting.remove(request_id)
            tenant = self._tenants[request_id]
            _take_one(self._queued, tenant)
            if not self._queued:
                self._floor = max(self._floor, self.counters[tenant])

    def _raise_floor(self) -> float:
        if self._queued:
            self._floor = max(self._floor, min(self.counters[tenant] for tenant in self._queued))
        return self._floor

    def _forget_up_to(self, floor: float) -> None:
        """Tenants without a request that would be lifted over their counter, and those that are too many."""
        while self._idle and (self._idle[0][0] <= floor or len(self._idle) > REMEMBERED):
            counter, tenant = heappop(self._idle)
            if tenant not in self._live and self.counters.get(tenant) == counter:
                del self.counters[tenant]

    def _charge(self, tenant: str, cost: float) -> None:
        weight = self.options.tenant_weights.get(tenant, 1.0)
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / weight


def _take_one(counts: Counter[str], name: str) -> None:
    """What has none left is not counted."""
    counts[name] -= 1
    if not counts[name]:
        del counts[name]
