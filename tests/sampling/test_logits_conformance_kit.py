"""The conformance kit for logits processors notices each kind of fault that it is for."""

import random
from collections.abc import Sequence

import pytest
import torch

from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.request import SamplingParams
from hotswap.core.testing.logits import LogitsProcessorSuite


class NoRepeats(LogitsProcessor):
    """Excludes every token of the output: right, and short enough to break in one place at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[int]] = {}

    def wants(self, request: NewRequest) -> bool:
        return True

    def begin(self, request: NewRequest) -> None:
        self.outputs[request.id] = request.tokens[request.prompt_length :]

    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for row in rows:
            logits[row.index, [*self.outputs[row.request], *row.drafts]] = -torch.inf

    def accept(self, request: str, kept: Sequence[int]) -> None:
        self.outputs[request].extend(kept)

    def rollback(self, request: str, count: int) -> None:
        del self.outputs[request][-count:]

    def end(self, request: str) -> None:
        self.outputs.pop(request, None)


class CountsDrafts(NoRepeats):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for row in rows:
            self.outputs[row.request].extend(row.drafts)
        super().apply(logits, rows)


class IgnoresDrafts(NoRepeats):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        super().apply(logits, [LogitsRow(row.index, row.request) for row in rows])


class NeverCounts(NoRepeats):
    def accept(self, request: str, kept: Sequence[int]) -> None:
        pass


class StartsEmpty(NoRepeats):
    def begin(self, request: NewRequest) -> None:
        self.outputs[request.id] = []


class CannotRollBack(NoRepeats):
    def rollback(self, request: str, count: int) -> None:
        pass


class TouchesNeighbours(NoRepeats):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        super().apply(logits, rows)
        logits[:, 0] -= 1


class SharesState(NoRepeats):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for row in rows:
            logits[row.index, sum(self.outputs.values(), [])] = -torch.inf
        super().apply(logits, rows)


class NeverForgets(NoRepeats):
    def begin(self, request: NewRequest) -> None:
        self.outputs.setdefault(request.id, []).extend(request.tokens[request.prompt_length :])

    def end(self, request: str) -> None:
        pass


class BringsBack(NoRepeats):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        for row in rows:
            logits[row.index].nan_to_num_(neginf=-1e4)
        super().apply(logits, rows)


class DoesNothing(NoRepeats):
    def apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> None:
        pass


def failures(processor: type[NoRepeats]) -> list[str]:
    """The kit's tests that this processor fails."""

    class Suite(LogitsProcessorSuite):
        cases = 8

        def make_processor(self) -> LogitsProcessor:
            return processor()

        def make_request(
            self, request_id: str, tokens: list[int], prompt_length: int, rng: random.Random
        ) -> NewRequest:
            return NewRequest(request_id, tokens, prompt_length, SamplingParams(), 0)

    failed = []
    for name in dir(Suite):
        if name.startswith("test_"):
            try:
                getattr(Suite(), name)()
            except AssertionError:
                failed.append(name)
    return failed


def test_a_right_processor_passes() -> None:
    assert failures(NoRepeats) == []


@pytest.mark.parametrize("fault", [
    CountsDrafts, IgnoresDrafts, NeverCounts, StartsEmpty, CannotRollBack, TouchesNeighbours, SharesState, NeverForgets,
    BringsBack, DoesNothing,
])  # fmt: skip
def test_a_planted_fault_is_noticed(fault: type[NoRepeats]) -> None:
    assert failures(fault)
