"""Several engines behind one face: requests are routed, counted, and followed until they end."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from hotswap.core.blame import blame
from hotswap.core.errors import EngineStoppedError, QueueFullError
from hotswap.core.interfaces.deployment import (
    Candidate,
    EngineClient,
    EngineFactory,
    EngineStatus,
    EventListener,
    Loads,
    Router,
)
from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.request import FinishReason, OutputSink, Request, RequestOutput
from hotswap.plugins.parallel.cached_pages import Union

logger = logging.getLogger(__name__)

_Picker = Callable[[Sequence[Candidate]], int]


@dataclass
class _Route:
    """Where a live request is. ``engine`` is None until one has been chosen."""

    engine: int | None = None
    aborted: bool = False


class Fleet:
    """Implements ``EngineClient``. A request goes to one engine and stays there; a fork goes where its parent is, whose
    pages it shares. An engine that has ended, or whose health is red while another's is not, gets no new ones; the
    requests that it had end with its error.
    """

    def __init__(self, members: Sequence[tuple[EngineFactory, EngineClient]], router: Router) -> None:
        self._factories = [factory for factory, _ in members]
        self._clients = [client for _, client in members]
        self._router = router
        self._lock = threading.Lock()  # never held while a member is called
        self._routes: dict[str, _Route] = {}
        self._dispatched = [0] * len(members)
        self._lost: set[int] = set()
        self._misrouted = 0
        self._on_loss: list[Callable[[int], None]] = []
        self.stand_in: Callable[[], str | None] = lambda: None
        """What the log says of others who do the work when all engines have ended; set by who has such."""
        if router.reads_events:
            for number, client in enumerate(self._clients):
                client.watch(partial(self._observe, number))

    @classmethod
    def start(cls, *groups: tuple[Sequence[EngineFactory], Router]) -> "list[Fleet]":
        """A fleet for each group. Engines are started side by side; where one cannot be, the others are stopped and its
        error is raised."""
        with ThreadPoolExecutor(sum(len(factories) for factories, _ in groups), "hotswap-start") as pool:
            starts = [[(factory, pool.submit(factory.start)) for factory in factories] for factories, _ in groups]
        flat = [start for group in starts for _, start in group]
        if failed := [error for start in flat if (error := start.exception()) is not None]:
            _side_by_side([start.result().stop for start in flat if start.exception() is None])
            raise failed[0]
        return [
            cls([(factory, start.result()) for factory, start in group], router)
            for group, (_, router) in zip(starts, groups, strict=True)]

    # EngineClient

    def add(self, request: Request, sink: OutputSink) -> None:
        route = _Route()
        with self._lock:
            taken = self._routes.setdefault(request.id, route) is not route
        if taken:
            error = f"a request with the id {request.id!r} lives already; give each its own"
            return sink(RequestOutput(request.id, [], "", finish_reason=FinishReason.ERROR, error=error))
        try:
            client = self._hand_over(request, route, partial(self._deliver, route, sink))
        except BaseException:
            with self._lock:
                del self._routes[request.id]
            raise
        if route.aborted:  # while it was on its way
            client.abort(request.id)
        return None

    def abort(self, request_id: str) -> None:
        with self._lock:
            route = self._routes.get(request_id)
            if route is None:
                return
            route.aborted, engine = True, route.engine
        if engine is not None:
            self._clients[engine].abort(request_id)

    def loads(self) -> Loads:
        ended, every = self._ended(), [client.loads() for client in self._clients]
        reports = [report for number, report in enumerate(every) if number not in ended]
        counts = summed([{"misrouted": self._misrouted}, *(report.extra for report in every)])  # which never go back
        usage = sum(report.kv_usage for report in reports) / max(1, len(reports))
        return Loads(
            sum(report.running for report in reports), sum(report.waiting for report in reports), usage,
            len(self._routes), counts)

    def engines(self) -> Sequence[EngineStatus]:
        found: list[EngineStatus] = []
        for factory, client, loads in zip(self._factories, self._clients, self._all_loads(), strict=True):
            found += client.engines() or [EngineStatus(factory.name, factory.role, client.health(), loads)]
        return found

    def watch(self, listener: EventListener) -> None:
        """The engines are seen as one, whose pages go with an engine that is lost."""
        union, lock = Union(), threading.Lock()

        def tell(change: Callable[[], list[CacheEvent]]) -> None:
            with lock:
                if merged := change():
                    listener(merged)

        def hear(number: int, events: Sequence[CacheEvent]) -> None:
            tell(partial(union.merge, number, events))

        for number, client in enumerate(self._clients):
            client.watch(partial(hear, number))
        self._on_loss.append(lambda number: tell(partial(union.lose, number)))

    def reset(self) -> int:
        return sum(client.reset() for number, client in enumerate(self._clients) if number not in self._ended())

    def health(self) -> str | None:
        """None while one of the engines is well."""
        problems = [client.health() for client in self._clients]
        return None if None in problems else self._told(problems)

    @property
    def failure(self) -> str | None:
        """Of all engines, where not one will serve again."""
        ended = self._ended()
        if len(ended) < len(self._clients):
            return None
        return self._told([client.failure for client in self._clients])

    def drain(self, timeout_s: float) -> None:
        _side_by_side([partial(client.drain, timeout_s) for client in self._clients])

    def stop(self) -> None:
        _side_by_side([client.stop for client in self._clients])

    # routing

    def _hand_over(self, request: Request, route: _Route, sink: OutputSink) -> EngineClient:
        """Add the request to an engine that takes it; the error of the last one where none does."""
        refused: dict[int, EngineStoppedError | QueueFullError] = {}
        pick = self._prepare(request)
        while True:
            engine = self._choose(request, route, refused, pick)
            client = self._clients[engine]
            try:
                client.add(request, sink)
                return client
            except (EngineStoppedError, QueueFullError) as error:
                refused[engine] = error
                self._count(engine, -1)
            except BaseException:
                self._count(engine, -1)
                raise

    def _choose(
        self, request: Request, route: _Route, refused: dict[int, EngineStoppedError | QueueFullError], pick: _Picker,
    ) -> int:
        ended = self._ended()
        left = [number for number in range(len(self._clients)) if number not in ended and number not in refused]
        if not left:
            full = next((error for error in refused.values() if isinstance(error, QueueFullError)), None)
            raise full or next(iter(refused.values()), None) or EngineStoppedError(
                self.failure or "every engine has ended")
        well = [number for number in left if self._clients[number].health() is None] or left
        reports = {number: self._clients[number].loads() for number in well}
        with self._lock:  # so that a burst from several threads is counted
            parent = self._routes.get(request.fork_of or "") if request.continued is None else None
            if parent is not None and parent.engine in reports:
                engine = parent.engine
            else:
                engine = self._pick(pick, [
                    Candidate(number, self._factories[number].role, replace(
                        report, dispatched=self._dispatched[number]))
                    for number, report in reports.items()])
            self._dispatched[engine] += 1
            route.engine = engine
        return engine

    def _prepare(self, request: Request) -> _Picker:
        """Without the lock, for which the outputs of every engine wait."""
        try:
            return self._router.prepare(request)
        except Exception as error:
            return partial(self._misroute, error, "prepare")

    def _pick(self, pick: _Picker, candidates: Sequence[Candidate]) -> int:
        try:
            engine = pick(candidates)
            if engine not in [candidate.engine for candidate in candidates]:
                raise ValueError(f"it chose engine {engine!r} of {[candidate.engine for candidate in candidates]}")
            return engine
        except Exception as error:
            return self._misroute(error, "pick", candidates)

    def _misroute(self, error: Exception, method: str, candidates: Sequence[Candidate]) -> int:
        self._misrouted += 1
        logger.error("%s; the engine with the fewest requests is taken", blame(error, self._router, method),
                     exc_info=error)
        return min(candidates, key=lambda candidate: candidate.loads.dispatched).engine

    def _deliver(self, route: _Route, sink: OutputSink, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            with self._lock:
                self._routes.pop(output.request_id, None)
                if route.engine is not None:
                    self._dispatched[route.engine] -= 1
        sink(output)

    def _count(self, engine: int, change: int) -> None:
        with self._lock:
            self._dispatched[engine] += change

    def _observe(self, engine: int, events: Sequence[CacheEvent]) -> None:
        with self._lock:
            self._router.observe(engine, events)

    def _all_loads(self) -> list[Loads]:
        with self._lock:
            dispatched = list(self._dispatched)
        return [
            replace(client.loads(), dispatched=count) for client, count in zip(self._clients, dispatched, strict=True)]

    def _ended(self) -> set[int]:
        """Engines that will not serve again; each is reported once."""
        ended = {number for number, client in enumerate(self._clients) if client.failure is not None}
        lost, self._lost = ended - self._lost, self._lost | ended  # before asking others, who may ask back
        if lost:
            left, total = len(self._clients) - len(ended), len(self._clients)
            after = (None if left else self.stand_in()) or f"{left} of {total} serve on"
            for number in lost:
                logger.error(
                    "engine %s is lost, %s: %s", self._factories[number].name, after, self._clients[number].failure)
                for tell in self._on_loss:
                    tell(number)
        return ended

    def _told(self, problems: Sequence[str | None]) -> str:
        return "; ".join(
            f"engine {factory.name}: {problem}" for factory, problem in zip(self._factories, problems, strict=True))


def summed(extras: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What deployments count, by name, over those that are within one another. What is no number (an engine's drafts,
    its worker's events) stays with its engine, where :meth:`Fleet.engines` shows it."""
    counts: Counter[str] = Counter()
    for extra in extras:
        counts.update({name: value for name, value in extra.items() if type(value) is int})
    return dict(counts)


def _side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Each may take its time; the first exception is raised when all have ended."""
    errors: list[Exception] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), name="hotswap-fleet", daemon=True) for call in calls]
    for thread, call in zip(threads, calls, strict=True):
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and no thread can be started any more
            run(call)
    for thread in threads:
        if thread.ident is not None:
            thread.join()
    if errors:
        raise errors[0]
