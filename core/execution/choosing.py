"""From a step's logits to the tokens that each row keeps: processors, sampling or verification, logprobs."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hotswap.core.blame import blame
from hotswap.core.errors import ComponentError
from hotswap.core.execution.layout import IntArray, token_positions
from hotswap.core.execution.logprobs import token_logprobs
from hotswap.core.execution.randomness import Stream
from hotswap.core.execution.sampling import NO_TOKEN_LEFT, processed_probs, sample
from hotswap.core.execution.sampling_table import SamplingBatch, SamplingTable
from hotswap.core.execution.verification import verify
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.logits import LogitsProcessor, LogitsRow
from hotswap.core.interfaces.messages import NewRequest
from hotswap.core.interfaces.speculator import DraftRow, Drawn
from hotswap.core.request import TokenLogprob

logger = logging.getLogger(__name__)


@contextmanager
def blaming(component: Component, where: str) -> Iterator[None]:
    """An exception from inside becomes a ComponentError that names ``component`` and its method ``where``."""
    try:
        yield
    except Exception as error:
        raise ComponentError(component.kind, component.name, where, error) from error


class ChoiceRows(NamedTuple):
    """The rows that sample, as columns [R]. ``positions``: the index in its sequence of the first token that each
    chooses. A row has one row of logits for each of its ``drafts``, in order, and one more."""

    names: Sequence[str]
    positions: IntArray
    drafts: Sequence[Sequence[int]]

    @property
    def widths(self) -> IntArray:
        """Rows of logits that each has."""
        return np.fromiter(map(len, self.drafts), np.int64, len(self.drafts)) + 1

    def select(self, rows: Sequence[int]) -> "ChoiceRows":
        """These alone."""
        return ChoiceRows(
            [self.names[i] for i in rows], self.positions[list(rows)], [self.drafts[i] for i in rows])


@dataclass
class Choices:
    """By row: tokens kept, how many of them were drafts, what is wrong, and logprobs where they were asked. ``own``:
    rows where what is wrong is the request's own, see :class:`RowVerdict`. ``distrusted``: see :class:`Verified`."""

    kept: list[list[int]]
    accepted: list[int]
    errors: dict[int, str] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    distrusted: int = 0


