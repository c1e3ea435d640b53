"""How one engine spreads over devices and processes. ``executor/1``, ``shard/1``, ``launcher/1``.

Three contracts stand behind the config's ``parallel`` list: shard strategies map logical axes onto a mesh, an executor
runs one engine loop's workers, a deployment (``deployment.py``) runs several engines behind a router.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.model import ModelFacts

if TYPE_CHECKING:
    from hotswap.core.modeling.mesh import Mesh

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class MeshDim:
    """One dimension of the mesh: ``strategy`` shards ``axes`` over ``size`` ranks.

    An axis is divided evenly, as far as it goes, unless ``cuts`` says where: rank r then holds the indices from
    ``cuts[axis][r]`` to before ``cuts[axis][r + 1]``. Of an axis with fewer indices than ranks, neighbours hold the
    same one.
    """

    strategy: str
    size: int
    axes: tuple[str, ...]
    cuts: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Replica:
    """Where an engine stands among the engines of its process, in the order in which the deployments name them."""

    name: str = ""
    """Unique among them, such as "1" or "0.decode1"; empty for an engine without a deployment."""
    index: int = 0
    count: int = 1
    first_rank: int = 0
    """How many ranks the engines before it have together."""


class Meeting:
    """What the executors of one process's engines share, by name."""

    def __init__(self) -> None:
        self._lock, self._shared = Lock(), dict[str, Any]()

    def share(self, name: str, make: Callable[[], Shared]) -> Shared:
        """The value of that name, which the first one who asks makes."""
        with self._lock:
            if name not in self._shared:
                self._shared[name] = make()
            value: Shared = self._shared[name]
            return value


@dataclass(frozen=True)
class Across:
    """``strategy`` shards ``axes`` over the engines of a deployment, at most ``most`` of them. Each is one rank, with
    requests and a cache of its own; a step of one is a step of all, for which those without rows run an empty one."""

    strategy: str
    axes: tuple[str, ...]
    most: int


@dataclass(frozen=True)
class RankPlan:
    """What the folded strategies ask for. An empty plan is one rank. Ranks are numbered row by row over ``dims``, the
    outermost first: neighbours in number are neighbours in the innermost dimension."""

    dims: tuple[MeshDim, ...] = ()
    depth: int | None = None
    """Greatest number of steps in flight; None: no limit."""
    chained: bool = True
    """Whether one request may be in two steps in flight."""
    across: Across | None = None
    replica: Replica = Replica()
    """Which engine this is, for strategies that span engines and for choosing devices."""

    @property
    def world_size(self) -> int:
        size = 1
        for dim in self.dims:
            size *= dim.size
        return size

    def wrapped(self, dim: MeshDim) -> "RankPlan":
        return replace(self, dims=(dim, *self.dims))


class ShardStrategy(Component):
    """Adds one dimension to the mesh, or spans ranks of others. Folded innermost first."""

    kind: ClassVar[str] = "shard"
    contract: ClassVar[str] = "shard/1"

    @abstractmethod
    def layout(self, facts: ModelFacts, inner: RankPlan) -> RankPlan:
        """Validated against the model's facts before any process starts: ConfigError lists the sizes that work."""


@dataclass(frozen=True)
class WorkerInfo:
    """What the workers report after loading, before pages are divided."""

    facts: ModelFacts
    cache_specs: tuple[CacheSpec, ...]
    page_sizes: tuple[int, ...] | None
    lookahead: int
    reuse_tail: int
    free_bytes: int
    """Memory left for pages on the poorest rank."""
    max_model_len: int


class CollectiveCount(NamedTuple):
    """``bytes``: of the tensors that this rank put in, or of those it received where it only receives."""

    calls: int
    bytes: int


