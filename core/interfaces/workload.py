"""Workloads: where the requests of an experiment come from. ``workload/1``."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from hotswap.core.interfaces.component import Component


@dataclass(frozen=True)
class WorkloadContext:
    """What a workload may know of the model: ``vocab_size`` ids that may be sent, ``max_model_len`` tokens for
    prompt and output together, ``encode`` from text to token ids, ``encode_chat`` from messages to token ids (None
    where the model has no chat template). The same ``seed`` gives the same requests."""

    seed: int
    vocab_size: int
    max_model_len: int
    encode: Callable[[str], list[int]]
    encode_chat: Callable[[Sequence[Mapping[str, Any]]], list[int]] | None = None


@dataclass(frozen=True)
class WorkItem:
    """One request.

    ``at``: seconds after the start when it is due; None where the workload has no clock: the load settings say when.
    ``after``: the position in the stream, counted from 0, of the item whose end it waits for (a session's turn before),
    and then ``pause`` seconds more; such an item has no ``at``, and its prompt begins with that item's whole prompt.
    ``key``: who its prefix is shared with, empty for nobody. Items of one key agree in their first ``shared`` tokens
    (the smaller ``shared`` of two), so that a report can say which hits a prefix cache could have had.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    at: float | None = None
    after: int | None = None
    pause: float = 0.0
    key: str = ""
    shared: int = 0


class Workload(Component):
    """A stream of requests, the same for the same seed."""

    kind: ClassVar[str] = "workload"
    contract: ClassVar[str] = "workload/1"

    @abstractmethod
    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        """Requests in order of arrival, endless or not, drawn as they are asked for: whoever wants a hundred of a trace
        of millions waits for a hundred.

        Each call begins anew. Raises ConfigError where a request does not fit the context, at once if that can be
        known, and where a file cannot be read, with its line.
        """
