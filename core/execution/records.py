"""Recorded steps: where recording is as cheap as computing, any step that has come before is replayed.

On a CPU, what Python does between kernels takes about as long as those of a decoding step. :mod:`.graphs` captures
some steps at the start, for fixed numbers of rows, with padding; here a forward pass is recorded when as many tokens
come for the second time, of which as many are wanted, and replayed from then on. Decodes, drafts and equal chunks of
prompts are the same to it.

The attention backend has planned the step, in tensors that may be new ones, before the pass is computed or replayed: it
says by ``GraphDevice.on_demand`` that a replay finds them.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.events import EventCounts
from hotswap.core.execution.layout import batch_layout
from hotswap.core.interfaces.graphs import CaptureError, GraphDevice, Replay
from hotswap.core.interfaces.layout import BatchLayout

logger = logging.getLogger(__name__)

Forward = Callable[..., Sequence[torch.Tensor]]
"""(tensors [n, ...] or None) -> tensors [m, ...], where every m depends on the numbers n alone."""

MOST_RECORDS = 256
"""Those that were not replayed for the longest time are let go."""

_Sizes = tuple[int | None, ...]
_Key = tuple[Hashable, _Sizes]
"""The device's setting, and sizes."""


class RecordedForward:
    """A forward pass over up to ``most`` tokens. Called as ``forward`` is, on one thread.

    ``counts`` tells since the start: ``graph_captures``, ``graph_replays``, and eager passes by reason:
    ``eager_first_sizes`` (such sizes had not come before), ``eager_long_steps`` (more than ``most``),
    ``eager_uncaptured`` (what could not be recorded); each behind ``prefix``.
    """

    def __init__(self, device: GraphDevice, forward: Forward, most: int, prefix: str = "") -> None:
        self._device, self._forward, self._most = device, forward, most
        self.counts = EventCounts(prefix)
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: Sequence[torch.Tensor] = []
        self._records: OrderedDict[_Key, tuple[Replay, list[torch.Tensor]]] = OrderedDict()
        self._seen: OrderedDict[_Key, bool] = OrderedDict()  # whether it can be recorded, for all that is known
        self._reasons: set[str] = set()

    def __call__(self, *inputs: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """The results are copies: a later call does not change them."""
        sizes = _sizes(inputs)
        key = self._device.setting(), sizes
        record = self._records.get(key)
        if record is None:
            return self._without_record(key, inputs)
        self._records.move_to_end(key)
        self._place(sizes, inputs)
        replay, outputs = record
        replay()
        self.counts.add("graph_replays")
        return [output.clone() for output in outputs]

    def verify(self, *others: Sequence[torch.Tensor | None]) -> None:
        """Whether what is recorded is all that the pass does: recorded for the first of ``others`` and replayed for
        each of them, it must give what it gives, or else CaptureError. All have equal sizes, which are planned."""
        sizes, outputs = _sizes(others[0]), list[torch.Tensor]()
        self._eagerly(others[0])
        replay = self._record(sizes, others[0], outputs)
        for inputs in others:
            self._place(sizes, inputs)
            replay()
            for output, result in zip(outputs, self._forward(*inputs), strict=True):
                if not torch.allclose(output, result, rtol=0.0, atol=0.0, equal_nan=True):
                    raise CaptureError(
                        "a replayed step gives other numbers than the step: something in it is neither an operator of "
                        "torch's nor a kernel that is recorded")

    def _without_record(self, key: _Key, inputs: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        if max(size or 0 for size in key[1]) > self._most:
            self.counts.add("eager_long_steps")
        elif key not in self._seen:
            self._seen[key] = True
            if len(self._seen) > 8 * MOST_RECORDS:
                self._seen.popitem(last=False)
            self.counts.add("eager_first_sizes")
        elif not self._seen[key]:
            self.counts.add("eager_uncaptured")
        elif (results := self._keep_record(key, inputs)) is not None:
            return results
        return self._eagerly(inputs)

    def _keep_record(self, key: _Key, inputs: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor] | None:
        """The results; None where the pass was not carried through."""
        outputs: list[torch.Tensor] = []
        try:
            replay = self._record(key[1], inputs, outputs)
        except CaptureError as error:
            self._seen[key] = False
            if str(error) not in self._reasons:
                logger.warning("steps such as this one, of %s tokens, run eagerly, since %s", key[1][0], error)
            self._reasons.add(str(error))
            self.counts.add("eager_uncaptured")
            if not outputs:
                return None
        else:
            self._records[key] = replay, outputs
            if len(self._records) > MOST_RECORDS:
                self._records.popitem(last=False)
            self.counts.add("graph_captures")
        return [output.clone() for output in outputs]

    def _eagerly(self, inputs: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor]:
        results = self._forward(*inputs)
        if not self._outputs:  # of any size, they tell what comes out
            self._outputs = [result.new_empty(self._most, *result.shape[1:]) for result in results]
        return results

    def _record(
        self, sizes: _Sizes, inputs: Sequence[torch.Tensor | None], outputs: list[torch.Tensor],
    ) -> Replay:
        """What replays the pass; ``outputs`` gets where its results are, now and after each replay: all, or none."""
        placed = self._place(sizes, inputs)

        def run() -> None:
            results = zip(self._outputs, self._forward(*placed), strict=True)
            outputs.extend([output[: len(result)].copy_(result) for output, result in results])

        return self._device.capture(run)

    def _place(self, sizes: _Sizes, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Copy ``inputs`` to where records of these sizes read them."""
        placed: list[torch.Tensor | None] = []
        for number, (size, tensor) in enumerate(zip(sizes, inputs, strict=True)):
            if tensor is None:
                placed.append(None)
                continue
            if number not in self._inputs:
                self._inputs[number] = tensor.new_empty(self._most, *tensor.shape[1:])
            placed.append(self._inputs[number][:size].copy_(tensor))
        return placed


def _sizes(inputs: Sequence[torch.Tensor | None]) -> _Sizes:
    return tuple(None if tensor is None else tensor.shape[0] for tensor in inputs)


def padding_layout(table: RequestTable, groups: Sequence[str], device: str) -> BatchLayout:
    """Of one token that is nobody's, in the dummy page: what is tried out writes nowhere else."""
    pages = {
        group: (np.full((1, 1), table.tables[group].dummy_page, np.int32), table.tables[group].page_size)
        for group in groups}
    return batch_layout(np.ones(1, np.int64), np.zeros(1, np.int64), pages, device)
