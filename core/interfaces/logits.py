"""Logits processors: change a batch's logits before sampling. ``logits_processor/1``. Run in the worker.

Penalties, bias, bans and minimum lengths are built on this; grammars will be. A processor sees kept tokens only; for a
row that verifies draft number k, ``apply`` is told the k drafts before it; nothing it does then may outlast the call.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.messages import NewRequest

if TYPE_CHECKING:
    import torch


class LogitsRow(NamedTuple):
    """``index``: the row of ``logits``. ``drafts``: tokens assumed after the kept ones (empty for a row without)."""

    index: int  # type: ignore[assignment]  # a field named like a method of tuple, which nobody calls
    request: str
    drafts: tuple[int, ...] = ()


class LogitsProcessor(Component):
    kind: ClassVar[str] = "logits_processor"
    contract: ClassVar[str] = "logits_processor/1"
    honours: ClassVar[frozenset[str]] = frozenset()
    """Fields of ``SamplingParams`` that it carries out. A request with a field that needs a processor, and none that is
    configured honours it, is refused: nothing is ignored."""

    def configure(self, vocab_size: int) -> None:
        """Called once, with the width of the logits."""

    @abstractmethod
    def wants(self, request: NewRequest) -> bool:
        """Whether this request needs the processor. Only such requests reach the other methods."""

    @abstractmethod
    def begin(self, request: NewRequest) -> None:
        """A request arrives (again): ``request.tokens`` beyond ``prompt_length`` are kept output."""

    @abstractmethod
    def apply(self, logits: "torch.Tensor", rows: Sequence[LogitsRow]) -> None:
        """Change ``logits`` [N, V] float32 in place, only at the given rows."""

    def accept(self, request: str, kept: Sequence[int]) -> None:
        """These tokens were kept."""

    def rollback(self, request: str, count: int) -> None:
        """The last ``count`` kept tokens are taken back. Core does not call it yet: it tells only what is final."""

    def end(self, request: str) -> None:
        """The request is gone."""
