"""Makes the decisions of a log again: the engine's host side is built as the log's header says, without its model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from hotswap.core.engine.clock import ManualClock
from hotswap.core.engine.setup import CacheRoom, EngineSetup, SwitchSetup
from hotswap.core.engine.switch import Switch
from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.interfaces.kv_transfer import HANDOFF, KVTransfer, TransferLayout
from hotswap.core.interfaces.kvcache import CachePlan, KVCacheManager
from hotswap.core.interfaces.scheduler import Scheduler
from hotswap.core.registry import Registry
from hotswap.core.testing.replay import Divergence, Replay
from hotswap.lab.decisions.log import Event, Log

Setup = TypeVar("Setup", EngineSetup, SwitchSetup)


@dataclass(frozen=True)
class Outcome:
    """What came of a replay. ``divergence``: the first decision that was another one. ``broke``: what was raised where
    the server did not. ``stopped``: why it went no further than event ``until``, though all was equal until then."""

    replica: str
    steps: int
    requests: int
    divergence: Divergence | None = None
    broke: str | None = None
    stopped: str | None = None
    until: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.divergence is None and self.broke is None


def replay(log: Log, registry: Registry | None = None) -> Outcome:
    """ConfigError where the log does not tell enough, or where a part that it names cannot be built here."""
    events = list(log.events())
    stopped, until = next((event for event in events if event["event"] == "switch_undone"), None), None
    if stopped is not None:
        until = _last_switch(events[: stopped["n"]])
        events = events[:until]
    again = build(log, events, registry or Registry())
    divergence = broke = None
    try:
        divergence = again.run()
    except ConfigError:  # what an exchange has put in place cannot be built here
        raise
    except Exception as error:  # whatever the parts raise when they are told what cannot be
        broke = f"behind step {again.loop.submitted}: {type(error).__name__}: {error}"
    why = None if stopped is None else (
        f"an exchange of parts was undone half way behind step {again.loop.submitted}: a replay goes no further")
    requests = sum(event["event"] == "arrival" for event in events)
    return Outcome(log.replica, again.steps, requests, divergence, broke, why, until, tuple(log.notes()))


def build(log: Log, events: list[Event], registry: Registry) -> Replay:
    """The parts that the header names, configured as they were."""
    setup = _read(EngineSetup, log, log.header.get("engine"), "the header's engine")
    scheduler: Scheduler = _part(log, setup, registry, Scheduler.kind)
    kv: KVCacheManager = _part(log, setup, registry, KVCacheManager.kind)
    plan = _configure(kv, setup.room)
    if plan.groups != setup.groups:
        raise ConfigError(
            f"{kv.label} divides the memory otherwise here, {_told(plan.groups)}, than in the log, "
            f"{_told(setup.groups)}: it is another version.", log.name)
    clock, transfer = ManualClock(), None
    if KVTransfer.kind in setup.components:
        transfer = _part(log, setup, registry, KVTransfer.kind)
        if HANDOFF in transfer.describe().offers:
            raise ConfigError(
                f"{transfer.label} gets pages from other engines, whose answers are in no log: only engines that "
                "neither hand over requests nor take them can be replayed.", log.name)
        transfer.configure(TransferLayout(setup.room.specs, plan, setup.ranks, clock.now, setup.model))
    return Replay(
        events, scheduler, kv, setup.limits, setup.depth, setup.chained, transfer, setup.ranks, clock,
        lambda event: _switch(log, event, registry))


def _switch(log: Log, event: Event, registry: Registry) -> Switch:
    """What an exchange has put in place."""
    setup = _read(SwitchSetup, log, event, f"event {event['n']}")
    scheduler = kv = None
    if Scheduler.kind in setup.replaced:
        scheduler = _part(log, setup, registry, Scheduler.kind)
    if KVCacheManager.kind in setup.replaced:
        kv = _part(log, setup, registry, KVCacheManager.kind)
        if setup.room is None:
            raise ConfigError(f"event {event['n']} does not say what the new kvcache was configured with.", log.name)
        _configure(kv, setup.room)
    workers = (lambda: None) if setup.workers else None
    return Switch(setup.limits, scheduler, kv, workers, workers, setup.keeps_pages)


def _last_switch(events: Sequence[Event]) -> int:
    """The number of the last event that begins an exchange."""
    return max(int(event["n"]) for event in events if event["event"] == "switch")


def _configure(kv: KVCacheManager, room: CacheRoom) -> CachePlan:
    return kv.configure(room.specs, room.num_bytes, room.constraints)


def _read(kind: type[Setup], log: Log, value: Any, where: str) -> Setup:
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        problem: dict[str, Any] = dict(error.errors(include_url=False)[0])
        place = ".".join(map(str, (where, *problem["loc"])))
        raise ConfigError(f"{place}: {problem['msg']}.", log.name) from error


def _part(log: Log, setup: EngineSetup | SwitchSetup, registry: Registry, kind: str) -> Any:
    try:
        ref = ComponentRef.model_validate(setup.components[kind])
    except KeyError:
        raise ConfigError(f"the log does not say which {kind} there was: no registry had built it.", log.name) from None
    return registry.build(kind, ref, f"{log.name}: engine.components.{kind}")


def _told(groups: Any) -> str:
    return ", ".join(f"{name}: {group.num_pages} pages of {group.page_size}" for name, group in groups.items())
