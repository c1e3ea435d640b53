"""The scheduler: which requests compute how many tokens in the next step. ``scheduler/1``, ``queue_policy/1``.

A scheduler knows requests and token counts. It knows nothing of pages, hashes, phases, grammars or metrics: whether
tokens fit is answered by :meth:`PlanContext.reserve`, and every answer is one of :class:`Answer`.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, NamedTuple, Protocol

from hotswap.core.interfaces.component import Component, Exchange


class Answer(Enum):
    """GRANTED; LATER: will fit once fences pass, or what it would compute is being computed, hold the request; NO: does
    not fit, suspend another or hold; GONE: only for forks, the parent no longer has what the child needs."""

    GRANTED = "granted"
    LATER = "later"
    NO = "no"
    GONE = "gone"


# Looking up an enum's member by attribute is slow, and these are asked for in every row of every step.
GRANTED, LATER, NO, GONE = Answer


class SuspendMode(Enum):
    """What happens to the keys and values of a suspended request."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class RequestView(Protocol):
    """What a scheduler may see of a request; read-only. Its counts hold for one plan.

    One long-lived object a request, refreshed by core before each plan, so that a step costs nothing for what waits.
    """

    @property
    def id(self) -> str: ...
    @property
    def arrival(self) -> float:
        """Seconds, by the injected clock."""
    @property
    def sequence(self) -> int:
        """Order of arrival, unique: the tie-breaker that keeps orders total."""
    @property
    def priority(self) -> int:
        """Smaller is sooner."""
    @property
    def tenant(self) -> str: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def attrs(self) -> Mapping[str, Any]: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def max_new(self) -> int: ...
    @property
    def running(self) -> bool:
        """It holds pages. Otherwise it waits."""
    @property
    def ready(self) -> int:
        """Tokens that it could compute in this step; 0: it cannot step now, or, where it waits, others are about to
        bring what it would compute. Core says why in the decision log."""
    @property
    def computed(self) -> int:
        """Upper bound of the tokens whose keys and values lie in the cache."""
    @property
    def output_length(self) -> int:
        """Tokens generated and known to the host."""
    @property
    def in_flight(self) -> int:
        """Submitted steps with a row of this request."""
    @property
    def preemptions(self) -> int: ...
    @property
    def reusable(self) -> int:
        """Reusable prefix in tokens, as of admission or the last probe."""
    @property
    def draft_limit(self) -> int:
        """Most draft tokens that a row reaching the last known token may carry."""


class Row(NamedTuple):
    """``n_tokens`` known tokens of ``request`` are computed, then up to ``draft_slots`` drafts are verified."""

    request: str
    n_tokens: int
    draft_slots: int = 0


class Suspension(NamedTuple):
    request: str
    mode: SuspendMode
    reason: str


@dataclass
class StepPlan:
    """What a scheduler decides. Suspensions and holds are recorded through the context as they are made."""

    rows: list[Row] = field(default_factory=list)


class Probe(NamedTuple):
    """Tokens found in the cache, and tokens found elsewhere that would have to be fetched."""

    cached: int
    pending: int


class PlanContext(Protocol):
    """The journaled façade of one plan. Everything done through it is undone as a unit if ``plan`` raises."""

    @property
    def now(self) -> float:
        """Seconds, by the injected clock: one reading a plan."""
    @property
    def token_budget(self) -> int:
        """Most tokens (known and drafts) of the step."""
    @property
    def row_limit(self) -> int:
        """Most rows of the step."""
    @property
    def free_slots(self) -> int:
        """How many more requests may start now; falls with each start, rises with each suspension."""
    @property
    def running(self) -> Sequence[RequestView]:
        """Requests that hold pages, oldest admission first, each with fresh counts."""
    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
    @property
    def nothing_in_flight(self) -> bool:
        """Every submitted step has been collected."""

    def view(self, request_id: str) -> RequestView:
        """A waiting or running request with fresh counts (a waiting one is matched against the cache). KeyError."""

    def probe(self, request_id: str) -> Probe:
        """What of a waiting request's tokens could be reused. No side effect."""

    def reserve(self, request_id: str, n_tokens: int, drafts: int = 0) -> Answer:
        """Make room for ``n_tokens`` more tokens and ``drafts`` drafts. All or nothing; asking again replaces.

        A row may use less than what was reserved: a prompt that is computed in chunks is best given room as a whole.
        """

    def suspend(self, request_id: str, mode: SuspendMode = SuspendMode.AUTO, reason: str = "no room") -> None:
        """Take a running request's pages away, ordered behind what is in flight. It waits again."""

    def hold(self, request_id: str, reason: str) -> None:
        """Say why a request that could step does not; goes to the decision log."""


class StepOutcome(NamedTuple):
    """What a scheduler is told after a step was collected."""

    step_id: int
    now: float
    kept: Sequence[tuple[str, int]]
    """(request, tokens kept)."""
    duration: float
    """Seconds from submission to collection."""


class Scheduler(Component):
    """Orders and chooses. It can be exchanged between two steps: what it keeps, it must be able to lose.

    Core calls ``admit`` when a request starts to wait (on arrival, after a suspension, and for all that wait when the
    scheduler is exchanged) and ``drop`` when a request ends in whatever way. A request that runs stays known until it
    is dropped. One that starts nobody while others run offers "closed_batches" (in ``describe().offers``).
    """

    kind: ClassVar[str] = "scheduler"
    contract: ClassVar[str] = "scheduler/1"
    exchangeable: ClassVar[Exchange] = Exchange.BETWEEN_STEPS

    @abstractmethod
    def admit(self, view: RequestView) -> None: ...

    @abstractmethod
    def drop(self, request_id: str) -> None:
        """The request has ended. Must tolerate ids it does not hold."""

    @abstractmethod
    def plan(self, ctx: PlanContext) -> StepPlan:
        """Decide one step. An exception undoes the whole plan and names this component."""

    def observe(self, outcome: StepOutcome) -> None:
        """A step has been collected. Requests that ended in it have been dropped by now."""

    def next_wakeup(self) -> float | None:
        """When to plan again although nothing has changed (clock seconds), or None."""
        return None


class QueuePolicy(Component):
    """The order of requests: smaller keys first; the victim of a suspension is the one with the largest victim key.

    ``dynamic`` says whether keys change with time or state; static keys stay in a heap.
    """

    kind: ClassVar[str] = "queue_policy"
    contract: ClassVar[str] = "queue_policy/1"
    dynamic: ClassVar[bool] = False
    preemptive: ClassVar[bool] = False
    """Whether a waiting request may have a running one suspended that comes behind it."""
    probes: ClassVar[int] = 0
    """For how many waiting requests, those that wait longest, ``reusable`` must be fresh in each plan."""

    @abstractmethod
    def key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        """Smaller is sooner. End it with ``view.sequence`` so that the order is total."""

    def victim_key(self, view: RequestView, now: float) -> tuple[Any, ...]:
        """The largest is suspended first. Default: the one that ``key`` puts last."""
        return self.key(view, now)

    def gate(self, view: RequestView, now: float) -> str | None:
        """A reason to keep a request from starting now, or None. Those behind it may start."""
        return None

    def next_wakeup(self) -> float | None:
        """When a gate may open although nothing has changed (clock seconds), or None."""
        return None

    def admit(self, view: RequestView) -> None:
        """A request starts to wait: on arrival, after a suspension, and where a plan that had started it is undone."""

    def start(self, view: RequestView) -> None:
        """A waiting request starts."""

    def drop(self, request_id: str) -> None:
        """A request has ended."""

    def observe(self, outcome: StepOutcome) -> None:
        """A step has been collected."""
