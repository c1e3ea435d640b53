"""Carries out step messages on one device: requests in, rows through the model, tokens out.

The host plans with upper bounds; the true counts are here. A row computes its tokens from the true computed length on,
and tokens that the host does not know yet come from this side's own buffer, so that a request may be in two steps in
flight. Every array and tensor of a step is made for it and never written again.
"""

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from hotswap.core.blame import blame
from hotswap.core.errors import ComponentError
from hotswap.core.execution.accord import Accord, StepFailedTogether
from hotswap.core.execution.batch import Batch, Cohort
from hotswap.core.execution.buffers import RequestTable, Resident
from hotswap.core.execution.cache import PagedCache
from hotswap.core.execution.choosing import ChoiceRows, Choices, TokenChooser
from hotswap.core.execution.events import EventCounts
from hotswap.core.execution.graphs import StepGraphs
from hotswap.core.execution.layout import IntArray, batch_layout, spread
from hotswap.core.execution.logprobs import prompt_logprobs
from hotswap.core.execution.records import RecordedForward
from hotswap.core.execution.speculation import Speculation
from hotswap.core.interfaces.kv_transfer import TransferWorker
from hotswap.core.interfaces.messages import NewRequest, RowVerdict, StepMessage, Suspended, Verdict
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.scheduler import Row, SuspendMode
from hotswap.core.interfaces.speculator import ObservedRow, ProposeRow
from hotswap.core.modeling.mesh import LOCAL_MESH, Mesh
from hotswap.core.request import TokenLogprob

logger = logging.getLogger(__name__)

TRANSFER_WAIT_S = 0.005
"""How long an empty step may wait for a transfer: short, since the next request waits behind it."""