class TokenChooser:
    """Holds the sampling state of the worker's requests. ``processors`` apply in their order."""

    def __init__(self, processors: Sequence[LogitsProcessor], vocab_size: int, device: str) -> None:
        self._table = SamplingTable(device, vocab_size)
        self._processors = processors
        self._wanted: dict[str, tuple[LogitsProcessor, ...]] = {}
        self._scored: dict[str, int] = {}
        """By request that asks for logprobs: how many alternatives are listed."""
        for processor in processors:
            with blaming(processor, "configure"):
                processor.configure(vocab_size)

    def begin(self, new: NewRequest) -> None:
        self.end(new.id)
        self._table.add(new.id, new.sampling, new.seed)
        if new.sampling.logprobs is not None:
            self._scored[new.id] = new.sampling.logprobs
        for processor in self._processors:
            with blaming(processor, "begin"):
                if processor.wants(new):
                    processor.begin(new)
                    self._wanted[new.id] = (*self._wanted.get(new.id, ()), processor)

    def end(self, request: str) -> None:
        self._table.remove(request)
        self._scored.pop(request, None)
        for processor in self._wanted.pop(request, ()):
            try:
                processor.end(request)
            except Exception:
                logger.exception("%s raised in end; the request is gone, so nobody is told", processor.label)

    def choose(
        self, logits: torch.Tensor, rows: ChoiceRows, probs: Sequence[torch.Tensor | None] | None = None,
    ) -> Choices:
        """``logits`` [N, V] of any floating dtype may be changed. ``probs``: see :func:`verify`."""
        names = rows.names
        batch = self._batch(rows, len(logits))
        processed = bool(self._wanted) and not self._wanted.keys().isdisjoint(names)
        scored = [row for row, name in enumerate(names) if name in self._scored] if self._scored else []
        if not (processed or scored):
            return self._pick(logits, batch, rows, probs)
        given, logits, starts = logits, logits.float(), np.cumsum([0, *rows.widths]).tolist()
        if processed and logits is given:  # it is changed: its peaks tell afterwards what it was
            given = given.amax(-1, keepdim=True)
        raw = {row: self._raw_rows(logits[starts[row] : starts[row + 1]], names[row]) for row in scored}
        faults = self._process(logits, names, rows, starts) if processed else {}
        choices = self._pick(logits, batch, rows, probs)
        broken = {
            row for row in choices.errors if names[row] not in self._wanted
            or not given[starts[row] : starts[row + 1]].amax(-1).isfinite().all()}
        # What a processor says of logits that were no numbers when it got them is not why the row fails.
        for row in choices.errors.keys() - broken:
            choices.own.add(row)
            if choices.errors[row] != NO_TOKEN_LEFT:
                choices.errors[row] = self._spoilt(names[row])
        for row, (name, kept) in enumerate(zip(names, choices.kept, strict=True)):
            if row not in choices.errors and row not in faults and (fault := self._accept(name, kept)):
                faults[row] = fault
        for row in faults.keys() - broken:
            choices.errors[row] = faults[row]
            choices.own.add(row)
        self._score(raw, names, choices)
        return choices

    def draw(self, logits: torch.Tensor, rows: Sequence[DraftRow]) -> Drawn:
        """See ``Draw``. What a processor raises here it will raise again when the drafts are verified."""
        logits = logits.float()
        self._apply(logits, [LogitsRow(i, row.request, tuple(row.drafts)) for i, row in enumerate(rows)])
        batch = self._table.batch([row.request for row in rows], [row.position for row in rows])
        sampled = sample(logits, batch, Stream.DRAFT)
        tokens: list[int] = sampled.tokens.tolist()
        if batch.greedy.all():
            return Drawn(tokens, None)
        probs = processed_probs(logits, batch)
        if faulty := [row for row, sound in enumerate(sampled.best.isfinite().tolist()) if not sound]:
            # Nothing could be drawn: the row's token is 0, with certainty.
            probs[faulty] = 0.0
            probs[faulty, 0] = 1.0
        return Drawn(tokens, probs)

    def _accept(self, request: str, kept: Sequence[int]) -> str | None:
        """What went wrong, if anything did: it concerns this request alone."""
        for processor in self._wanted.get(request, ()):
            try:
                processor.accept(request, kept)
            except Exception as error:
                logger.exception("%s raised in accept", processor.label)
                return blame(error, processor, "accept")
        return None

    def _batch(self, rows: ChoiceRows, count: int) -> SamplingBatch:
        """How each of ``count`` rows of logits is sampled."""
        if count == len(rows.names):
            return self._table.batch(rows.names, rows.positions)
        widths = rows.widths
        repeated = [name for name, width in zip(rows.names, widths.tolist(), strict=True) for _ in range(width)]
        return self._table.batch(repeated, token_positions(widths, rows.positions))

    def _pick(
        self, logits: torch.Tensor, batch: SamplingBatch, rows: ChoiceRows,
        probs: Sequence[torch.Tensor | None] | None,
    ) -> Choices:
        if len(logits) == len(rows.names):
            tokens, errors = sample(logits, batch).to_host()
            return Choices([[token] for token in tokens], [0] * len(tokens), errors)
        verified = verify(logits, batch, rows.drafts, probs)
        return Choices(verified.kept, verified.accepted, verified.errors, distrusted=verified.distrusted)

    def _process(
        self, logits: torch.Tensor, names: Sequence[str], rows: ChoiceRows, starts: Sequence[int],
    ) -> dict[int, str]:
        """Apply the processors; returns the rows of those that raised, and why."""
        faults = self._apply(logits, [
            LogitsRow(start + i, name, tuple(drafts[:i]))
            for name, drafts, start in zip(names, rows.drafts, starts, strict=False) if name in self._wanted
            for i in range(len(drafts) + 1)])
        return {row: faults[name] for row, name in enumerate(names) if name in faults}

    def _apply(self, logits: torch.Tensor, rows: Sequence[LogitsRow]) -> dict[str, str]:
        """Each processor to the rows of requests that want it, and no other; by request, what was raised."""
        faults: dict[str, str] = {}
        work: dict[LogitsProcessor, list[LogitsRow]] = {processor: [] for processor in self._processors}
        for row in rows:
            for processor in self._wanted.get(row.request, ()):
                work[processor].append(row)
        for processor, its_rows in work.items():
            try:
                if its_rows:
                    processor.apply(logits, its_rows)
            except Exception as error:
                logger.exception("%s raised in apply", processor.label)
                faults |= dict.fromkeys((row.request for row in its_rows), blame(error, processor, "apply"))
        return faults

    def _spoilt(self, request: str) -> str:
        """What to say where logits are no numbers since processors were applied, none of which has raised."""
        labels = " or ".join(processor.label for processor in self._wanted[request])
        return f"{labels} made NaN or infinity of the model's logits"

    def _raw_rows(self, logits: torch.Tensor, name: str) -> torch.Tensor:
        """A request's logits, as they are before any processor."""
        return logits.clone() if name in self._wanted else logits

    def _score(self, raw: dict[int, torch.Tensor], names: Sequence[str], choices: Choices) -> None:
        scored = [row for row in raw if row not in choices.errors]
        if not scored:
            return
        tokens = [token for row in scored for token in choices.kept[row]]
        top = [self._scored[names[row]] for row in scored for _ in choices.kept[row]]
        found = iter(token_logprobs(torch.cat([raw[row][: len(choices.kept[row])] for row in scored]), tokens, top))
        for row in scored:
            choices.logprobs[row] = [next(found) for _ in choices.kept[row]]
