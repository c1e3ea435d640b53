"""Putting other parts into a loop, on its thread and between two turns: all of them, or none.

What the new parts need to know is told again: a scheduler gets every request that waits, a KV manager takes over tables
and cached pages, workers get every request that runs as if it were new. Where pages cannot stay, requests wait again
and are computed anew, as after a suspension.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from hotswap.core.blame import blame
from hotswap.core.engine.context import Limits
from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.pool import RUNNING, WAITING, RequestState
from hotswap.core.engine.setup import CacheRoom, SwitchSetup, references
from hotswap.core.errors import EngineStoppedError, ExchangeError, KVInvariantError
from hotswap.core.interfaces.kvcache import KVCacheManager
from hotswap.core.interfaces.messages import NewRequest, Resume, StepMessage
from hotswap.core.interfaces.scheduler import Scheduler

logger = logging.getLogger(__name__)

TRANSFERS_S = 10.0
"""How long an exchange waits for transfers of pages that are under way."""


@dataclass(frozen=True)
class Switch:
    """What is put in place; None leaves a part as it is. ``workers`` has the ranks take up other parts or other pages,
    and ``back`` undoes it: they know no request after either. ``keeps_pages``: the tensors stay, and what is in them
    may be used; else ``kv`` is given, or what runs gives its pages up. ``room``: what ``kv`` was configured with, for
    observers.
    """

    limits: Limits
    scheduler: Scheduler | None = None
    kv: KVCacheManager | None = None
    workers: Callable[[], None] | None = None
    back: Callable[[], None] | None = None
    keeps_pages: bool = True
    room: CacheRoom | None = None

    def setup(self) -> SwitchSetup:
        new = [part for part in (self.scheduler, self.kv) if part is not None]
        return SwitchSetup(
            tuple(part.kind for part in new), references(new), self.limits, self.room, self.keeps_pages,
            self.workers is not None)


@dataclass
class Effect:
    """``pause_s``: how long no step ran, or could have been planned, for the exchange. Requests that kept their pages
    under another KV manager or other workers are ``handed_over``; the ``recomputed`` lost them."""

    pause_s: float = 0.0
    handed_over: int = 0
    recomputed: int = 0


@dataclass
class _Work:
    """What has been done so far: ``undo`` in the order of doing; ``again`` are requests that wait and did not before,
    so far as a scheduler knows."""

    loop: EngineLoop
    switch: Switch
    effect: Effect = field(default_factory=Effect)
    undo: list[Callable[[], object]] = field(default_factory=list)
    again: list[RequestState] = field(default_factory=list)
    adopted: bool = False
    """The new KV manager has taken over everything that the old one had."""


def carry_out(loop: EngineLoop, switch: Switch) -> Effect:
    """Exchange. Where anything raises, everything is as before, but that some requests may be computed again.

    EngineStoppedError where what was done cannot be undone either: the loop ends in its next turn."""
    work, begun, old, observers = _Work(loop, switch), loop.clock.now(), loop.parts.kv, loop.parts.observers
    if observers.active:
        observers.notify("hotswap_switch_begins", switch=switch.setup(), time=begun)
    try:
        if switch.kv is not None or switch.workers is not None or not switch.keeps_pages:
            begun = drain(loop)
            _exchange_drained(work)
        work.undo.append(partial(setattr, loop.lifecycle, "limits", loop.limits))
        loop.lifecycle.limits = switch.limits
        if switch.scheduler is not None:
            work.undo.append(partial(setattr, loop.parts, "scheduler", loop.parts.scheduler))
            loop.parts.scheduler = switch.scheduler
        _let_children_go(work)
        _readmit(work)
    except BaseException as error:
        if observers.active:
            observers.notify("hotswap_switch_undone", time=loop.clock.now())
        _undo(work, error)
        raise
    work.undo.clear()  # it knows the work, which knows the loop: a ring
    if switch.kv is not None and not (work.adopted and _reuses(old) and _reuses(switch.kv)):
        _forget_pages(loop, old)
    work.effect.pause_s = loop.clock.now() - begun
    return work.effect


def _undo(work: _Work, cause: BaseException) -> None:
    loop = work.loop
    try:
        while work.undo:
            work.undo.pop()()
    except Exception as error:  # half old, half new: nothing could be computed with it
        loop.broken = f"an exchange failed ({blame(cause)}) and could not be undone: {blame(error)}"
        raise EngineStoppedError(loop.broken) from error
    for state in work.again:
        if state.status is WAITING:
            loop.lifecycle.admit(state)


def drain(loop: EngineLoop) -> float:
    """Collect every step in flight, and let the transfers of pages end. Returns when the last step with rows had ended.
    ExchangeError where transfers take too long."""
    while loop.in_flight:
        loop.collect()
    begun = loop.clock.now()
    while loop.transfers.pending:
        if loop.clock.now() > begun + TRANSFERS_S:
            raise ExchangeError(f"a transfer of pages did not end within {TRANSFERS_S:g} s; try again later")
        loop.submit_operations(StepMessage(loop.submitted + 1))
        loop.collect()
    return begun


def _exchange_drained(work: _Work) -> None:
    loop, switch, parts = work.loop, work.switch, work.loop.parts
    running, old = list(loop.pool.running.values()), loop.parts.kv
    for state in running:
        state.commit(old)  # what a successor must be told
    if switch.workers is not None:
        work.undo.append(partial(_undo_workers, work, running))
        switch.workers()
    # Workers that have forgotten everything can only be told of pages by a manager that knows whose they are.
    tells = switch.workers is None or "tables" in (switch.kv or old).describe().offers
    keeps = switch.keeps_pages and tells
    if switch.kv is not None:
        keeps = work.adopted = keeps and _hand_over(old, switch.kv)
        work.undo.append(partial(setattr, parts, "kv", old))
        parts.kv = switch.kv
        parts.kv.keep_events(loop.hears_pages)
    if not keeps:
        if switch.kv is None:
            _release(old, running)
        else:
            work.undo.append(partial(_release, old, running))
        _recompute(work, running)
        work.effect.recomputed = len(running)
        return
    work.effect.handed_over = len(running)
    if switch.workers is not None:
        _announce(loop, running)
    for state in running:
        state.commit_due = 0


def _undo_workers(work: _Work, running: list[RequestState]) -> None:
    """The old KV manager is in its place already, with the tables that it had, but for those that were given up."""
    assert work.switch.back is not None
    work.switch.back()
    loop, still = work.loop, [state for state in running if state.status is RUNNING]
    if work.switch.keeps_pages and "tables" in loop.parts.kv.describe().offers:
        _announce(loop, still)
    else:  # what lies in the pages is not what the index says
        _release(loop.parts.kv, still)
        loop.parts.kv.reset()
        _recompute(work, still)


def _hand_over(old: KVCacheManager, new: KVCacheManager) -> bool:
    """Whether ``new`` has taken over everything that ``old`` had."""
    if not all("handover" in kv.describe().offers for kv in (old, new)):
        return False
    try:
        new.adopt(old.handover())
    except KVInvariantError as error:
        logger.warning("%s does not take over the pages of %s, so that what runs is computed again: %s",
                       new.label, old.label, error)
        return False
    return True


def _reuses(kv: KVCacheManager) -> bool:
    return "prefix_reuse" in kv.describe().offers


def _forget_pages(loop: EngineLoop, old: KVCacheManager) -> None:
    """Whoever was told what is cached must hear that it is gone."""
    try:
        old.reset()
        loop.tell_events(old)
    except Exception:  # it is gone, and this was why
        logger.exception("%s could not say which pages it had", old.label)


def _release(kv: KVCacheManager, states: Sequence[RequestState]) -> None:
    for state in states:
        kv.release(state.id, ())


def _recompute(work: _Work, running: Sequence[RequestState]) -> None:
    """Requests that have given up their pages wait again."""
    lifecycle = work.loop.lifecycle
    for state in running:
        lifecycle.pool.pause(state, WAITING)
        if state.on_worker:
            lifecycle.drops.append(state.id)
        state.on_worker, state.computed, state.verified = False, 0, 0
        work.again.append(state)


def _announce(loop: EngineLoop, running: Sequence[RequestState]) -> None:
    """Tell workers that have forgotten everything of the requests that run, with all their tokens and pages."""
    message = StepMessage(loop.submitted + 1)
    for state in running:
        request = state.request
        message.new.append(NewRequest(
            state.id, list(state.tokens), state.prompt_length, request.sampling, request.seed, request.eos_token_ids,
            request.bad_words_token_ids))
        message.resumes.append(Resume(state.id, state.computed))
        message.grants.append((state.id, loop.parts.kv.table(state.id)))
    if running:
        loop.submit_operations(message)
        loop.collect()


def _let_children_go(work: _Work) -> None:
    """Children wait for their parent only while it runs and the parts at work let them share with it."""
    pool, forks = work.loop.pool, work.loop.parts.forks
    for state in pool.states.values():
        if not forks and state.status is WAITING:
            state.parent = None
        if state.held and not (forks and state.status is RUNNING):
            work.again += [child for child in state.held if child.status is WAITING]
            state.held = []


def _readmit(work: _Work) -> None:
    """Tell a new scheduler of every request that waits, the old one of those that did not until now."""
    loop, waiting = work.loop, list(work.again)
    if work.switch.scheduler is not None:
        held = {child.id for state in loop.pool.states.values() for child in state.held}
        waiting = [state for state in loop.pool.states.values() if state.status is WAITING and state.id not in held]
    for state in sorted(waiting, key=lambda state: state.sequence):
        loop.parts.scheduler.admit(state)
