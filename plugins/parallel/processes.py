"""One process a rank, driven over channels that both ends have proven to own."""

import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import Annotated, Any

from pydantic import Field

from hotswap.core.errors import ConfigError, EngineStoppedError, ExchangeError
from hotswap.core.execution.channel import SECRET_BYTES, ChannelClosedError, Frame, Kind, decode, encode, encode_message
from hotswap.core.interfaces.component import Component, ComponentOptions, ComponentRef, Description, Part
from hotswap.core.interfaces.kvcache import CachePlan, CacheSpec
from hotswap.core.interfaces.messages import EndedTransfer, StepMessage, Verdict
from hotswap.core.interfaces.parallel import (
    Executor,
    Meeting,
    RankPlan,
    RankReport,
    Take,
    Ticket,
    WorkerFactory,
    WorkerInfo,
)
from hotswap.plugins.parallel.crew import Crew
from hotswap.plugins.parallel.lockstep import Lockstep, lockstep_of
from hotswap.plugins.parallel.mesh import over_engines
from hotswap.plugins.parallel.rank import ENTRY, Exchange, Exchanged, Job, Prepared, Ready, job_arguments

logger = logging.getLogger(__name__)


class ProcessesExecutor(Executor):
    """A process for each rank, started by a launcher. Choose it for more than one device; it is chosen by itself where
    shard strategies ask for ranks.

    Every rank gets every message; the first rank of the last stage answers. Messages are JSON on sockets, checked
    against their types, never pickled. Tensors travel between ranks by torch.distributed and never through here.
    A rank that dies ends the engine: nothing can be computed without it.
    """

    class Options(ComponentOptions):
        launcher: Annotated[ComponentRef, Part("launcher")] = ComponentRef(use="local")
        """Who starts the processes: `local` on this machine, `ray` on a cluster's."""
        start_timeout_s: Annotated[float, Field(gt=0)] = 600.0
        """How long starting and loading may take."""
        stop_timeout_s: Annotated[float, Field(gt=0)] = 10.0
        """How long `stop` waits for the step that runs. After it the processes are killed."""
        collective_timeout_s: Annotated[float, Field(gt=0)] = 600.0
        """How long a rank waits for the others in a collective: longer than the longest step."""

    options: Options

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._crew: Crew | None = None
        self._store: Any = None
        self._hearing: list[bool] = []
        self._lockstep: Lockstep | None = None
        self._index = 0
        self._lock = Lock()
        self._pending: deque[Future[Verdict]] = deque()
        self._tickets: dict[Ticket, Future[Verdict]] = {}
        self._next: Ticket = 0
        self._ended: list[EndedTransfer] = []  # reported by ranks that give no verdicts
        self._news: list[tuple[str, list[int]]] = []

    def describe(self) -> Description:
        return Description(offers=frozenset({"ranks", "exchange"}))

    def launch(self, factory: WorkerFactory, plan: RankPlan, meeting: Meeting | None = None) -> WorkerInfo:
        if self._crew is not None:
            raise RuntimeError("launch was called twice")
        secret, size, replica = secrets.token_bytes(SECRET_BYTES), plan.world_size, plan.replica
        self._lockstep, self._index = lockstep_of(plan, meeting), replica.index
        self._crew = crew = Crew(self.parts["launcher"], size, secret, self._take, self._end)
        try:
            recipe, address = factory.recipe(), crew.listen()
            if self._lockstep is None or meeting is None:
                first, store = 0, self._meeting_place(crew)
            else:
                self._lockstep.enter(self._index, crew)
                first, store = size * self._index, meeting.share("store", lambda: self._meeting_place(crew))
            job = Job(
                0, address, secret.hex(), store, str(crew.scratch) if crew.scratch else None,
                over_engines(plan, replica.count), recipe.entry, recipe.arguments, recipe.device,
                self.options.collective_timeout_s, logging.getLogger("hotswap").getEffectiveLevel())
            jobs = [job_arguments(replace(job, rank=rank, position=first + rank)) for rank in range(size)]
            frames = crew.start(ENTRY, jobs, self.options.start_timeout_s)
            ready = [decode(Ready, frame.payload) for frame in frames]
        except BaseException as error:
            if self._lockstep is not None:
                self._lockstep.leave(self._index, str(error))
            self.stop()
            raise
        self._hearing = [rank.hears for rank in ready]
        return _merged(ready)

    def allocate(self, plan: CachePlan) -> None:
        crew = self._running
        try:
            crew.ask(Kind.ALLOCATE, encode(plan), Kind.DONE)
        except EngineStoppedError as error:
            if crew.short_of_memory:
                raise MemoryError(str(error)) from error  # as an allocation on this side would have failed
            raise

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        try:
            return self._prepare({kind: part.ref.model_dump() for kind, part in parts.items()})
        except Exception:
            if parts:  # what other ranks have prepared
                self._prepare({})
            raise

    def _prepare(self, refs: dict[str, dict[str, Any]]) -> WorkerInfo:
        frames = self._running.ask(Kind.PREPARE, encode(refs), Kind.PREPARED)
        answers = [decode(Prepared, frame.payload) for frame in frames]
        for rank, answer in enumerate(answers):
            if answer.path is not None:
                raise ConfigError(answer.problem or "", answer.path)
            if answer.problem is not None:
                raise ExchangeError(f"rank {rank}: {answer.problem}")
        return _merged([answer.ready for answer in answers if answer.ready is not None])

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        frames = self._running.ask(Kind.EXCHANGE, encode(Exchange(plan, keeps_pages, take)), Kind.EXCHANGED)
        for rank, frame in enumerate(frames):
            told = decode(Exchanged, frame.payload)
            if told.problem is not None:
                problem = f"rank {rank}: {told.problem}"
                raise MemoryError(problem) if told.memory else ExchangeError(problem)
        self._news = []  # the ranks know no request, and are told of each with all its tokens

    def settle(self) -> None:
        self._running.ask(Kind.SETTLE, b"", Kind.DONE)

    def submit(self, message: StepMessage) -> Ticket:
        crew, verdict = self._running, Future[Verdict]()
        with self._lock:
            self._pending.append(verdict)
        plain = told = encode_message(message)
        if self._news:
            told = encode_message(replace(message, news=[*message.news, *self._news]))
            self._news = []

        def send() -> None:
            for rank, hears in enumerate(self._hearing):
                crew.send(Kind.EXECUTE, told if hears else plain, rank)

        if self._lockstep is None:
            send()
        else:
            self._lockstep.submit(self._index, send)
        self._next += 1
        self._tickets[self._next] = verdict
        return self._next

    def collect(self, ticket: Ticket) -> Verdict:
        verdict = self._tickets.pop(ticket).result()
        with self._lock:
            verdict.finished_transfers += self._ended
            self._ended = []
        if any(self._hearing):
            self._news += [(row.request, row.kept) for row in verdict.rows if row.kept]
        return verdict

    def done(self, ticket: Ticket) -> bool:
        return self._tickets[ticket].done()

    def report(self) -> list[RankReport]:
        return [decode(RankReport, frame.payload) for frame in self._running.ask(Kind.REPORT, b"", Kind.REPORTED)]

    def health(self) -> str | None:
        return "not launched" if self._crew is None else self._crew.problem

    def stop(self) -> None:
        if self._crew is not None:
            if self._lockstep is not None:
                self._lockstep.leave(self._index, self._crew.problem)
            self._crew.stop(self.options.stop_timeout_s)
            self._end("stopped")

    @property
    def _running(self) -> Crew:
        if self._crew is None:
            raise EngineStoppedError("the ranks take no work: not launched")
        return self._crew

    def _meeting_place(self, crew: Crew) -> str:
        """Where the ranks find one another: ``file:PATH``, which nobody else may open, or for ranks on several machines
        ``tcp:HOST:PORT``, a store in this process at a port that the system chooses."""
        if crew.scratch is not None:
            return f"file:{crew.scratch / 'store'}"
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it without saying so

        host = self.parts["launcher"].host()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return f"tcp:{host}:{self._store.port}"

    def _take(self, frame: Frame) -> None:
        """A verdict has come, for the oldest message without one; or transfers have ended at a rank that gives none."""
        if frame.kind is Kind.TRANSFERS:
            with self._lock:
                self._ended += decode(list[EndedTransfer], frame.payload)
            return
        verdict = decode(Verdict, frame.payload)
        with self._lock:
            if not self._pending:
                raise ChannelClosedError("a rank answered what nobody had asked")
            oldest = self._pending.popleft()
        oldest.set_result(verdict)

    def _end(self, problem: str) -> None:
        """A rank is gone: whoever waits for a verdict is told."""
        with self._lock:
            waiting = list(self._pending)
            self._pending.clear()
        for verdict in waiting:
            verdict.set_exception(EngineStoppedError(problem))
        if self._lockstep is not None:
            self._lockstep.leave(self._index, problem)


def _merged(ready: Sequence[Ready]) -> WorkerInfo:
    """One answer for all ranks: the poorest one's memory, and each cache group as the rank that stores most of it."""
    infos = [rank.info for rank in ready]
    groups: dict[str, CacheSpec] = {}
    for info in infos:
        for spec in info.cache_specs:
            known = groups.get(spec.group, spec)
            largest = max(known, spec, key=lambda each: each.bytes_per_token)
            groups[spec.group] = replace(largest, layers=tuple(sorted({*known.layers, *spec.layers})))
    free = min(rank.info.free_bytes // rank.sharers for rank in ready)
    return replace(infos[0], cache_specs=tuple(groups.values()), free_bytes=free)
