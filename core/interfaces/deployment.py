"""Several engines behind one face. ``deployment/1``, ``router/1``.

A deployment leads the config's ``parallel`` list; what each of its engines spreads over is in ``parallel.py``.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.kvcache import CacheEvent
from hotswap.core.request import OutputSink, Request


@dataclass(frozen=True)
class Loads:
    """What a router may know of an engine. ``running`` and ``waiting`` count requests, ``kv_usage`` is a share of the
    pages. ``dispatched``: requests sent there that have not ended, counted by who sent them at the moment of sending,
    so that a burst is seen before the engine has reported it; 0 where nobody counts."""

    running: int
    waiting: int
    kv_usage: float
    dispatched: int = 0
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineStatus:
    """One engine of a deployment. ``problem``: what ``health`` says, None when well."""

    name: str
    role: str
    problem: str | None
    loads: Loads


EventListener = Callable[[Sequence[CacheEvent]], None]
"""Called from an engine's loop thread; must not block."""


class EngineClient(Protocol):
    """The one face of an engine and of a deployment of engines. All methods may be called from any thread."""

    def add(self, request: Request, sink: OutputSink) -> None:
        """Start a request; its outputs go to ``sink``, the last one with a finish reason.

        Raises RequestError for what cannot be served, QueueFullError, EngineStoppedError. The id must be no other live
        request's: such a one ends with an error at once."""

    def abort(self, request_id: str) -> None:
        """End a request; a no-op where it has ended. Its sink still gets exactly one final output."""

    def loads(self) -> Loads: ...

    def engines(self) -> Sequence[EngineStatus]:
        """Of a deployment: every engine behind it; of an engine: nothing."""

    def watch(self, listener: EventListener) -> None:
        """Tell ``listener`` from now on which cached pages come and go."""

    def reset(self) -> int:
        """Drop the reusable prefix cache; returns the number of pages dropped."""

    def health(self) -> str | None:
        """None when work gets done, else what is wrong."""

    @property
    def failure(self) -> str | None:
        """Why it has ended by itself and will never serve again; None while it may, and after ``stop``."""

    def drain(self, timeout_s: float) -> None:
        """Take no new request, finish what runs; after ``timeout_s`` abort the rest."""

    def stop(self) -> None: ...


class Candidate(NamedTuple):
    """An engine that takes requests. ``engine``: its number in the deployment, the same for as long as it runs."""

    engine: int
    role: str
    loads: Loads


class Router(Component):
    """Chooses the engine for a request. Its deployment calls it from one thread at a time, but for ``prepare``."""

    kind: ClassVar[str] = "router"
    contract: ClassVar[str] = "router/1"
    reads_events: ClassVar[bool] = False
    """Whether ``observe`` is to be called."""

    @abstractmethod
    def pick(self, request: Request, candidates: Sequence[Candidate]) -> int:
        """The ``engine`` of one of the ``candidates``, of which there is at least one; engines that are down or full
        are not among them. Takes microseconds: everything else that the deployment does waits for it."""

    def prepare(self, request: Request) -> "Callable[[Sequence[Candidate]], int]":
        """``pick`` for this request, after what takes long and needs no candidates (hashing a prompt). Deployments call
        it first, while nobody waits, and from several threads at a time; what it returns is called as ``pick`` is, once
        for each engine that refuses the request."""
        return partial(self.pick, request)

    def observe(self, engine: int, events: Sequence[CacheEvent]) -> None:
        """Cached pages have come or gone at ``engine``."""


@dataclass(frozen=True)
class Role:
    """``replicas`` engines of a deployment that do the same.

    ``parallel``: their own strategies, given by the deployment's option ``path``; None: those behind the deployment in
    the config's list.
    """

    name: str
    replicas: int
    parallel: tuple[ComponentRef, ...] | None = None
    path: str = ""


class EngineFactory(NamedTuple):
    """Starts one of the engines that a deployment asked for, or a deployment of such. ``start`` loads weights, raises
    ConfigError, and several may be started at the same time."""

    name: str
    role: str
    start: Callable[[], EngineClient]


class Deployment(Component):
    """Several engines behind one face. Nests, because engines and deployments share :class:`EngineClient`."""

    kind: ClassVar[str] = "deployment"
    contract: ClassVar[str] = "deployment/1"

    @abstractmethod
    def roles(self) -> Sequence[Role]:
        """What engines it needs."""

    @abstractmethod
    def start(self, factories: Sequence[EngineFactory], now: Callable[[], float]) -> EngineClient:
        """Start the engines, ``replicas`` of each role in the order of ``roles``. Where one cannot be started, those
        that run are stopped and its error is raised. ``now`` gives seconds by the engines' clock."""
