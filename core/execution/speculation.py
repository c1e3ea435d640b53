"""The speculator's place in the worker: what it is asked and told, what of its answers is taken, and its own cache.

Whatever it proposes, the answer stays exact; what makes no sense is dropped and counted.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch

from hotswap.core.errors import ComponentError
from hotswap.core.execution.buffers import RequestTable
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.choosing import blaming
from hotswap.core.execution.events import EventCounts
from hotswap.core.execution.graphs import StepGraphs
from hotswap.core.execution.layout import IntArray, batch_layout
from hotswap.core.execution.records import RecordedForward, padding_layout
from hotswap.core.execution.static import GraphKey
from hotswap.core.interfaces.graphs import GraphDevice
from hotswap.core.interfaces.model import Attend
from hotswap.core.interfaces.speculator import Drafts, DraftStep, ObservedRow, ProposeRow, Span, Speculator

logger = logging.getLogger(__name__)


class Proposal(NamedTuple):
    """By row: ``drafts``, and ``probs`` that have the right shape and type; ``dropped`` counts what was not taken.
    ``failed``: nothing could be asked, here or on the rank that leads."""

    drafts: list[list[int]]
    probs: list[torch.Tensor | None] | None
    dropped: int
    failed: bool = False


class SpeculatorCache:
    """See ``OwnCache``. Attached once pages have been divided. ``graphs``, ``records``: its captured or recorded steps,
    once there are any."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._groups: tuple[str, ...] = ()
        self._table: RequestTable | None = None
        self._cache: PagedCache | None = None
        self._captured: DraftStep | None = None
        self._inputs: list[torch.Tensor] = []
        self.graphs: StepGraphs | None = None
        self.records: RecordedForward | None = None

    def detach(self) -> None:
        """It serves nobody until it is attached again."""
        self._groups, self._table, self._cache = (), None, None
        self._captured, self._inputs, self.graphs, self.records = None, [], None, None

    def attach(self, groups: Sequence[str], table: RequestTable, cache: PagedCache) -> None:
        self._groups, self._table, self._cache = tuple(groups), table, cache

    def capture(
        self, step: DraftStep, keys: Sequence[GraphKey], device: GraphDevice, windows: Mapping[str, int | None],
        progress: bool, reserved: int,
    ) -> None:
        """Record ``step`` for the numbers of rows in ``keys``."""
        table, cache = self._attached
        self._captured, most = step, max(key.rows for key in keys)
        self._inputs = [torch.zeros(most, *shape, dtype=dtype, device=self._device) for shape, dtype in step.inputs]

        def forward(_: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
            return [step.run([x[: len(positions)] for x in self._inputs], positions, cache.attend)]

        self.graphs = StepGraphs(keys, device, table, cache, windows, forward, self._device, "draft_")
        self.graphs.capture(progress, reserved)

    @property
    def events(self) -> EventCounts | None:
        """What its captured or recorded steps count."""
        own = self.graphs or self.records
        return own.counts if own is not None else None

    def record(self, step: DraftStep, device: GraphDevice, most: int) -> None:
        """Have ``step`` recorded when as many rows come again, up to ``most``. CaptureError where it cannot be."""
        table, cache = self._attached

        def forward(*given: torch.Tensor) -> list[torch.Tensor]:
            *inputs, positions = given
            return [step.run(inputs, positions, cache.attend)]

        records = RecordedForward(device, forward, most, "draft_")
        cache.plan(padding_layout(table, self._groups, self._device))
        zeros = [torch.zeros(1, *shape, dtype=dtype, device=self._device) for shape, dtype in step.inputs]
        zeros.append(torch.zeros(1, dtype=torch.int64, device=self._device))
        records.verify(zeros, [zero + 1 for zero in zeros])
        self._captured, self.records = step, records

    def step(self, step: DraftStep, spans: Sequence[Span], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        graphs = self.graphs if step == self._captured else None
        if graphs is not None:
            slots, begins, ends = self._places(spans)
            if (key := graphs.find(slots, ends - begins, begins)) is not None:
                for kept, given in zip(self._inputs, inputs, strict=True):
                    kept[: len(given)].copy_(given)
                    kept[len(given) : key.rows].zero_()
                graphs.prepare(key, slots, ends - begins, begins)
                return graphs.replay(key, ends - begins)[0]
        positions, attend = self.lay_out(spans)
        if self.records is not None and step == self._captured:
            return self.records(*inputs, positions)[0]
        return step.run(inputs, positions, attend)

    def lay_out(self, spans: Sequence[Span]) -> tuple[torch.Tensor, Attend]:
        table, cache = self._attached
        slots, begins, ends = self._places(spans)
        rows = table.page_rows(slots, int(ends.max()), self._groups)
        layout = batch_layout(ends - begins, begins, rows, self._device)
        cache.plan(layout)
        return layout.positions, cache.attend

    @property
    def _attached(self) -> tuple[RequestTable, PagedCache]:
        assert self._table is not None and self._cache is not None, "used before the first step"
        return self._table, self._cache

    def _places(self, spans: Sequence[Span]) -> tuple[IntArray, IntArray, IntArray]:
        """The requests' slots in the table, and where their spans begin and end, all [R]."""
        table, _ = self._attached
        residents = [table.get(span.request) for span in spans]
        slots = np.array([resident.slot for resident in residents if resident is not None], np.int64)
        assert len(slots) == len(spans), "a span of a request that is not here"
        begins, ends = (np.array([span[i] for span in spans], np.int64) for i in (1, 2))
        table.check_room(slots, ends, self._groups)
        return slots, begins, ends


class Speculation:
    """Asks the speculator and checks what it says. ``on``: there is anything to ask, and this rank asks it.

    One with a cache of its own lacks what it did not compute in a proposal that failed: it forgets those requests, and
    neither proposes nor observes them any more."""

    def __init__(self, speculator: Speculator, vocab_size: int, asks: bool = True) -> None:
        needs = speculator.needs()
        self.speculator, self.taps, self.lookahead = speculator, needs.taps, needs.lookahead
        self.on = asks and needs.lookahead > 0
        self._vocab_size, self._keeps_cache = vocab_size, bool(needs.cache_specs)
        self._lost: set[str] = set()
        self._told: set[str] = set()

    def propose(self, rows: Sequence[ProposeRow]) -> Proposal:
        """Raises what the speculator does, having logged it."""
        asked = [row for row in rows if row.request not in self._lost]
        try:
            with blaming(self.speculator, "propose"):
                drafts = self.speculator.propose(asked) if asked else Drafts([])
                tokens, probs, problems = _taken(asked, drafts, self._vocab_size)
        except ComponentError as error:
            self._warn("no proposal", error, error)
            raise
        if problems:
            self._warn("what makes no sense", problems[0])
        if len(asked) < len(rows):
            places = {row.request: place for place, row in enumerate(asked)}
            at = [places.get(row.request) for row in rows]
            tokens = [[] if place is None else tokens[place] for place in at]
            probs = probs and [None if place is None else probs[place] for place in at]
        return Proposal(tokens, probs, len(problems))

    def lose(self, requests: Iterable[str]) -> None:
        """A proposal for these has failed."""
        if self._keeps_cache:
            new = [request for request in requests if request not in self._lost]
            self.forget(new)
            self._lost.update(new)

    def observe(self, rows: Sequence[ObservedRow], taps: dict[str, torch.Tensor]) -> list[int | None]:
        """By row, how far the speculator's own groups are behind; None: by this step's tokens more than before."""
        known = [row for row in rows if row.request not in self._lost]
        with blaming(self.speculator, "observe"):
            lags = self.speculator.observe(known, taps)
            if lags is None:
                lags = [0] * len(known)
            if len(lags) != len(known):
                raise ValueError(f"{len(lags)} lags for {len(known)} rows")
        given = iter(lags)
        return [None if row.request in self._lost else next(given) for row in rows]

    def forget(self, requests: Sequence[str]) -> None:
        known = [request for request in requests if request not in self._lost]
        self._lost.difference_update(requests)
        with blaming(self.speculator, "forget"):
            self.speculator.forget(known)

    def _warn(self, what: str, reason: object, error: Exception | None = None) -> None:
        """The first time, since it may happen in every step."""
        logger.log(
            logging.DEBUG if what in self._told else logging.WARNING,
            "%s made %s, which is dropped and counted from now on: %s", self.speculator.label, what, reason,
            exc_info=error)
        self._told.add(what)


def _trees(drafts: Drafts) -> str | None:
    for row, parents in enumerate(drafts.parents or ()):
        if list(parents) != list(range(-1, len(parents) - 1)):
            return (
                f"row {row} has parents {list(parents)}, a tree, but the verifier takes chains only: propose one draft "
                "behind the other, and leave parents out")
    return None


def _taken(
    rows: Sequence[ProposeRow], drafts: Drafts, vocab_size: int,
) -> tuple[list[list[int]], list[torch.Tensor | None] | None, list[str]]:
    """Tokens and probabilities that can be verified, and what is wrong with the rest."""
    nothing: list[list[int]] = [[] for _ in rows]
    given, probs = drafts.tokens, drafts.probs
    if (tree := _trees(drafts)) is not None:
        return nothing, None, [tree]
    if len(given) != len(rows):
        return nothing, None, [f"{len(given)} proposals for {len(rows)} rows"]
    if probs is not None and len(probs) != len(rows):
        return nothing, None, [f"probabilities of {len(probs)} rows for {len(rows)} rows"]
    taken: list[list[int]] = []
    qs: list[torch.Tensor | None] = []
    problems = []
    for i, (row, proposed) in enumerate(zip(rows, given, strict=True)):
        q = None if probs is None else probs[i]
        kept = list(takewhile(lambda token: 0 <= token < vocab_size, map(int, proposed[: row.slots])))
        if len(kept) < len(proposed):
            problems.append(_excess(proposed, row, vocab_size))
        if q is not None and (q.shape != (len(proposed), vocab_size) or q.dtype != torch.float32):
            problems.append(
                f"probabilities {list(q.shape)} {q.dtype} for request {row.request}, expected "
                f"[{len(proposed)}, {vocab_size}] torch.float32")
            kept, q = [], None
        taken.append(kept)
        qs.append(None if q is None else q[: len(kept)])
    return taken, None if probs is None else qs, problems


def _excess(proposed: Sequence[int], row: ProposeRow, vocab_size: int) -> str:
    if len(proposed) > row.slots:
        return f"{len(proposed)} drafts for request {row.request}, which has {row.slots} slots"
    wrong = next(token for token in proposed if not 0 <= token < vocab_size)
    return f"draft {wrong} for request {row.request}, the vocabulary has {vocab_size} tokens"
