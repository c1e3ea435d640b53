"""The KV-cache manager: owns pages, touches no device. ``kvcache/1``, ``eviction_policy/1``.

A page holds ``page_size`` tokens of one cache group. A table maps a request's logical pages to page ids, per group.
All methods are called from the engine's loop thread only, :meth:`KVCacheManager.usage` aside.
"""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from hotswap.core.interfaces.component import Component, Exchange
from hotswap.core.interfaces.scheduler import Answer

Fence = int | str
"""A submitted step's number, or a transfer's name. Step fences pass in order: step n implies all before it."""


@dataclass(frozen=True)
class CacheSpec:
    """One cache group, declared by a model or a speculator.

    ``kind`` is "full", "window", "latent" or "recurrent"; ``window`` counts the tokens a query sees, itself included.
    """

    group: str
    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    bytes_per_token: int
    kind: str = "full"
    window: int | None = None


@dataclass(frozen=True)
class GroupPlan:
    """``num_pages`` counts the dummy page, id ``dummy_page``, which never belongs to a request."""

    num_pages: int
    page_size: int
    dummy_page: int = 0


@dataclass(frozen=True)
class CachePlan:
    """``transfer``: what a KV transfer's host half tells every worker half; a plain value, None where there is none."""

    groups: dict[str, GroupPlan]
    transfer: Any = None


@dataclass(frozen=True)
class CacheConstraints:
    """What the attention backend and the config ask for.

    ``page_sizes``: allowed by the attention backend, None for any. ``page_size``: wanted by the config.
    ``num_pages``: a fixed number from the config, instead of what fits into the bytes.
    """

    max_model_len: int
    max_running: int
    page_size: int | None = None
    page_sizes: tuple[int, ...] | None = None
    num_pages: int | None = None


@dataclass(frozen=True)
class CacheKey:
    """Everything a cached value depends on besides the tokens. Enters the key of each request's first page."""

    model_revision: str = ""
    dtype: str = ""
    adapter: str = ""
    salt: str = ""


class Coming(NamedTuple):
    """Once ``request``, which holds a table, has computed what it was reserved for, ``tokens`` could be reused."""

    request: str
    tokens: int


class Match(NamedTuple):
    """``cached`` tokens lie in pages that can be shared, ``pending`` more elsewhere. ``opaque`` is the manager's own.

    A manager returns ``pending`` 0; core puts in what a KV transfer has found. The pages of pending tokens are the
    request's own: the manager publishes none of them before a ``commit`` says that they are verified.

    ``coming``: a longer prefix that another request is computing, where that is worth waiting for. Core has the request
    wait as long as the other one gets on with it. A manager that does not look for that leaves it None.

    Binding only until the next change of the manager's state; dies when the manager is exchanged.
    """

    cached: int
    pending: int
    opaque: Any = None
    coming: Coming | None = None


class GroupGrant(NamedTuple):
    """The worker cuts its table to ``truncate_to`` logical pages, drops pages below ``first_live``, and appends
    ``pages`` from logical page ``max(truncate_to, first_live)`` on; then it copies each (source, destination) page."""

    truncate_to: int
    pages: tuple[int, ...]
    first_live: int = 0
    copies: tuple[tuple[int, int], ...] = ()


class Grant(NamedTuple):
    """Changes of one request's tables, per group that changes. ``entry`` undoes it; None where nothing changed."""

    groups: dict[str, GroupGrant]
    entry: Any = None


NOTHING = Grant({}, None)
"""A grant that changes nothing: the room was there already."""


@dataclass(frozen=True)
class CacheUsage:
    """In pages, summed over groups, dummy pages not counted. ``held`` by tables, ``fenced`` waiting for a fence,
    ``cached`` reusable and held by nobody, ``free`` empty. ``total = held + fenced + cached + free``."""

    total: int
    held: int
    fenced: int
    cached: int
    free: int


@dataclass(frozen=True)
class CacheEvent:
    """``kind`` is "stored", "evicted" or "reset"; ``keys`` are page digests (hex) of ``page_size`` tokens each, and all
    before them: who knows the key function can tell what a prompt would find."""

    kind: str
    group: str
    keys: tuple[str, ...] = ()
    page_size: int = 0


@dataclass(frozen=True)
class TableState:
    """One request's tables at hand-over."""

    first_live: dict[str, int]
    pages: dict[str, list[int]]
    tokens: list[int]
    verified: int
    key: CacheKey


@dataclass(frozen=True)
class CachedPage:
    """``parent`` is the key of the page before it. ``page`` is the dummy page where the group has lost this one, to a
    window, and only what stands behind it is cached."""

    group: str
    parent: bytes
    tokens: tuple[int, ...]
    page: int


@dataclass(frozen=True)
class KVState:
    """All that a successor needs. ``cached`` lists parents before children."""

    tables: dict[str, TableState]
    cached: list[CachedPage] = field(default_factory=list)


