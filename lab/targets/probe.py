"""Counts what an engine of this process does, as an observer of its loop."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hotswap.core.engine.pool import RequestPool, RequestState
from hotswap.core.hooks import Observer, hookimpl
from hotswap.core.interfaces.kvcache import CacheUsage
from hotswap.core.interfaces.messages import Verdict

TIMELINE_S = 0.02
"""Least time between two points of the timeline."""


@dataclass
class Told:
    """What is known of a request when it has ended."""

    queued: float | None = None
    preemptions: int = 0


@dataclass
class Counts:
    engine: dict[str, float] = field(default_factory=dict)
    timeline: list[tuple[float, int, int, float]] = field(default_factory=list)


class Probe(Observer):
    """Attached to one engine loop for as long as that lives. ``page_bytes``: of a cache page, on all ranks.
    ``page_tokens``: how many tokens fit in one; None where a request does not hold one page for so many of its tokens,
    since there are several cache groups, or windows. ``owners``: how many pages each request holds."""

    def __init__(
        self, pool: RequestPool, page_bytes: float, page_tokens: int | None, owners: Callable[[], Mapping[str, int]],
    ) -> None:
        super().__init__()
        self._pool, self._page_bytes, self._page_tokens, self._owners = pool, page_bytes, page_tokens, owners
        self._lock = threading.Lock()
        self._told: dict[str, Told] = {}
        self._counts, self._origin = Counts(), 0.0

    def begin(self, now: float) -> None:
        """Count from zero; the timeline starts at ``now``."""
        with self._lock:
            self._counts, self._origin = Counts(), now
            self._told.clear()

    def counts(self) -> Counts:
        with self._lock:
            return self._counts

    def told(self, id: str) -> Told:
        """Of a request that has ended, once."""
        with self._lock:
            return self._told.pop(id, Told())

    @hookimpl
    def hotswap_request_finished(self, request: RequestState, reason: str, time: float) -> None:
        started = request.first_scheduled_at
        with self._lock:
            self._told[request.id] = Told(
                None if started is None else started - request.arrival, request.preemptions)

    @hookimpl
    def hotswap_step_finished(self, verdict: Verdict, usage: CacheUsage, time: float, duration: float) -> None:
        drafted = [row.accepted for row in verdict.rows if row.drafted]
        worked = sum(verdict.durations.values()) if verdict.durations else duration
        with self._lock:
            self._add(steps=1, rows=len(verdict.rows), step_seconds=worked, drafted_rows=len(drafted),
                      accepted_drafts=sum(drafted))
            counts, held = self._counts, usage.held * self._page_bytes
            counts.engine["kv_peak_bytes"] = max(counts.engine.get("kv_peak_bytes", 0.0), held)
            since = time - self._origin
            if not counts.timeline or since - counts.timeline[-1][0] >= TIMELINE_S:
                share = (usage.held + usage.fenced) / max(1, usage.total)
                counts.timeline.append((since, len(self._pool.running), self._pool.waiting, share))
                self._add(**self._slots())

    def _slots(self) -> dict[str, int]:
        """Places for tokens in the pages of those that run, and how many of them are empty. A page that several share
        counts for each."""
        if self._page_tokens is None:
            return {}
        pages, running = self._owners(), self._pool.running
        slots = self._page_tokens * sum(pages.get(id, 0) for id in running)
        return {"kv_slots": slots, "kv_empty_slots": max(0, slots - sum(state.computed for state in running.values()))}

    def _add(self, **amounts: Any) -> None:
        for name, amount in amounts.items():
            self._counts.engine[name] = self._counts.engine.get(name, 0) + amount
