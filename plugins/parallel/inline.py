"""One worker on a thread of the engine's own process: one device, no collectives."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from hotswap.core.errors import ConfigError, EngineStoppedError
from hotswap.core.interfaces.component import Component, ComponentOptions, Description
from hotswap.core.interfaces.kvcache import CachePlan
from hotswap.core.interfaces.messages import StepMessage, Verdict
from hotswap.core.interfaces.parallel import (
    Executor,
    Meeting,
    RankPlan,
    RankReport,
    Take,
    Ticket,
    Worker,
    WorkerFactory,
    WorkerInfo,
)

logger = logging.getLogger(__name__)


class _Job(NamedTuple):
    run: Callable[[Worker], Any]
    result: Future[Any]


class InlineExecutor(Executor):
    """One worker on one thread of this process. Choose it for one device: it costs one queue hop a step.

    The worker is built on its thread, because torch's thread count is a property of the calling thread. The loop plans
    the next step while the worker runs this one; torch's kernels release the interpreter lock.
    """

    class Options(ComponentOptions):
        stop_timeout_s: Annotated[float, Field(gt=0)] = 10.0
        """How long ``stop`` waits for the step that runs. After it the thread is abandoned (it is a daemon)."""

    options: Options

    def __init__(self, options: Any = None, parts: Any = None) -> None:
        super().__init__(options, parts)
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._gate = Lock()  # nothing enters the queue after it was drained for the last time
        self._closed: str | None = "not launched"
        self._thread: Thread | None = None
        self._tickets: dict[Ticket, Future[Verdict]] = {}
        self._next: Ticket = 0

    def launch(self, factory: WorkerFactory, plan: RankPlan, meeting: Meeting | None = None) -> WorkerInfo:
        if plan.world_size != 1:
            raise ConfigError(
                f"the inline executor runs one rank, the parallel strategies ask for {plan.world_size}; "
                "use an executor that starts processes, or shard over fewer ranks", "parallel")
        if self._thread is not None:
            raise RuntimeError("launch was called twice")
        self._closed = None
        built: Future[None] = Future()
        self._thread = Thread(target=self._serve, args=([factory], plan, built), name="hotswap-worker", daemon=True)
        self._thread.start()
        built.result()
        info: WorkerInfo = self._put(lambda worker: worker.info()).result()
        return info

    def allocate(self, plan: CachePlan) -> None:
        self._put(lambda worker: worker.allocate(plan)).result()

    def describe(self) -> Description:
        return Description(offers=frozenset({"exchange"}))

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        worker: Worker = self._put(lambda worker: worker).result()
        return worker.prepare(parts)

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        self._put(lambda worker: worker.exchange(plan, keeps_pages, take)).result()

    def settle(self) -> None:
        self._put(lambda worker: worker.settle()).result()

    def submit(self, message: StepMessage) -> Ticket:
        self._next += 1
        self._tickets[self._next] = self._put(lambda worker: _execute(worker, message))
        return self._next

    def collect(self, ticket: Ticket) -> Verdict:
        return self._tickets.pop(ticket).result()

    def report(self) -> list[RankReport]:
        return [self._put(lambda worker: worker.report()).result()]

    def done(self, ticket: Ticket) -> bool:
        return self._tickets[ticket].done()

    def health(self) -> str | None:
        if self._closed is None and not (self._thread and self._thread.is_alive()):
            return "the worker thread has ended"
        return self._closed

    def stop(self) -> None:
        with self._gate:
            thread, self._thread = self._thread, None
            if thread is None:
                return
            self._closed = self._closed or "stopped"
            self._jobs.put(None)
        thread.join(self.options.stop_timeout_s)
        if thread.is_alive():
            self._closed = f"the worker did not stop within {self.options.stop_timeout_s} s and was abandoned"

    def _put(self, run: Callable[[Worker], Any]) -> Future[Any]:
        result: Future[Any] = Future()
        with self._gate:
            if self._closed is not None:
                raise EngineStoppedError(f"the worker takes no work: {self._closed}")
            self._jobs.put(_Job(run, result))
        return result

    def _serve(self, factories: list[WorkerFactory], plan: RankPlan, built: Future[None]) -> None:
        """The thread: build the worker, run jobs in order, close. An exception belongs to its job; anything harder
        (SystemExit) ends the thread, and every job that waits is told."""
        try:
            worker = factories.pop()(plan, 0)  # which holds parts that may be exchanged
        except BaseException as error:
            self._closed = f"the worker could not be built: {error}"
            built.set_exception(error)
            return
        built.set_result(None)
        try:
            while (job := self._jobs.get()) is not None and self._closed is None:
                self._run(worker, job)
        finally:
            self._refuse(job)
            worker.close()

    def _run(self, worker: Worker, job: _Job) -> None:
        try:
            job.result.set_result(job.run(worker))
        except Exception as error:
            job.result.set_exception(error)
        except BaseException as error:
            with self._gate:
                self._closed = f"the worker thread died: {type(error).__name__}: {error}"
                self._jobs.put(None)
            job.result.set_exception(EngineStoppedError(self._closed))

    def _refuse(self, job: _Job | None) -> None:
        """Every job still in the queue fails; nothing can enter it any more."""
        while True:
            if job is not None:
                job.result.set_exception(EngineStoppedError(f"the worker ended before this step: {self._closed}"))
            try:
                job = self._jobs.get_nowait()
            except Empty:
                return


def _execute(worker: Worker, message: StepMessage) -> Verdict:
    """A worker that raises has failed this step; the thread and the engine go on."""
    try:
        return worker.execute(message)
    except Exception as error:
        logger.exception("step %d failed", message.step_id)
        return Verdict(message.step_id, error=f"{type(error).__name__}: {error}")