@dataclass(frozen=True)
class RankReport:
    """What one rank holds and has done. ``weight_bytes``: of the model; ``speculator_bytes``: of a draft model's or a
    head's weights, which every rank has whole. ``collectives``: by operation and strategy ("reduce tensor"), since the
    start. ``statistics``: the model's own counters. ``counts``: what happened in its steps ("graph_replays" …), since
    then."""

    rank: int
    device: str
    weight_bytes: int
    kv_bytes: int
    collectives: dict[str, CollectiveCount] = field(default_factory=dict)
    statistics: dict[str, list[float]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    speculator_bytes: int = 0


class Take(Enum):
    """Which parts the workers compute with after an exchange: those that they have, those that were prepared, or those
    that the last exchange took away. What they had becomes what was taken away."""

    SAME = "same"
    PREPARED = "prepared"
    FORMER = "former"


class Worker(Protocol):
    """One rank. Built by a factory where it will run."""

    def info(self) -> WorkerInfo: ...

    def allocate(self, plan: CachePlan) -> None:
        """MemoryError where there is not enough; whatever else is raised is no question of sizes."""

    def execute(self, message: StepMessage) -> Verdict: ...

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        """See :meth:`Executor.prepare`. Called beside ``execute``, from another thread."""

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None: ...
    def settle(self) -> None: ...

    def join(self) -> None:
        """Take part, without rows of its own, in a step of another engine; see :class:`Across`."""

    def report(self) -> RankReport: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class WorkerRecipe:
    """A worker factory for another process: ``entry`` ("module:function") makes it of ``arguments``, which are JSON.
    ``device``: what the config calls the device of every rank."""

    entry: str
    arguments: dict[str, Any]
    device: str


class WorkerFactory(Protocol):
    """Builds and loads one rank's worker, where it is called. Its ``mesh`` is the rank's; by default one device's."""

    def __call__(self, plan: RankPlan, rank: int, mesh: "Mesh | None" = None) -> Worker: ...

    def recipe(self) -> WorkerRecipe:
        """The same, for a process of its own."""

Ticket = int


class Executor(Component):
    """Runs the workers of one engine loop. ``submit`` returns before the model has run; ``collect`` waits.

    Tickets are collected in the order of submission. A worker that dies makes ``collect`` raise EngineStoppedError and
    ``health`` say why.

    Offers (in ``describe().offers``) may include "ranks": it runs more than one rank, which shard strategies require;
    and "exchange": parts of its workers can be exchanged while they serve.
    """

    kind: ClassVar[str] = "executor"
    contract: ClassVar[str] = "executor/1"

    @abstractmethod
    def launch(self, factory: WorkerFactory, plan: RankPlan, meeting: Meeting | None = None) -> WorkerInfo:
        """Start the workers. ``meeting``: of the engines of this process, for a plan that spans them (``across``)."""

    @abstractmethod
    def allocate(self, plan: CachePlan) -> None:
        """Pages have been divided: make room for them on every rank. MemoryError where one has not enough, ConfigError
        as a rank raised it, EngineStoppedError where one has failed."""

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        """On every rank, beside the steps that it computes: build and load ``parts`` (by kind), of what ``exchange``
        will put in place. What was prepared before is let go. Returns what ``launch`` would have. ConfigError for what
        does not fit: nothing is prepared then. From any thread. Only where "exchange" is offered."""
        raise NotImplementedError(f"{type(self).__name__} does not offer exchange")

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        """With no step in flight: every rank takes up the parts that ``take`` says, with the pages of ``plan``, and
        forgets all requests. ``keeps_pages``: they are those that it has, and what they hold stays. ``FORMER`` undoes
        the last exchange, also where that one has raised, be it one with ``FORMER``. A rank that raises lets all raise.
        """
        raise NotImplementedError(f"{type(self).__name__} does not offer exchange")

    def settle(self) -> None:
        """The last exchange will not be taken back: what it took away is let go."""
        raise NotImplementedError(f"{type(self).__name__} does not offer exchange")

    @abstractmethod
    def submit(self, message: StepMessage) -> Ticket: ...

    @abstractmethod
    def collect(self, ticket: Ticket) -> Verdict: ...

    @abstractmethod
    def done(self, ticket: Ticket) -> bool:
        """Whether ``collect`` would return at once."""

    @abstractmethod
    def health(self) -> str | None:
        """None when well, else what is wrong."""

    def report(self) -> list[RankReport]:
        """What each rank holds and has done, after every step submitted so far. From the loop's thread."""
        return []

    @abstractmethod
    def stop(self) -> None:
        """End every worker within a bounded time."""


class Launcher(Component):
    """Starts the processes of an executor's workers, and says which of them have ended.

    It carries a call ("module:function") and its JSON arguments there and nothing back: a worker talks to its executor
    over a channel of its own (``core/execution/channel.py``).
    """

    kind: ClassVar[str] = "launcher"
    contract: ClassVar[str] = "launcher/1"

    @abstractmethod
    def host(self) -> str | None:
        """The address of this machine that its processes can reach; None where all run on this machine."""

    @abstractmethod
    def start(self, entry: str, arguments: Sequence[dict[str, Any]]) -> None:
        """One process for each of ``arguments``, which it gets beside "local_rank" and "local_size": its place among
        those on its machine, and their number. ConfigError where they cannot be started."""

    @abstractmethod
    def ended(self) -> dict[int, str]:
        """Why processes have ended, by their place in ``arguments``. Does not wait."""

    @abstractmethod
    def stop(self, timeout_s: float) -> None:
        """All end: by themselves within ``timeout_s``, or else by force. Safe to call twice."""
