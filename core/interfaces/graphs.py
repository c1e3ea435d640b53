"""What records steps of the model on a kind of device, and replays them. An attention backend may bring one along."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import ClassVar

Replay = Callable[[], None]


class CaptureError(Exception):
    """What was given to do cannot be recorded; the message says why."""


class GraphDevice(ABC):
    """A device that records what it is given to do: operations on addresses, and no Python between them.

    ``on_demand``: recording a step costs about as much as the step, and a replay finds what the attention backend's
    ``plan`` has left, wherever the tensors of its layout lie. Then any step is recorded when as many tokens come again,
    exactly and without padding, instead of some numbers of rows at the start. ``bytes_per_layer``: what a record keeps
    for each layer of a model, at the most.
    """

    on_demand: ClassVar[bool] = False
    bytes_per_layer: ClassVar[int]

    def setting(self) -> Hashable:
        """What a record holds for, beside the sizes that it was made of; with another setting, others are made."""
        return None

    @abstractmethod
    def capture(self, run: Callable[[], None]) -> Replay:
        """Call ``run`` to warm up where that is needed, record it, and return what replays the record, on the thread
        that steps run on. All captures share memory for what is only alive within them, so that replays must not
        overlap. CaptureError for what cannot be recorded.

        If ``on_demand``, ``run`` is called once, and its results are good, even where CaptureError says afterwards that
        it cannot be recorded: a step may change what it must not change twice.
        """
