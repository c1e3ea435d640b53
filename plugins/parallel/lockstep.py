"""Engines whose ranks need one another in every step, though each has requests of its own."""

from collections.abc import Callable
from threading import RLock

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.execution.channel import Kind
from hotswap.core.interfaces.parallel import Meeting, RankPlan
from hotswap.plugins.parallel.crew import Crew


class Lockstep:
    """One for all ``count`` engines. Whichever submits a step has every other one's rank join it, under one lock, so
    that all ranks see steps and joins in the same order and as many of them.

    A rank that is to join while a step of its own waits runs that one in its place, and joins later (``rank.py``):
    where all engines are busy, their steps run together, and the joins that remain are empty.
    """

    def __init__(self, count: int) -> None:
        self._count, self._lock = count, RLock()
        self._crews: dict[int, Crew] = {}

    def enter(self, index: int, crew: Crew) -> None:
        with self._lock:
            self._crews[index] = crew

    def submit(self, index: int, send: Callable[[], None]) -> None:
        """``send`` gives the step to the engine's own rank. EngineStoppedError where an engine is gone."""
        with self._lock:
            if len(self._crews) < self._count:
                raise EngineStoppedError("an engine that takes part in every step is gone")
            send()
            for other, crew in self._crews.items():
                if other != index:
                    crew.send(Kind.JOIN, b"", 0)

    def leave(self, index: int, problem: str | None) -> None:
        """``problem``: why the engine is gone, which ends the others; None where it was told to stop."""
        with self._lock:
            if self._crews.pop(index, None) is None:
                return
            others = list(self._crews.values())
            if problem is not None:
                self._crews.clear()
        for crew in others if problem is not None else ():
            crew.fail(f"another engine, which takes part in every step, is gone: {problem}")


def lockstep_of(plan: RankPlan, meeting: Meeting | None) -> Lockstep | None:
    """The one that the engines of ``plan`` share; None where they are independent. ConfigError for a number of engines
    that cannot work."""
    across, replica = plan.across, plan.replica
    if across is None:
        return None
    if replica.count < 2 or meeting is None:
        raise ConfigError(
            f"{across.strategy} spreads over the engines of a deployment or over the ranks of tensor, and there is one "
            f"of each; name it behind data or before tensor: parallel: [{{use: data, replicas: 2}}, {across.strategy}] "
            f"or [{across.strategy}, {{use: tensor, size: 2}}]", "parallel")
    if replica.count > across.most:
        raise ConfigError(
            f"{replica.count} engines cannot share {across.most} of {' and '.join(across.axes)}; at most {across.most} "
            "can", "parallel")
    return meeting.share("lockstep", lambda: Lockstep(replica.count))
