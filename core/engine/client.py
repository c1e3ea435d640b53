"""The engine as others see it: a thread around the loop. Every method may be called from any thread."""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from hotswap.core.blame import blame
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.errors import EngineStoppedError, LoopTimeoutError, QueueFullError
from hotswap.core.interfaces.deployment import EngineStatus, EventListener, Loads
from hotswap.core.request import FinishReason, OutputSink, Request, RequestOutput

logger = logging.getLogger(__name__)

HEALTH_CHECK_S = 1.0
"""How often an idle engine looks whether its workers live."""


class Engine:
    """Implements ``EngineClient``. Commands are taken between two turns of the loop, so the loop needs no lock.

    ``max_queue``: most requests that may wait. ``watchdog_s``: after so long without a collected step, while requests
    live, ``health`` is red and the state of the loop is logged once.
    """

    def __init__(
        self, loop: EngineLoop, *, max_queue: int | None = None, watchdog_s: float = 60.0,
        on_stop: Callable[[], None] | None = None, name: str = "",
    ) -> None:
        self.loop, self._max_queue, self._watchdog_s = loop, max_queue, watchdog_s
        self._on_stop = on_stop
        self._commands: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._queued = 0  # requests added that the loop has not seen
        self._draining = self._stopping = self._reported_stall = False
        self._ended = False  # under the lock: no command that comes after it would be taken
        self._failure: str | None = None
        self._idle = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"hotswap-loop{name and '-' + name}", daemon=True)
        self._thread.start()

    # EngineClient

    def add(self, request: Request, sink: OutputSink) -> None:
        with self._lock:
            if self._draining or self._stopping or self._ended:
                raise EngineStoppedError(self._failure or "the engine is shutting down and takes no new request")
            waiting = self._queued + self.loop.pool.waiting
            if self._max_queue is not None and waiting >= self._max_queue + self._free_slots():
                raise QueueFullError(
                    f"{waiting} requests wait already, the limit is {self._max_queue}; try again later")
            self._queued += 1
            self._idle.clear()
            self._commands.append(lambda: self._admit(request, sink))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        self._command(lambda: self.loop.abort(request_id))

    def loads(self) -> Loads:
        pool, usage = self.loop.pool, self.loop.parts.kv.usage()
        busy = usage.held + usage.fenced
        extra: dict[str, Any] = {}
        if self.loop.limits.lookahead:
            extra["speculation"] = self.loop.drafts.report()
        if self.loop.events:
            extra["events"] = dict(self.loop.events)
        if counters := self.loop.transfers.counters():
            extra["kv_transfer"] = dict(counters)
        return Loads(len(pool.running), pool.waiting + self._queued, busy / max(1, usage.total), extra=extra)

    def engines(self) -> Sequence[EngineStatus]:
        return ()

    def watch(self, listener: EventListener) -> None:
        self.call(lambda: self.loop.watch(listener))

    def reset(self) -> int:
        return int(self.call(self._reset))

    def _reset(self) -> int:
        if self.loop.parts.observers.active:
            self.loop.parts.observers.notify("hotswap_cache_reset", time=self.loop.clock.now())
        dropped = self.loop.parts.kv.reset() + self.loop.transfers.reset()
        self.loop.tell_events(self.loop.parts.kv)
        return dropped

    @property
    def failure(self) -> str | None:
        """Why the loop has ended for good, though nobody stopped it; None where it has not."""
        return self._failure

    def health(self) -> str | None:
        if self._failure:
            return self._failure
        if self._ended:
            return "the engine's loop has ended"
        if problem := self.loop.parts.executor.health():
            return problem
        if self.loop.last_plan_error:
            return self.loop.last_plan_error
        if (quiet := self._quiet_for()) > self._watchdog_s:
            return (f"no step was finished for {quiet:.0f} s while requests are waiting "
                    f"(watchdog: {self._watchdog_s:g} s)")
        return None

    def drain(self, timeout_s: float) -> None:
        with self._lock:
            self._draining = True
        if not self._idle.wait(timeout_s):
            self._command(lambda: self.loop.finish_all(FinishReason.ABORT, "the server is shutting down"))
            self._idle.wait(5.0)

    def stop(self) -> None:
        """End every request with "abort", then the loop and the workers. Bounded; safe to call twice."""
        with self._lock:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(10.0)

    # for those who share the engine's process

    def call(
        self, function: Callable[[], Any], timeout_s: float = 60.0, late: Callable[[Future[Any]], object] | None = None,
    ) -> Any:
        """Run ``function`` on the loop's thread between two turns; its result or exception is the caller's.

        EngineStoppedError where the loop has ended. LoopTimeoutError where it does not come to it in time: then it does
        not happen later; or has begun and not ended, which ``begun`` says: then ``late`` is called with what it came to
        once it has ended, on the loop's thread or at once.
        """
        answer = Future[Any]()
        if not self._command(partial(_answer, answer, function)):
            raise EngineStoppedError(self._failure or "the engine's loop has ended")
        wait([answer], timeout_s)
        problem = f"the engine's loop did not answer within {timeout_s:g} s"
        if answer.cancel():
            raise LoopTimeoutError(f"{problem}, and it will not happen", begun=False)
        if not answer.done():
            if late is not None:
                answer.add_done_callback(late)
            raise LoopTimeoutError(f"{problem}, though it has begun with it", begun=True)
        try:
            return answer.result()
        finally:
            del answer  # which the traceback of an exception that it holds would hold in turn

    def _free_slots(self) -> int:
        return max(0, self.loop.limits.max_running - len(self.loop.pool.running))

    def _quiet_for(self) -> float:
        return self.loop.clock.now() - self.loop.progress_at if self.loop.pool.states else 0.0

    def _command(self, command: Callable[[], None]) -> bool:
        """Whether the loop will take it."""
        with self._lock:
            if self._ended:
                return False
            self._commands.append(command)
            self._wake.notify()
        return True

    def _admit(self, request: Request, sink: OutputSink) -> None:
        with self._lock:
            self._queued -= 1
        try:
            self.loop.add(request, sink)
        except Exception as error:
            logger.exception("request %s was not admitted", request.id)
            sink(RequestOutput(request.id, [], "", finish_reason=FinishReason.ERROR, error=str(error)))

    # the thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_commands()
                if not self.loop.turn():
                    self._rest()
            self._end(FinishReason.ABORT, "the engine was stopped")
        except BaseException as error:
            logger.exception("the engine's loop has ended")
            self._failure = f"the engine's loop has ended: {blame(error)}"
            self._end(FinishReason.ERROR, self._failure)
        finally:
            self._idle.set()
            if (trial := self.loop.lifecycle.trial) is not None:
                trial.let_go()
            self.loop.parts.executor.stop()
            self.loop.transfers.close()
            if self._on_stop:
                self._on_stop()

    def _end(self, reason: FinishReason, error: str) -> None:
        """Take what was commanded so far and nothing more; every request gets its last output."""
        with self._lock:
            self._ended = True
        self._take_commands()
        self.loop.finish_all(reason, error)

    def _take_commands(self) -> None:
        while self._commands:
            try:
                self._commands.popleft()()
            except Exception:
                logger.exception("a command to the engine failed")

    def _rest(self) -> None:
        """Nothing to do: sleep until a command comes, the scheduler wants to plan again, or it is time to look
        whether all is well."""
        pool = self.loop.pool
        if pool.states and self._quiet_for() > self._watchdog_s and not self._reported_stall:
            self._reported_stall = True
            logger.error("no progress for %.0f s: %s", self._quiet_for(), pool.snapshot())
        if problem := self.loop.parts.executor.health():
            raise EngineStoppedError(problem)  # nobody waits for a step, and so nobody else would notice
        timeout = min(self._watchdog_s / 2, HEALTH_CHECK_S)
        if (wakeup := self.loop.next_wakeup()) is not None:
            timeout = min(timeout, max(0.0, wakeup - self.loop.clock.now()))
        with self._lock:
            if not pool.states and not self._commands:
                self._reported_stall = False
                self._idle.set()
            if not self._commands and not self._stopping:
                self._wake.wait(timeout)


def _answer(answer: Future[Any], function: Callable[[], Any]) -> None:
    """On the loop's thread: what ``function`` comes to, unless nobody waits any more."""
    if not answer.set_running_or_notify_cancel():
        return
    try:
        answer.set_result(function())
    except Exception as error:
        answer.set_exception(error)
    finally:
        del answer  # as in ``call``
