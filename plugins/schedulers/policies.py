"""Queue policies: in which order requests are served."""

from typing import Any

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
