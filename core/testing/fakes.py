"""A model, a device and an executor that need no torch, for tests of everything that runs on the host.

The oracle: a cache slot holds a hash of the whole history up to its token, as its key and, masked, as its value (which
is there where a KV transfer moves it). Every read is checked, so a page that was
given away too early, filled wrongly or shared wrongly shows at once, whatever the output. The device runs late, and
poisons pages the moment the host gives them away, so that reuse before a fence has passed is seen too.
"""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from hotswap.core.interfaces.kv_transfer import AxisShard, CachePages, GroupPages, LayerPages, TransferWorker
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec, GroupGrant
from hotswap.core.interfaces.messages import RowVerdict, StepMessage, Suspended, Verdict
from hotswap.core.interfaces.model import ModelFacts
from hotswap.core.interfaces.parallel import Executor, Meeting, RankPlan, Ticket, WorkerFactory, WorkerInfo
from hotswap.core.interfaces.scheduler import Row, SuspendMode

POISON = -1  # what no hash is
MASKS = 0, 0x55555555  # of keys and of values, so that one is not taken for the other
VOCAB_SIZE = 13


class CacheCorruption(AssertionError):
    """A slot did not hold what a request's history says it must."""


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """The toy language: the next token follows from the last three, the length and the seed."""
    weighted = sum((place + 1) * token for place, token in enumerate(tokens[-3:]))
    return (weighted * 7 + len(tokens) // 11 + seed * 5) % VOCAB_SIZE


def continuation(prompt: Sequence[int], count: int, seed: int = 0, stop: frozenset[int] = frozenset()) -> list[int]:
    """What an undisturbed run of the toy language gives."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt):]


class _Sequence:
    """One request on the fake device."""

    def __init__(self, tokens: list[int], seed: int, groups: Sequence[str]) -> None:
        self.tokens, self.seed, self.computed = tokens, seed, 0
        self.tables: dict[str, dict[int, int]] = {group: {} for group in groups}


class FakeWorker:
    """Carries out step messages on toy requests. Follows the order of work of ``StepMessage`` to the letter.

    ``lookahead`` drafts are proposed a row; each is right with probability ``skill``. ``windows``: cache groups, with
    the number of tokens a query sees there, None for all. ``transfer``: a worker half, which sees the slots as tensors
    [pages, page size] int32 and moves them like any keys and values; in a step without rows it may wait for ``wait_s``.
    """

    def __init__(
        self, windows: dict[str, int | None] | None = None, *, lookahead: int = 0, skill: float = 0.6,
        max_model_len: int = 1 << 20, seed: int = 0, transfer: TransferWorker | None = None, wait_s: float = 0.0,
    ) -> None:
        self.transfer, self.wait_s = transfer, wait_s
        self.windows = windows or {"full": None}
        self.lookahead, self.skill, self.max_model_len = lookahead, skill, max_model_len
        self.rng = random.Random(seed)
        self.sequences: dict[str, _Sequence] = {}
        self.memory: dict[str, list[Any]] = {}  # by group: keys, and values; views that give and take plain numbers
        self.page_size: dict[str, int] = {}
        self.reads = self.drafted = self.accepted = 0

    def info(self) -> WorkerInfo:
        specs = tuple(
            CacheSpec(group, (0,), 1, 1, 8, "window" if window else "full", window)
            for group, window in self.windows.items()
        )
        facts = ModelFacts("toy", 1, 1, VOCAB_SIZE, self.max_model_len)
        return WorkerInfo(facts, specs, None, self.lookahead, 0, 1 << 30, self.max_model_len)

    def allocate(self, plan: CachePlan) -> None:
        self.page_size = {group: share.page_size for group, share in plan.groups.items()}
        parts = 1 if self.transfer is None else len(MASKS)
        arrays = {
            group: [np.full(share.num_pages * share.page_size, POISON, np.int32) for _ in range(parts)]
            for group, share in plan.groups.items()}
        self.memory = {group: [array.data for array in both] for group, both in arrays.items()}
        if self.transfer is not None:
            self.transfer.register(self._pages(plan, arrays), plan.transfer)

    def _pages(self, plan: CachePlan, arrays: dict[str, Any]) -> CachePages:
        import torch

        return CachePages({
            group: GroupPages(
                group, share.page_size, share.num_pages, ("page", "token"), AxisShard(0, 1, 1),
                (LayerPages(0, tuple(
                    torch.from_numpy(array).view(share.num_pages, share.page_size) for array in arrays[group])),))
            for group, share in plan.groups.items()}, "cpu", "int32")

    def close(self) -> None:
        self.sequences.clear()

    def poison(self, group: str, page: int) -> None:
        size = self.page_size[group]
        for memory in self.memory[group]:
            for slot in range(page * size, (page + 1) * size):
                memory[slot] = POISON

    def execute(self, message: StepMessage) -> Verdict:
        verdict = Verdict(message.step_id)
        for request, mode in message.suspensions:
            length = self.sequences.pop(request).computed
            verdict.suspended.append(
                Suspended(request, {group: length for group in self.windows}, mode is SuspendMode.SWAP))
        for request in message.drops:
            self.sequences.pop(request, None)
        for new in message.new:
            self.sequences[new.id] = _Sequence(list(new.tokens), new.seed, list(self.windows))
        for request, computed in message.resumes:
            self.sequences[request].computed = computed
        for request, grant in message.grants:
            for group, change in grant.groups.items():
                self._grant(self.sequences[request].tables, group, change)
        if self.transfer is not None and message.transfer is not None:
            self.transfer.begin(message.transfer)
        for row in message.rows:
            verdict.rows.append(self._row(row))
        if self.transfer is not None:
            verdict.finished_transfers = self.transfer.report(0.0 if message.rows else self.wait_s)
        return verdict

    def _grant(self, tables: dict[str, dict[int, int]], group: str, change: GroupGrant) -> None:
        table = {i: page for i, page in tables[group].items() if change.first_live <= i < change.truncate_to}
        begin, size = max(change.truncate_to, change.first_live), self.page_size[group]
        table.update({begin + i: page for i, page in enumerate(change.pages)})
        tables[group] = table
        for source, target in change.copies:
            for memory in self.memory[group]:
                for offset in range(size):
                    memory[target * size + offset] = memory[source * size + offset]

    def _row(self, row: Row) -> RowVerdict:
        sequence = self.sequences[row.request]
        begin, tokens = sequence.computed, sequence.tokens
        end = begin + row.n_tokens
        if end > len(tokens):
            raise AssertionError(f"row of {row.request} computes {end} tokens, {len(tokens)} are known")
        samples = end == len(tokens)
        drafts = self._propose(sequence, row.draft_slots) if samples else []
        self._attend(row.request, sequence, tokens[:end] + drafts, begin)
        kept: list[int] = []
        if samples:
            for draft in drafts:
                if next_token(tokens + kept, sequence.seed) != draft:
                    break
                kept.append(draft)
            kept.append(next_token(tokens + kept, sequence.seed))
            tokens.extend(kept)
        accepted = max(0, len(kept) - 1)
        sequence.computed = end + accepted
        self.drafted += len(drafts)
        self.accepted += accepted
        return RowVerdict(row.request, kept, end + accepted, len(drafts), accepted)

    def _propose(self, sequence: _Sequence, slots: int) -> list[int]:
        drafts: list[int] = []
        for _ in range(slots):
            right = next_token(sequence.tokens + drafts, sequence.seed)
            drafts.append(right if self.rng.random() < self.skill else (right + 1) % VOCAB_SIZE)
        return drafts

    def _attend(self, request: str, sequence: _Sequence, tokens: list[int], begin: int) -> None:
        """Write the new slots, then check every slot that their queries would read."""
        digests, digest = [], 0
        for token in tokens:
            digest = hash((digest, token)) & 0x7FFFFFFF
            digests.append(digest)
        for group, window in self.windows.items():
            table, size = sequence.tables[group], self.page_size[group]
            first = max(0, begin - window + 1) if window else 0
            slots = [table[position // size] * size + position % size for position in range(first, len(tokens))]
            for memory, mask in zip(self.memory[group], MASKS, strict=False):
                for position in range(begin, len(tokens)):
                    memory[slots[position - first]] = digests[position] ^ mask
                for position, slot in enumerate(slots, first):
                    if (held := memory[slot]) != digests[position] ^ mask:
                        what = "a poisoned page" if held == POISON else "another history"
                        raise CacheCorruption(f"{request} reads {what} at position {position} of group {group!r}")
            self.reads += len(slots)


class LateExecutor(Executor):
    """Runs a step when it is collected, or a random number of turns earlier, never inside ``submit``; poisons the fresh
    pages of a grant at once, as a device would overwrite them."""

    contract: ClassVar[str] = "executor/1"

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.worker: FakeWorker | None = None
        self.queue: deque[StepMessage] = deque()
        self.verdicts: dict[Ticket, Verdict] = {}
        self.messages: list[StepMessage] = []
        self.cached: dict[str, int] = {}
        """Of requests whose pages a transfer fills: the tokens that lie in them already."""

    def launch(self, factory: WorkerFactory, plan: RankPlan, meeting: Meeting | None = None) -> WorkerInfo:
        worker = factory(plan, 0)
        assert isinstance(worker, FakeWorker), "LateExecutor drives a FakeWorker"
        self.worker = worker
        return worker.info()

    def allocate(self, plan: CachePlan) -> None:
        self._device.allocate(plan)

    def submit(self, message: StepMessage) -> Ticket:
        computed = dict(message.resumes)
        for request, grant in message.grants:
            for group, change in grant.groups.items():
                there = self.cached.get(request, computed.get(request, 0))
                shared = -(-there // self._device.page_size[group])
                begin = max(change.truncate_to, change.first_live)
                for index, page in enumerate(change.pages):
                    if begin + index >= shared:
                        self._device.poison(group, page)
        self.queue.append(message)
        self.messages.append(message)
        while self.queue and self.rng.random() < 0.3:
            self._run_one()
        return message.step_id

    def collect(self, ticket: Ticket) -> Verdict:
        while ticket not in self.verdicts:
            self._run_one()
        return self.verdicts.pop(ticket)

    def done(self, ticket: Ticket) -> bool:
        return ticket in self.verdicts

    def health(self) -> str | None:
        return None

    def stop(self) -> None:
        self.queue.clear()

    @property
    def _device(self) -> FakeWorker:
        assert self.worker is not None, "launch() comes first"
        return self.worker

    def _run_one(self) -> None:
        message = self.queue.popleft()
        self.verdicts[message.step_id] = self._device.execute(message)
