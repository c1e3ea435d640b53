"""The components that one engine loop drives."""

from dataclasses import dataclass
from typing import Any, Protocol

from hotswap.core.interfaces.kvcache import KVCacheManager
from hotswap.core.interfaces.parallel import Executor
from hotswap.core.interfaces.scheduler import Scheduler


class Observers(Protocol):
    """Calls the observers' hooks. ``active`` is False when there are none, and then nothing is prepared for them."""

    @property
    def active(self) -> bool: ...
    def notify(self, hook: str, **arguments: Any) -> None: ...


@dataclass
class Parts:
    """The components that the loop drives. A part is exchanged by setting it here, between two steps: whoever needs it
    looks here."""

    scheduler: Scheduler
    kv: KVCacheManager
    executor: Executor
    observers: Observers

    @property
    def forks(self) -> bool:
        """Whether children share their parent's pages. Who forms a batch and starts nobody until it has ended would
        start them behind it."""
        return "fork" in self.kv.describe().offers and "closed_batches" not in self.scheduler.describe().offers
