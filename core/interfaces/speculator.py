"""The speculator: proposes tokens that the target model then verifies. ``speculator/1``. Runs in the worker.

It can change the speed and nothing else: the verifier (core's) keeps the target's distribution whatever is proposed.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CacheSpec

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass(frozen=True)
class SpeculatorNeeds:
    """``lookahead``: most tokens it proposes in a step. ``reuse_tail``: tokens at the end of a cached prefix that it
    must see computed again. ``taps``: hidden states of the target that it reads."""

    lookahead: int = 0
    reuse_tail: int = 0
    taps: tuple[str, ...] = ()
    cache_specs: tuple[CacheSpec, ...] = ()


@dataclass(frozen=True)
class SpeculatorServices:
    """What a worker gives a speculator. ``device`` and ``dtype`` are torch's names of the target's.

    ``capture(run)``, None where graphs are off: runs ``run`` and records it as a graph; what it returns replays that.
    ``run`` reads and writes tensors that live as long as the speculator, at the addresses they have now, and returns
    nothing; it never reads back to the host.
    """

    vocab_size: int
    device: str
    dtype: str
    capture: "Callable[[Callable[[], None]], Callable[[], None]] | None" = None


class ProposeRow(NamedTuple):
    """``tokens``: all known tokens of the request, a read-only view. ``slots``: most drafts wanted; 0 where the row
    stops short of its last known token or the scheduler gave none."""

    request: str
    tokens: "np.ndarray[Any, Any]"
    slots: int


@dataclass
class Drafts:
    """``tokens[i]``: proposals for row i, at most its slots. ``probs[i]``: the distributions [len(tokens[i]), V] they
    were sampled from (float32), None where they were chosen and not sampled."""

    tokens: list[list[int]]
    probs: "list[torch.Tensor | None] | None" = None


class Speculator(Component):
    kind: ClassVar[str] = "speculator"
    contract: ClassVar[str] = "speculator/1"

    @abstractmethod
    def needs(self) -> SpeculatorNeeds: ...

    def bind(self, services: SpeculatorServices) -> None:
        """Called once before the first step."""

    @abstractmethod
    def propose(self, rows: Sequence[ProposeRow]) -> Drafts:
        """At the start of the step in which the drafts are verified; sees all rows of the step."""

    def observe(self, accepted: Sequence[tuple[str, int, int]]) -> None:
        """(request, drafted, accepted) of each row that carried drafts."""

    def forget(self, request_ids: Sequence[str]) -> None:
        """These requests have ended or were suspended."""
