"""The speculator: proposes tokens that the target model then verifies. ``speculator/1``. Runs in the worker.

It can change the speed and nothing else: the verifier (core's) keeps the target's distribution whatever is proposed.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from hotswap.core.interfaces.attention import GroupShape
from hotswap.core.interfaces.component import Component, Exchange
from hotswap.core.interfaces.kvcache import CacheSpec

if TYPE_CHECKING:
    import numpy as np
    import torch

    from hotswap.core.interfaces.model import Attend, Model, ModelFacts
    from hotswap.core.modeling.checkpoint import Checkpoint

    Tokens = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DraftStep:
    """A speculator's pass over one token a row, of which graphs can be made: ``run(inputs, positions, attend)`` ->
    [R, ...]. ``inputs``: (shape without R, dtype) of each of its inputs. See ``ModelFacts.capturable`` for what it may
    do."""

    run: "Callable[[Sequence[torch.Tensor], torch.Tensor, Attend], torch.Tensor]"
    inputs: "tuple[tuple[tuple[int, ...], torch.dtype], ...]"


@dataclass(frozen=True)
class SpeculatorNeeds:
    """``lookahead``: most tokens it proposes in a step. ``reuse_tail``: tokens at the end of a cached prefix that it
    must see computed again. ``taps``: hidden states of the target that it reads, of ``Model.taps()``.

    ``cache_specs``: cache groups of its own, under the same tables as the target's, and ``shapes``, what attention must
    do for each (page sizes are filled in). Group names and layer numbers must be no one else's: see
    :attr:`SpeculatorServices.first_layer`. ``step``: what is captured at the start, where graphs are on.
    """

    lookahead: int = 0
    reuse_tail: int = 0
    taps: tuple[str, ...] = ()
    cache_specs: tuple[CacheSpec, ...] = ()
    shapes: Mapping[str, GroupShape] = field(default_factory=dict)
    step: DraftStep | None = None


class Span(NamedTuple):
    """Tokens ``begin <= position < end`` of a request."""

    request: str
    begin: int
    end: int


class OwnCache(Protocol):
    """The speculator's cache groups, under the page tables of the worker's requests."""

    def lay_out(self, spans: Sequence[Span]) -> "tuple[torch.Tensor, Attend]":
        """Plan a pass over these tokens, row by row: their positions [T] int64, and what attends for them. It holds
        until the next call. A span must lie in pages that the request has: up to its known tokens and draft slots."""

    def step(self, step: DraftStep, spans: Sequence[Span], inputs: "Sequence[torch.Tensor]") -> "torch.Tensor":
        """``step.run`` over spans of one token each, from a graph where ``step`` was captured for as many rows."""


class DraftRow(NamedTuple):
    """A token to be drafted at ``position`` of the request's sequence, behind the ``drafts`` of this step."""

    request: str
    position: int
    drafts: Sequence[int] = ()


class Drawn(NamedTuple):
    """``tokens``: one a row. ``probs`` [N, V] float32: what they were drawn from; None where all rows are greedy."""

    tokens: list[int]
    probs: "torch.Tensor | None"


class Draw(Protocol):
    """Draws drafts as their requests ask: processors, temperature and filters are applied to ``logits`` [N, V] float32,
    which may be changed, and a draw is a function of seed and position. Greedy requests get the best token."""

    def __call__(self, logits: "torch.Tensor", rows: Sequence[DraftRow]) -> Drawn: ...