class ModelRunner:
    """One rank's steps. ``clock`` gives seconds, for the durations in verdicts. ``hidden``: what one stage gives to the
    next for each token, its width and dtype."""

    def __init__(
        self, model: Model, cache: PagedCache, table: RequestTable, speculation: Speculation,
        chooser: TokenChooser, device: str, clock: Callable[[], float], accord: Accord, mesh: Mesh = LOCAL_MESH,
        hidden: tuple[int, torch.dtype] = (0, torch.float32), transfer: TransferWorker | None = None,
    ) -> None:
        self._model, self._device = model, device
        self._groups = tuple(spec.group for spec in model.cache_specs())
        self._mesh, self._hidden = mesh, hidden
        self._samples = mesh.is_last and mesh.leads
        self._accord = accord
        self._broken: dict[str, str] = {}
        self._drafted: dict[str, int] = {}
        self._took_part = False
        self._cohort = Cohort.of([], -1)
        self._cache, self._table = cache, table
        self._speculation = speculation
        self._chooser, self._transfer = chooser, transfer
        self._clock = clock
        # Captured steps of the model, or else recorded ones, and what those of the speculator count: set by the worker.
        self.graphs: StepGraphs | None = None
        self.records: RecordedForward | None = None
        self.draft_events: EventCounts | None = None

    def execute(self, message: StepMessage) -> Verdict:
        """What goes wrong outside a single row is the step's error, and its requests have failed. Raises only where
        other ranks do not know that this one has failed."""
        verdict, self._took_part = Verdict(message.step_id), False
        try:
            begun = self._clock()
            self._hear(message.news)
            gone = self._change_tables(message, verdict)
            self._tell(gone, message.new)
            if self._transfer is not None and message.transfer is not None:
                self._begin_transfers(self._transfer, message)
            verdict.durations["prepare"] = self._clock() - begun
            if message.rows:
                self._run_rows(message.rows, verdict)
        except Exception as error:
            if not (self._mesh.alone or isinstance(error, StepFailedTogether)):
                raise
            verdict.rows.clear()
            together = isinstance(error, StepFailedTogether)
            verdict.error = blame(error.__cause__ or error if together else error)
            logger.exception("step %d failed: %s", message.step_id, verdict.error)
            # A row of theirs may be in flight already; it must not run on what this step left behind.
            self._table.fail((row.request for row in message.rows), verdict.error)
        if self._mesh.in_step and not self._took_part:
            self.join()
        if self._transfer is not None:
            self._end_transfers(self._transfer, message, verdict)
        return verdict

    def _begin_transfers(self, transfer: TransferWorker, message: StepMessage) -> None:
        try:
            transfer.begin(message.transfer)
        except Exception as error:
            # It may be the pages of any request that starts here that have not been filled.
            self._table.fail((resume.request for resume in message.resumes), blame(error))
            raise

    def _end_transfers(self, transfer: TransferWorker, message: StepMessage, verdict: Verdict) -> None:
        """An empty step was sent to hear of a transfer's end: it may wait for one."""
        transfer.end()
        empty = not (message.rows or message.has_operations)
        verdict.finished_transfers = transfer.report(TRANSFER_WAIT_S if empty else 0.0)

    def join(self) -> None:
        """One token that is nobody's through the model, since other engines need what this rank holds of it."""
        nobody = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._model.forward(nobody, nobody, lambda layer, q, k, v: q)

    def _hear(self, news: Sequence[tuple[str, list[int]]]) -> None:
        """The last stage has kept these tokens: what was computed of drafts before them counts now."""
        heard = [(resident, kept) for request, kept in news if (resident := self._table.get(request)) is not None]
        if not heard:
            return
        slots = np.array([resident.slot for resident, _ in heard], np.int64)
        self._table.append(slots, [kept for _, kept in heard])
        self._table.computed[slots] += np.array([len(kept) - 1 for _, kept in heard], np.int64)
        fared = [
            (resident, drafted, len(kept) - 1) for resident, kept in heard
            if (drafted := self._drafted.pop(resident.new.id, 0))]
        if fared and self._speculation.on:
            self._speculation.observe([
                self._observed(resident, drafted, accepted, int(self._table.computed[resident.slot]), 0)
                for resident, drafted, accepted in fared], {})

    def _change_tables(self, message: StepMessage, verdict: Verdict) -> list[str]:
        """Everything that the message changes, in its order; returns who is gone. No plugin runs in here: were one to
        raise, grants would be lost that the host relies on."""
        for request, mode in message.suspensions:
            # Even where its pages are saved elsewhere it is forgotten, and comes again as new.
            if self._table.get(request) is not None:
                lengths = self._table.lengths(request)
                verdict.suspended.append(Suspended(request, lengths, mode is SuspendMode.SWAP))
        leaving = [*(request for request, _ in message.suspensions), *message.drops]
        gone = [request for request in leaving if self._table.remove(request)]
        for new in message.new:
            self._table.add(new)
        for request, computed in message.resumes:
            self._table.resume(request, computed)
        for request, grant in message.grants:
            self._table.grant(request, grant)
            self._cache.copy_pages(grant)
        return gone

    def _tell(self, gone: Sequence[str], arrived: Sequence[NewRequest]) -> None:
        """Let the parts that hold state of their own know."""
        for request in gone:
            self._broken.pop(request, None)
            self._drafted.pop(request, None)
            if self._samples:
                self._chooser.end(request)
        if gone and self._speculation.on:
            self._speculation.forget(gone)
        for new in arrived if self._samples else ():
            try:
                self._chooser.begin(new)
            except ComponentError as error:
                # Its row runs nevertheless: the other ranks do not know.
                self._broken[new.id] = str(error)

    def _run_rows(self, rows: Sequence[Row], verdict: Verdict) -> None:
        times = [self._clock()]
        batch, refused = self._gather(rows)
        if batch.rows:
            dropped = self._propose(batch)
            times.append(self._clock())
            forward = self._lay_out(batch)
            times.append(self._clock())
            hidden, *states = forward()
            times.append(self._clock())
            reports, distrusted = self._finish(batch, hidden)
            times.append(self._clock())
            self._observe(batch, reports, dict(zip(self._speculation.taps, states, strict=True)))
            times.append(self._clock())
            propose, prepare, compute, finish, observe = (end - begin for begin, end in pairwise(times))
            verdict.durations["prepare"] += prepare
            verdict.durations |= {"propose": propose, "forward": compute, "sample": finish, "observe": observe}
            if dropped + distrusted:
                verdict.counts["dropped_proposals"] = dropped + distrusted
            for events in self._events():
                verdict.counts |= events.news()
            verdict.rows = reports
        if refused:
            verdicts = refused | {report.request: report for report in verdict.rows}
            verdict.rows = [verdicts[row.request] for row in rows]

    def graph_totals(self) -> dict[str, int]:
        """What was counted of captured and eager steps since the start."""
        return {event: n for events in self._events() for event, n in events.totals.copy().items()}

    def forget_graphs(self) -> None:
        """They know the runner, and hold memory."""
        self.graphs = self.records = self.draft_events = None

    def _events(self) -> list[EventCounts]:
        own = self.graphs or self.records
        mine = own.counts if own is not None else None
        return [events for events in (mine, self.draft_events) if events is not None]

    def forward(
        self, inputs: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Token ids and positions [T] int64 -> hidden states [T, H], which the next stage gets, and behind them those
        that the speculator reads. ``wanted`` [N] int64: of these tokens alone."""
        self._took_part = True
        if not self._mesh.is_first:
            width, dtype = self._hidden
            inputs = self._mesh.receive(torch.empty(len(inputs), width, dtype=dtype, device=self._device))
        given: list[torch.Tensor] = []
        if wanted is not None:
            hidden = self._model.forward_some(inputs, positions, self._cache.attend, wanted)
        elif not self._speculation.taps:
            hidden = self._model.forward(inputs, positions, self._cache.attend)
        else:
            taps: dict[str, torch.Tensor | None] = dict.fromkeys(self._speculation.taps)
            hidden = self._model.forward(inputs, positions, self._cache.attend, taps)
            given = [state for state in taps.values() if state is not None]
            assert len(given) == len(taps), f"{self._model.label} gave {len(given)} of {list(taps)}"
        self._mesh.pass_on(hidden)
        return [hidden, *given]

    def _gather(self, rows: Sequence[Row]) -> tuple[Batch, dict[str, RowVerdict]]:
        """The rows that can run, and the verdicts of those that cannot: of requests that failed, or are not here."""
        names, refused = tuple([row.request for row in rows]), dict[str, RowVerdict]()
        cohort = self._cohort
        if names != cohort.names or self._table.version != cohort.version:
            refused = {name: verdict for name in names if (verdict := self._refusal(name)) is not None}
            rows = [row for row in rows if row.request not in refused]
            cohort = self._cohort = Cohort.of(
                [resident for row in rows if (resident := self._table.get(row.request)) is not None],
                self._table.version)
        counts = np.array([row.n_tokens for row in rows], np.int64)
        computed, known = self._table.computed[cohort.slots], self._table.known[cohort.slots]
        ends = computed + counts
        samples = ends == known
        if not samples.all() and (beyond := ends > known).any():
            row = int(beyond.argmax())
            raise AssertionError(f"{rows[row]} starts at {computed[row]}, but only {known[row]} tokens are known")
        return Batch(rows, cohort, counts, computed, ends, known, samples, counts, [()] * len(rows)), refused

    def _refusal(self, name: str) -> RowVerdict | None:
        resident = self._table.get(name)
        if resident is None:
            return RowVerdict(name, [], 0, error="the worker does not know the request")
        if resident.error is not None:
            return RowVerdict(name, [], int(self._table.computed[resident.slot]), error=resident.error)
        return None

    def _propose(self, batch: Batch) -> int:
        """Ask for drafts and write them behind the known tokens; returns how many proposals made no sense."""
        if not self._speculation.lookahead:
            return 0
        questions = self._questions(batch) if self._speculation.on else []
        proposal = self._accord.drafts(len(batch.rows), lambda: self._speculation.propose(questions))
        if proposal.failed:
            self._speculation.lose(row.request for row in batch.rows)
        batch.drafts, batch.draft_probs = proposal.drafts, proposal.probs
        batch.lengths = batch.counts + np.fromiter(map(len, batch.drafts), np.int64, len(batch.drafts))
        for slot, known, drafts in zip(batch.slots, batch.known, batch.drafts, strict=True):
            self._table.tokens[slot, known : known + len(drafts)] = drafts
        if not self._mesh.is_last:
            self._drafted |= {
                row.request: len(drafts) for row, drafts in zip(batch.rows, batch.drafts, strict=True) if drafts}
        return proposal.dropped

    def _questions(self, batch: Batch) -> list[ProposeRow]:
        computed, ends = batch.computed.tolist(), batch.ends.tolist()
        columns = zip(batch.rows, batch.slots, batch.samples, computed, ends, strict=True)
        return [
            ProposeRow(row.request, self._known(slot), row.draft_slots if samples else 0, begin, end)
            for row, slot, samples, begin, end in columns]

    def _known(self, slot: int) -> IntArray:
        """The known tokens of the request at ``slot``, to be read only."""
        view = self._table.tokens[slot, : self._table.known[slot]]
        view.flags.writeable = False
        return view

    def _observe(self, batch: Batch, reports: Sequence[RowVerdict], taps: dict[str, torch.Tensor]) -> None:
        """Tell the speculator what became of each row that did not fail, and note how far its cache is behind."""
        if not (self._speculation.on and self._mesh.is_last):
            return
        lengths, rows, seen = batch.lengths, [], []
        columns = zip(reports, batch.residents, batch.computed.tolist(), np.cumsum(lengths) - lengths, strict=True)
        for report, resident, begin, offset in columns:
            if resident.error is None:
                seen.append((report, resident))
                rows.append(self._observed(resident, report.drafted, report.accepted, begin, int(offset)))
        lags = self._speculation.observe(rows, taps)
        for (report, resident), row, lag in zip(seen, rows, lags, strict=True):
            if lag is None:
                lag = int(self._table.lag[resident.slot]) + row.computed - row.begin
            report.lag = self._table.lag[resident.slot] = lag

    def _observed(self, resident: Resident, drafted: int, accepted: int, begin: int, offset: int) -> ObservedRow:
        computed = int(self._table.computed[resident.slot])
        return ObservedRow(resident.new.id, self._known(resident.slot), drafted, accepted, begin, computed, offset)

    def _lay_out(self, batch: Batch) -> Callable[[], Sequence[torch.Tensor]]:
        """Plan the batch for the attention backend; returns what then computes it, from a graph where one fits."""
        lengths = batch.lengths
        ends = batch.computed + lengths
        self._table.check_room(batch.slots, ends, self._groups)
        graphs = self.graphs
        if graphs is not None and (key := graphs.find(batch.slots, lengths, batch.computed)) is not None:
            graphs.prepare(key, batch.slots, lengths, batch.computed)
            return lambda: graphs.replay(key, lengths)
        tables = self._table.page_rows(batch.slots, int(ends.max()), self._groups)
        layout = batch_layout(lengths, batch.computed, tables, self._device)
        self._cache.plan(layout)
        where = spread(lengths)
        tokens = self._table.tokens[batch.slots[where.rows], where.positions(batch.computed)]
        inputs = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
        wanted = self._wanted(batch)
        forward = self.records or self.forward
        return lambda: forward(inputs, layout.positions, wanted)

    def _wanted(self, batch: Batch) -> torch.Tensor | None:
        """The tokens [N] int64 that a head will see, at least one; None: other parts look at hidden states, too."""
        if not self._mesh.is_last or self._speculation.taps or len(self._scored_prompts(batch)):
            return None
        tokens = batch.heads
        if tokens is None:
            return None
        return torch.from_numpy(tokens if len(tokens) else np.zeros(1, np.int64)).to(self._device)

    def _finish(self, batch: Batch, hidden: torch.Tensor) -> tuple[list[RowVerdict], int]:
        """Choose tokens for the rows that sample, bring the true counts up to date, and report; and how many drafts had
        probabilities that are none. hidden [T, H].

        A stage that gives no logits learns by the next message what was kept.
        """
        if not self._mesh.is_last:
            self._table.computed[batch.slots] = batch.ends
            return [RowVerdict(row.request, [], 0) for row in batch.rows], 0
        prompts = self._score_prompts(batch, hidden)
        choices = self._choose(batch, hidden)
        computed = batch.ends
        if self._speculation.lookahead:
            computed = computed.copy()
            computed[batch.sampling] += np.array(choices.accepted, np.int64)
        self._table.append(batch.sampling_slots, choices.kept)
        self._table.computed[batch.slots] = computed
        verdicts = self._report(batch, choices, computed.tolist())
        for i, scored in prompts.items():
            verdicts[i].prompt_logprobs, verdicts[i].prompt_logprobs_from = scored, int(batch.computed[i]) + 1
        return verdicts, choices.distrusted

    def _choose(self, batch: Batch, hidden: torch.Tensor) -> Choices:
        """The head sees the last known token of each row that samples, and its drafts: no other. ``hidden``: of all
        tokens, or of those."""
        which, tokens = batch.sampling, batch.heads
        if not which:
            return Choices([], [])
        rows = ChoiceRows(batch.cohort.names, batch.known, batch.drafts)
        if len(which) < len(batch.rows):
            rows = rows.select(which)
        if tokens is not None and len(tokens) < len(hidden):
            hidden = hidden[torch.from_numpy(tokens).to(self._device)]
        probs = batch.draft_probs and [batch.draft_probs[i] for i in which]
        logits = self._model.head(hidden)
        return self._accord.choices(len(which), lambda: self._chooser.choose(logits, rows, probs))

    def _score_prompts(self, batch: Batch, hidden: torch.Tensor) -> dict[int, list[TokenLogprob]]:
        """By row: logprobs of the prompt tokens that this step's tokens predict."""
        scored = {}
        for i in self._scored_prompts(batch):
            resident = batch.residents[i]
            top, first = resident.new.sampling.prompt_logprobs, int(batch.computed[i]) + 1
            assert top is not None, "it is not asked for"
            count = min(int(batch.counts[i]), resident.new.prompt_length - first)
            tokens = self._table.tokens[resident.slot, first : first + count].tolist()
            start = int(batch.lengths[:i].sum())
            rows = hidden[start : start + count]
            scored[i] = prompt_logprobs(rows, tokens, top, self._model.head)
        return scored

    def _scored_prompts(self, batch: Batch) -> list[int]:
        """The rows for which prompt logprobs are asked, and that have tokens which predict some."""
        return [i for i in batch.cohort.scored if batch.computed[i] + 1 < batch.residents[i].new.prompt_length]

    def _report(self, batch: Batch, choices: Choices, computed: list[int]) -> list[RowVerdict]:
        """Of each row."""
        sampling, kept = batch.sampling, choices.kept
        if len(sampling) < len(computed):
            chosen = dict(zip(sampling, kept, strict=True))
            kept = [chosen.get(row, []) for row in range(len(computed))]
        verdicts = list(map(RowVerdict, batch.cohort.names, kept, computed))
        if self._speculation.lookahead:
            for row, accepted in zip(sampling, choices.accepted, strict=True):
                verdicts[row].drafted, verdicts[row].accepted = len(batch.drafts[row]), accepted
        for i, logprobs in choices.logprobs.items():
            verdicts[sampling[i]].logprobs = logprobs
        for i, error in choices.errors.items():
            verdict = verdicts[sampling[i]]
            verdict.kept, verdict.error, verdict.own, verdict.logprobs = [], error, i in choices.own, None
            self._table.fail([verdict.request], error)
        for verdict in verdicts if self._broken else ():
            if verdict.request in self._broken:
                verdict.kept, verdict.error, verdict.own = [], self._broken[verdict.request], True
        return verdicts
