"""Workloads: where the requests of an experiment come from."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from hotswap.core.interfaces.component import Component


@dataclass(frozen=True)
class WorkloadContext:
    """What a workload may know of the model: ``vocab_size`` ids that may be sent, ``max_model_len`` tokens for
    prompt and output together, ``encode`` from text to token ids. The same ``seed`` gives the same requests."""

    seed: int
    vocab_size: int
    max_model_len: int
    encode: Callable[[str], list[int]]


@dataclass(frozen=True)
class WorkItem:
    """One request. ``at``: seconds after the start when it is due; None where the workload has no clock, and the load
    settings say when. ``after``: the index of the item whose end it waits for (a session's turn before), and then
    ``pause`` seconds more. ``key``: who its prefix is shared with, for reports."""

    prompt: tuple[int, ...]
    max_tokens: int
    at: float | None = None
    after: int | None = None
    pause: float = 0.0
    key: str = ""


class Workload(Component):
    """A stream of requests, the same for the same seed."""

    kind: ClassVar[str] = "workload"
    contract: ClassVar[str] = "workload/1"

    @abstractmethod
    def items(self, context: WorkloadContext) -> Iterator[WorkItem]:
        """Requests in order of arrival, endless or not. ConfigError where one does not fit the context."""