@dataclass(frozen=True)
class SpeculatorServices:
    """What a worker gives a speculator. ``device`` and ``dtype`` are torch's names of the target's; ``vocab_size`` is
    the width of its logits.

    ``target``: the target model, built and not yet loaded, with its ``facts`` and the ``checkpoint`` it comes from.
    Only one that reads ``taps`` has it compute (``embed``, ``unembed``): several ranks do that together.
    ``make_model(checkpoint)`` gives the model component for another checkpoint, neither built nor loaded.
    ``first_layer``: own layers are numbered from here. ``cache`` and ``draw`` serve from the first step on.

    ``capture(run)``, None where graphs are off: runs ``run`` and records it as a graph; what it returns replays that.
    ``run`` reads and writes tensors that live as long as the speculator, at the addresses they have now, and returns
    nothing; it never reads back to the host.
    """

    vocab_size: int
    device: str
    dtype: str
    max_model_len: int
    target: "Model"
    facts: "ModelFacts"
    checkpoint: "Checkpoint | None"
    make_model: "Callable[[Checkpoint], Model]"
    cache: OwnCache
    draw: Draw
    first_layer: int = 0
    capture: "Callable[[Callable[[], None]], Callable[[], None]] | None" = None


class ProposeRow(NamedTuple):
    """``tokens``: all known tokens of the request, a read-only view. ``slots``: most drafts wanted; 0 where the row
    stops short of its last known token or the scheduler gave none.

    ``computed``: the target's true length before this step, ``end`` after it, drafts aside. Where the request is seen
    for the first time, the speculator's own groups hold its first ``computed`` tokens, too (a reused prefix, a fork).
    """

    request: str
    tokens: "Tokens"
    slots: int
    computed: int = 0
    end: int = 0


@dataclass
class Drafts:
    """``tokens[i]``: proposals for row i, at most its slots. ``probs[i]``: the distributions [len(tokens[i]), V] they
    were sampled from (float32), None where they were chosen and not sampled.

    ``parents[i]``: for each of row i's drafts the index of the draft before it, -1 for the last known token. None: each
    row is a chain. The verifier takes chains only, so far: others are dropped.
    """

    tokens: list[list[int]]
    probs: "list[torch.Tensor | None] | None" = None
    parents: list[list[int]] | None = None


class ObservedRow(NamedTuple):
    """What became of a row. ``tokens``: all known tokens now. The target has computed ``begin <= position < computed``
    in this step (accepted drafts included, rejected ones not); its hidden states lie in the taps from row ``offset``
    on. Where the last stage is another rank's, this is told at the next step, of rows with drafts, and ``begin`` is
    ``computed``: hidden states are not at hand."""

    request: str
    tokens: "Tokens"
    drafted: int
    accepted: int
    begin: int
    computed: int
    offset: int


class Speculator(Component):
    """In this order: ``bind``, ``load``, then ``propose`` and ``observe`` once a step. ``needs`` says before ``bind``
    what follows from the options alone (``lookahead`` and ``reuse_tail``), afterwards all.

    Offers (in ``describe().offers``) may include "stages": it needs no taps and no cache groups, whatever ``bind`` is
    given, and so works where the target's layers are spread over pipeline stages, which require it.
    """

    kind: ClassVar[str] = "speculator"
    contract: ClassVar[str] = "speculator/1"
    exchangeable: ClassVar[Exchange] = Exchange.WORKERS

    @abstractmethod
    def needs(self) -> SpeculatorNeeds: ...

    def bind(self, services: SpeculatorServices) -> None:
        """Called once, before any weight is read: ConfigError for what does not fit the target."""

    def load(self) -> int:
        """Read weights of its own, and return their bytes; the target's are loaded."""
        return 0

    @abstractmethod
    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        """At the start of the step in which the drafts are verified; sees all rows of the step. Rows without slots only
        fill its cache.

        Where it raises, the step goes on without drafts. One that has cache groups of its own is told to :meth:`forget`
        the rows' requests, since its cache lacks them from here on, and not asked about them any more."""

    def observe(self, rows: Sequence[ObservedRow], taps: "Mapping[str, torch.Tensor]") -> Sequence[int] | None:
        """At the end of the step: each of its rows that did not fail. ``taps`` [T, hidden], by name.

        Returns by row how many tokens its own cache groups are behind ``computed``; None: nothing."""
        return None

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests have ended or were suspended."""