class KVCacheManager(Component):
    """Owns pages, reference counts, the prefix index and the eviction order.

    Offers (in ``describe().offers``) may include "prefix_reuse", "fork", "shrink", "handover", "tables".

    Promises: a LATER is remembered per request until the request asks again or the plan ends (``begin_plan``), and
    GRANTED leaves room for promises made before.
    """

    kind: ClassVar[str] = "kvcache"
    contract: ClassVar[str] = "kvcache/1"
    exchangeable: ClassVar[Exchange] = Exchange.DRAINED

    @abstractmethod
    def configure(self, specs: Sequence[CacheSpec], num_bytes: int, constraints: CacheConstraints) -> CachePlan:
        """Divide ``num_bytes`` into pages. Raises ConfigError when one request of ``max_model_len`` does not fit."""

    @abstractmethod
    def begin_plan(self) -> None:
        """A new plan begins: promises of the last one are forgotten."""

    @abstractmethod
    def match(self, tokens: Sequence[int], key: CacheKey, limit: int, tail: int = 0) -> Match:
        """The longest reusable prefix of at most ``limit`` tokens; no side effect.

        ``tail`` tokens at its end must be recomputed (a speculator's hidden states): cached = (hit - tail) rounded
        down to a page.
        """

    @abstractmethod
    def reserve(
        self, request_id: str, upto: int, match: Match | None = None, key: CacheKey | None = None,
        tokens: Sequence[int] = (),
    ) -> Grant | Answer:
        """Room for tokens ``0 <= position < upto``, all or nothing; LATER or NO otherwise (never GRANTED as such).

        The first reserve of a request binds ``match``, ``key`` and the ``tokens`` known so far.
        """

    def fork(self, parent: str, child: str, upto: int, fence: Fence) -> Grant | Answer:
        """Share the parent's first ``upto`` tokens with a new child; a partial page is copied, its source stays until
        ``fence``. LATER also where the parent has not computed so many; GONE where it has them no more, since a window
        has moved on. Only where "fork" is offered; elsewhere the requests of an n > 1 share by matching.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer fork")

    @abstractmethod
    def commit(self, request_id: str, new_tokens: Sequence[int], verified: int) -> int:
        """``new_tokens`` have become known, and the first ``verified`` tokens are computed and sure: their full pages
        may be shared from now on. Also frees pages outside the window of everything in flight.

        Returns the verified length at which there will be something to do again. Core may put off commits below it; it
        catches up before a fork of the request, its release and a hand-over."""

    @abstractmethod
    def release(self, request_id: str, fences: Iterable[Fence], retain: bool = True) -> Any:
        """Give up a request's table; its pages become reusable when all ``fences`` have passed. ``retain``: keep the
        verified pages in the index; else drop those this request has published that nobody else holds.
        Returns a journal entry. A second release of the same request is a no-op that returns None."""

    def table(self, request_id: str) -> Grant:
        """The pages that a request holds, as a grant from nothing; no side effect. Only where "tables" is offered."""
        raise NotImplementedError(f"{type(self).__name__} does not offer tables")

    @abstractmethod
    def undo(self, entry: Any) -> None:
        """Take back a reserve, fork or release; last in, first out. Evictions stay."""

    def shrink(self, request_id: str, upto: int, fences: Iterable[Fence]) -> None:
        """Pages wholly beyond ``upto`` (the in-flight bound) are not needed. Optional; core does not call it yet."""

    @abstractmethod
    def on_fence(self, fence: Fence) -> None:
        """``fence`` has passed."""

    def handover(self) -> KVState:
        """Everything a successor needs; only when drained. Optional ("handover").

        What it returns is a copy: it goes on as before where the successor refuses."""
        raise NotImplementedError(f"{type(self).__name__} does not offer handover")

    def adopt(self, state: KVState) -> None:
        """Take over tables and cached pages. Optional ("handover"). KVInvariantError, with nothing changed, where it
        cannot: what runs is then computed again."""
        raise NotImplementedError(f"{type(self).__name__} does not offer handover")

    @abstractmethod
    def reset(self) -> int:
        """Forget every cached page that nobody holds; held ones are un-indexed. Returns the number dropped."""

    @abstractmethod
    def usage(self) -> CacheUsage:
        """Counted already: it is asked for in every step, and from any thread, by routers and the server."""

    def owners(self) -> dict[str, int]:
        """Pages per request that holds a table, so that a leak can be reported with its owner."""
        return {}

    @abstractmethod
    def check(self) -> None:
        """Verify every invariant; raises KVInvariantError naming pages and request ids. Slow: for tests and doctors."""

    def events(self) -> list[CacheEvent]:
        """Events since the last call; empties the list. Only kept when :meth:`keep_events` was called."""
        return []

    def keep_events(self, keep: bool) -> None:
        """Start or stop collecting events."""


class EvictionPolicy(Component):
    """Which unpinned page goes first. One instance a cache group. Pages are opaque hashable ids."""

    kind: ClassVar[str] = "eviction_policy"
    contract: ClassVar[str] = "eviction_policy/1"

    @abstractmethod
    def on_insert(self, page: Hashable) -> None:
        """A page enters the index (it is held at that time)."""

    @abstractmethod
    def on_hit(self, page: Hashable) -> None:
        """A page is pinned by a request because of a hit."""

    @abstractmethod
    def on_unpin(self, page: Hashable) -> None:
        """Nobody holds the page any more: it is a candidate."""

    @abstractmethod
    def on_pin(self, page: Hashable) -> None:
        """A candidate is held again: not a candidate."""

    @abstractmethod
    def on_remove(self, page: Hashable) -> None:
        """A page has left the index."""

    @abstractmethod
    def pick(self) -> Hashable:
        """The candidate to evict next. IndexError when there is none."""

    @abstractmethod
    def clone(self) -> "EvictionPolicy":
        """An empty policy with the same options (one is needed per cache group)."""
