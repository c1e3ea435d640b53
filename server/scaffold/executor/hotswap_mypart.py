"""An executor: runs the workers of one engine loop."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Annotated, Any

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


class MyPart(Executor):
    """One worker on one thread of this process.

    Choose it ... (say when: `hotswap plugins show executor:mypart` prints this). One that runs several ranks offers
    "ranks", and starts their processes with a launcher.
    """

    class Options(ComponentOptions):
        stop_timeout_s: Annotated[float, Field(gt=0)] = 10.0
        """How long ``stop`` waits for the step that runs."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        super().__init__(options, parts)
        self.problem: str | None = "not launched"
        self.thread: ThreadPoolExecutor | None = None
        self.tickets: dict[Ticket, Future[Verdict]] = {}

    def describe(self) -> Description:
        """"exchange": parts of the worker can be exchanged while it serves. Without it, leave out three methods."""
        return Description(offers=frozenset({"exchange"}))

    def launch(self, factory: WorkerFactory, plan: RankPlan, meeting: Meeting | None = None) -> WorkerInfo:
        """Build the worker where it will run. What it raises ends the start: a ConfigError with exit code 2."""
        if plan.world_size != 1:
            raise ConfigError(f"{self.name} runs one rank, the strategies ask for {plan.world_size}", "parallel")
        self.thread = ThreadPoolExecutor(1, "hotswap-worker")
        self.worker: Worker = self.thread.submit(factory, plan, 0).result()
        self.problem = None
        return self.worker.info()

    def allocate(self, plan: CachePlan) -> None:
        self._call(self.worker.allocate, plan).result()

    def prepare(self, parts: Mapping[str, Component]) -> WorkerInfo:
        """On the caller's thread, which is not the steps': they go on meanwhile."""
        return self.worker.prepare(parts)

    def exchange(self, plan: CachePlan, keeps_pages: bool, take: Take) -> None:
        self._call(self.worker.exchange, plan, keeps_pages, take).result()

    def settle(self) -> None:
        self._call(self.worker.settle).result()

    def submit(self, message: StepMessage) -> Ticket:
        """Must not wait: the loop plans the next step meanwhile."""
        self.tickets[message.step_id] = self._call(self._execute, message)
        return message.step_id

    def collect(self, ticket: Ticket) -> Verdict:
        try:
            return self.tickets.pop(ticket).result()
        except BaseException as error:  # the worker has ended in this step, or before it
            self.problem = self.problem or f"the worker died: {type(error).__name__}: {error}"
            raise EngineStoppedError(self.problem) from error

    def done(self, ticket: Ticket) -> bool:
        return self.tickets[ticket].done()

    def health(self) -> str | None:
        return self.problem

    def report(self) -> list[RankReport]:
        return [self._call(self.worker.report).result()]

    def stop(self) -> None:
        if self.thread is None:
            return
        self.problem = self.problem or "stopped"
        for step in self.tickets.values():
            step.cancel()
        last = [self.thread.submit(self.worker.close)] if hasattr(self, "worker") else []
        self.thread.shutdown(wait=False)
        wait(last, self.options.stop_timeout_s)
        self.thread = None

    def _call(self, run: Any, *arguments: Any) -> Future[Any]:
        if self.problem is not None or self.thread is None:
            raise EngineStoppedError(f"the worker takes no work: {self.problem}")
        return self.thread.submit(run, *arguments)

    def _execute(self, message: StepMessage) -> Verdict:
        """A step that raises has failed; the engine goes on. What is harder than an Exception ends the worker."""
        try:
            return self.worker.execute(message)
        except Exception as error:
            return Verdict(message.step_id, error=f"{type(error).__name__}: {error}")
        except BaseException as error:
            self.problem = f"the worker died: {type(error).__name__}: {error}"
            raise
