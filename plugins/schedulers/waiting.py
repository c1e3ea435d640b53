"""The waiting line of the stock schedulers: ordered by a queue policy, a heap where keys do not change with time."""

import heapq
from typing import Any

from hotswap.core.interfaces.scheduler import QueuePolicy, RequestView

Key = tuple[Any, ...]


class WaitingLine:
    """Holds the views of waiting requests. Ids that were dropped leave the heap when they come up."""

    def __init__(self, policy: QueuePolicy) -> None:
        self.policy = policy
        self._views: dict[str, RequestView] = {}
        self._heap: list[tuple[Key, str]] = []

    def __len__(self) -> int:
        return len(self._views)

    def push(self, view: RequestView, now: float) -> None:
        self._views[view.id] = view
        if not self.policy.dynamic:
            heapq.heappush(self._heap, (self.policy.key(view, now), view.id))

    def remove(self, request_id: str) -> None:
        self._views.pop(request_id, None)

    def head(self, now: float) -> RequestView | None:
        """The next request in order that the policy's gate lets through."""
        if not self.policy.dynamic:
            while self._heap and self._heap[0][1] not in self._views:
                heapq.heappop(self._heap)
            first = self._views[self._heap[0][1]] if self._heap else None
            if first is None or self.policy.gate(first, now) is None:
                return first
        candidates = (view for view in self._views.values() if self.policy.gate(view, now) is None)
        return min(candidates, key=lambda view: self.policy.key(view, now), default=None)
