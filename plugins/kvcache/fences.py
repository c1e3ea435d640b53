"""Pages that were given up while something in flight may still use them."""

from collections.abc import Iterable, Sequence

from hotswap.core.errors import KVInvariantError
from hotswap.core.interfaces.kvcache import Fence


class Batch:
    """Pages per group, given up together; reusable once every fence in ``waits`` has passed."""

    __slots__ = ("pages", "waits")

    def __init__(self, waits: set[Fence], pages: Sequence[Sequence[int]]) -> None:
        self.waits = waits
        self.pages = pages


class FenceQueue:
    """Batches by the fences that they wait for. A step's fence implies those of all steps before it."""

    def __init__(self) -> None:
        self._waiting: dict[Fence, list[Batch]] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, fences: Iterable[Fence], pages: Sequence[Sequence[int]]) -> Batch | None:
        """None where there is nothing to wait for."""
        waits = set(fences)
        steps = [fence for fence in waits if isinstance(fence, int)]
        waits.difference_update(sorted(steps)[:-1])
        if not waits:
            return None
        batch = Batch(waits, pages)
        for fence in waits:
            self._waiting.setdefault(fence, []).append(batch)
        return batch

    def cancel(self, batch: Batch) -> None:
        """Undo an :meth:`add`."""
        for fence in batch.waits:
            batches = self._waiting.get(fence, [])
            if not batches or batches.pop() is not batch:
                raise KVInvariantError(
                    f"undo of a release that waits for fence {fence!r}, but it is not the last one that does: "
                    "entries must be undone last in, first out, and before the fence passes"
                )
            if not batches:
                del self._waiting[fence]

    def passed(self, fence: Fence) -> list[Batch]:
        """``fence`` has passed: the batches that wait for nothing any more."""
        if isinstance(fence, int):
            # As many steps as are in flight: a handful.
            fences: list[Fence] = sorted(f for f in self._waiting if isinstance(f, int) and f <= fence)
        else:
            fences = [fence] if fence in self._waiting else []
        ready = []
        for gone in fences:
            for batch in self._waiting.pop(gone):
                batch.waits.remove(gone)
                if not batch.waits:
                    ready.append(batch)
        return ready

    def batches(self) -> list[Batch]:
        """All that wait, each once."""
        return list({id(batch): batch for batches in self._waiting.values() for batch in batches}.values())
