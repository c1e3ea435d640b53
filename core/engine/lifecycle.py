"""How a request reaches the scheduler, how it ends, and how everything that it holds comes back, exactly once."""

import logging
from collections.abc import Callable
from typing import Any

from hotswap.core.blame import blame
from hotswap.core.engine.clock import Clock
from hotswap.core.engine.context import Limits
from hotswap.core.engine.outputs import last_words
from hotswap.core.engine.parts import Parts
from hotswap.core.engine.pool import RUNNING, WAITING, RequestPool, RequestState
from hotswap.core.engine.transfers import Transfers
from hotswap.core.engine.trial import Trial
from hotswap.core.request import FinishReason

logger = logging.getLogger(__name__)


class Lifecycle:
    """What the loop does with a request outside its steps. Of one loop, on its thread."""

    def __init__(self, parts: Parts, limits: Limits, clock: Clock, transfers: Transfers) -> None:
        self.parts, self.limits, self.clock, self.transfers = parts, limits, clock, transfers
        self.pool = RequestPool()
        self.drops: list[str] = []
        """Requests that the workers must forget, to be told with the next step."""
        self.scheduler_error: str | None = None
        """The newest thing that went wrong in the scheduler."""
        self.trial: Trial | None = None
        """As long as parts that have just been exchanged are new."""

    def admit(self, state: RequestState) -> None:
        """A request that its scheduler will not take would wait for ever: it ends. One on trial will soon be gone."""
        taken = self.guard("admit", lambda: self.parts.scheduler.admit(state))
        if not taken and self.trial is None and state.id in self.pool.states:
            self.finish(state, FinishReason.ERROR, self.scheduler_error)

    def let_children_go(self, state: RequestState) -> None:
        """To the scheduler: to share what their parent has computed, or as any other where it does not run."""
        held, state.held = state.held, []
        for child in held:
            if child.status is WAITING:
                self.admit(child)

    def finish(self, state: RequestState, reason: FinishReason, error: str | None = None) -> None:
        """End a request that does not end by its own tokens. Its client is told, whatever a component raises."""
        output = last_words(state, reason, error)
        try:
            output.handoff = self.retire(state, reason)
        finally:
            self.deliver(state, output)

    def retire(self, state: RequestState, reason: FinishReason) -> Any:
        """Give back everything the request holds, exactly once. Returns what a KV transfer has for the client."""
        handle = None
        if state.status is RUNNING:
            state.commit(self.parts.kv)
            fences, (fence, handle) = self.pool.fences(), self.transfers.finished(state, self.parts.kv, reason)
            fences.update(name for name in (fence, self.transfers.detach(state)) if name is not None)
            self.parts.kv.release(state.id, fences, retain=reason is not FinishReason.ERROR)
        self.transfers.forget(state)
        if state.on_worker:
            self.drops.append(state.id)
        self.pool.remove(state)
        state.finish_reason, state.finished_at = reason, self.clock.now()
        self.guard("drop", lambda: self.parts.scheduler.drop(state.id))
        self.let_children_go(state)
        if self.parts.observers.active:
            self.parts.observers.notify(
                "hotswap_request_finished", request=state, reason=reason.value, time=state.finished_at)
        return handle

    def deliver(self, state: RequestState, output: Any) -> None:
        try:
            state.sink(output)
        except Exception:
            logger.exception("the sink of request %s raised; the request goes on without it", state.id)

    def guard(self, method: str, call: Callable[[], object]) -> bool:
        """Whether ``call`` went well. What a scheduler raises outside ``plan`` is logged by name, and ends nothing."""
        try:
            call()
        except Exception as error:
            self.scheduler_error = blame(error, self.parts.scheduler, method)
            logger.exception("%s", self.scheduler_error)
            if self.trial is not None:
                self.trial.fail(self.scheduler_error)
            return False
        return True

    def give_back_leaks(self) -> None:
        """Nothing lives, so nothing may be held. Whoever holds a page is a defect: say who, and serve on."""
        kv = self.parts.kv
        if not kv.usage().held:
            return
        owners = kv.owners()
        logger.error("pages are held although nothing runs, and are given back; owners and pages: %s", owners)
        for request_id in owners:
            kv.release(request_id, (), retain=False)
        if self.parts.observers.active:
            self.parts.observers.notify("hotswap_pages_leaked", owners=owners, time=self.clock.now())
