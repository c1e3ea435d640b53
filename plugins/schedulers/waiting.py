"""The waiting line of the stock schedulers: ordered by a queue policy, a heap where keys do not change with time."""

import heapq
from collections import deque
from itertools import islice
from typing import Any

from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView

Key = tuple[Any, ...]

PASSED = 64
"""At most so many requests are passed over in a plan: for each, its prompt was compared with the cache."""

SLACK = 64
"""Entries of the heap that may be of requests that left, beside as many as there are requests that wait."""


class WaitingLine:
    """Holds the views of waiting requests. Those that leave stay in the heap until they come up, or are too many."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self._views: dict[str, RequestView] = {}
        self._heap: list[tuple[Key, str]] = []
        self.passed: dict[str, None] = {}
        """Requests that this plan has passed over, in order."""
        self._aside: list[tuple[Key, str]] = []
        self._next: deque[RequestView] = deque()
        """The first of those that the gate lets through, where keys had to be asked for; empty when they may be others.
        """

    def __len__(self) -> int:
        return len(self._views)

    def push(self, view: RequestView, key: Key | None) -> None:
        """``key``: the policy's, None where it changes with time."""
        self._views[view.id] = view
        self._next.clear()
        if key is not None:
            heapq.heappush(self._heap, (key, view.id))

    def remove(self, request_id: str) -> None:
        self._views.pop(request_id, None)
        self._next.clear()
        if len(self._heap) > 2 * len(self._views) + SLACK:
            self._heap = [entry for entry in self._heap if entry[1] in self._views]
            heapq.heapify(self._heap)

    def longest(self, count: int) -> list[str]:
        """Ids of the first ``count`` of those that wait, in the order in which they began to."""
        return list(islice(self._views, count))

    def tokens(self, count: int) -> int:
        """Those of the first ``count`` that wait, in the order in which they began to, be they in the cache or not: to
        look there for each, in each plan, costs more than is gained."""
        return sum(view.prompt_length + view.output_length for view in islice(self._views.values(), max(0, count)))

    def begin_plan(self) -> None:
        """Those that the last plan has passed over are in line again."""
        self.passed.clear()
        self._next.clear()
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()

    def pass_over(self, request_id: str) -> bool:
        """It does not start in this plan, and is no head any more. False: too many were passed over already."""
        if len(self.passed) >= PASSED:
            return False
        self.passed[request_id] = None
        if self._next and self._next[0].id == request_id:
            self._next.popleft()
        return True

    def head(self, now: float) -> RequestView | None:
        """The next request in order that the policy's gate lets through. Keys that change with time are asked for once
        for each start and each plan, and again for all that are passed over in it, be they one or many."""
        if not self.policy.dynamic:
            first = self._first()
            if first is None or self.policy.gate(first, now) is None:
                return first
        if not self._next:
            candidates = (
                view for view in self._views.values()
                if view.id not in self.passed and self.policy.gate(view, now) is None)
            count = PASSED + 1 - len(self.passed) if self.passed else 1
            self._next.extend(heapq.nsmallest(count, candidates, key=lambda view: self.policy.key(view, now)))
        return self._next[0] if self._next else None

    def _first(self) -> RequestView | None:
        """By the heap, whatever the gate says."""
        heap = self._heap
        while heap and (heap[0][1] in self.passed or heap[0][1] not in self._views):
            entry = heapq.heappop(heap)
            if entry[1] in self._views:
                self._aside.append(entry)
        return self._views[heap[0][1]] if heap else None
