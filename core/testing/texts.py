"""Texts of a tiny model, drawn by a whole worker with a speculator or without, and whether two lots of them differ."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hotswap.core.execution.builder import WorkerBuilder
from hotswap.core.execution.settings import WorkerSettings
from hotswap.core.execution.worker import model_for
from hotswap.core.interfaces.kvcache import CachePlan, Grant, GroupGrant, GroupPlan
from hotswap.core.interfaces.messages import NewRequest, Resume, StepMessage
from hotswap.core.interfaces.parallel import RankPlan
from hotswap.core.interfaces.scheduler import Row
from hotswap.core.interfaces.speculator import Speculator
from hotswap.core.modeling.checkpoint import Checkpoint
from hotswap.core.request import SamplingParams
from hotswap.core.testing.rig import build

PROMPT = (3, 9, 4, 9, 4, 9)
ROWS = 300


class Texts:
    """Texts behind one prompt, each with a seed of its own. Counts drafts; ``dropped`` ones made no sense."""

    def __init__(self, checkpoint: Checkpoint, speculator: Speculator) -> None:
        settings = WorkerSettings("float32", "cpu", 48, 4096, ROWS)
        self.worker = WorkerBuilder(
            checkpoint, model_for(checkpoint), build("attention", "torch"), speculator, [], settings)(RankPlan(), 0)
        self.groups = [spec.group for spec in self.worker.info().cache_specs]
        self.worker.allocate(CachePlan({group: GroupPlan(ROWS + 1, 48) for group in self.groups}))
        self.lookahead = self.worker.info().lookahead
        self.step_id = self.drafted = self.accepted = self.dropped = 0

    def draw(self, params: SamplingParams, seeds: Sequence[int], length: int) -> "np.ndarray[Any, Any]":
        """[len(seeds), length] tokens."""
        return np.concatenate([
            self._batch(params, seeds[begin : begin + ROWS], length) for begin in range(0, len(seeds), ROWS)])

    def _batch(self, params: SamplingParams, seeds: Sequence[int], length: int) -> "np.ndarray[Any, Any]":
        names, message = [str(seed) for seed in seeds], self._message()
        for page, (name, seed) in enumerate(zip(names, seeds, strict=True), 1):
            message.new.append(NewRequest(name, list(PROMPT), len(PROMPT), params, seed))
            message.resumes.append(Resume(name, 0))
            message.grants.append((name, Grant({group: GroupGrant(0, (page,)) for group in self.groups})))
            message.rows.append(Row(name, len(PROMPT), self.lookahead))
        kept: dict[str, list[int]] = {name: [] for name in names}
        while message.rows:
            verdict = self.worker.execute(message)
            assert verdict.error is None, verdict.error
            self.dropped += verdict.counts.get("dropped_proposals", 0)
            for row in verdict.rows:
                assert row.error is None, row.error
                kept[row.request] += row.kept
                self.drafted, self.accepted = self.drafted + row.drafted, self.accepted + row.accepted
            message = self._message()
            message.rows = [Row(name, 1, self.lookahead) for name in names if len(kept[name]) < length]
        message.drops = names
        self.worker.execute(message)
        return np.array([kept[name][:length] for name in names])

    def _message(self) -> StepMessage:
        self.step_id += 1
        return StepMessage(self.step_id)


def least_p(some: "np.ndarray[Any, Any]", others: "np.ndarray[Any, Any]") -> float:
    """The least p-value of chi-square tests that both lots [N, length] have the same tokens at each place, and the same
    pairs of neighbours."""
    length = some.shape[1]
    columns = [(i,) for i in range(length)] + [(i, i + 1) for i in range(length - 1)]
    return min(same_p([tuple(row) for row in some[:, column].tolist()],
                      [tuple(row) for row in others[:, column].tolist()]) for column in columns)


def same_p(some: Sequence[Any], others: Sequence[Any]) -> float:
    """The p-value of Pearson's chi-square test that two samples are of one distribution; what was seen less than 20
    times counts as one."""
    first, second = Counter(some), Counter(others)
    common = [key for key in first | second if first[key] + second[key] >= 20]
    table = torch.tensor([[count[key] for key in common] for count in (first, second)], dtype=torch.float64)
    rest = torch.tensor([[len(some)], [len(others)]], dtype=torch.float64) - table.sum(1, keepdim=True)
    if rest.sum():
        table = torch.cat([table, rest], 1)
    if table.shape[1] < 2:
        return 1.0
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor((table.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
