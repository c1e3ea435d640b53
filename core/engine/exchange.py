"""Exchanging parts of engines that serve: checked as a whole, prepared beside serving, put in place between two steps.

One exchange at a time. Of several engines one after the other exchanges its parts, each wholly or not at all.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from hotswap.core.blame import blame
from hotswap.core.config.changes import SIZES_OF_THE_CACHE, Difference, changed, differences
from hotswap.core.config.check import check_config
from hotswap.core.config.components import Components
from hotswap.core.config.limits import AttentionNeeds
from hotswap.core.engine.assembly import BuiltEngine, Made, cache_room, divide_memory
from hotswap.core.engine.context import Limits
from hotswap.core.engine.setup import CacheRoom
from hotswap.core.engine.switch import Effect, Switch, carry_out
from hotswap.core.engine.trial import Trial, TriedKV
from hotswap.core.errors import (
    ConfigError,
    EngineStoppedError,
    ExchangeError,
    ExchangeUnderWayError,
    LoopTimeoutError,
)
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import Component, Exchange
from hotswap.core.interfaces.kvcache import KVCacheManager
from hotswap.core.interfaces.parallel import Executor, Take, WorkerInfo
from hotswap.core.interfaces.speculator import Speculator
from hotswap.core.live import LiveComponents
from hotswap.core.registry import Registry

logger = logging.getLogger(__name__)

LOOP_TIMEOUT_S = 600.0
"""For the exchange itself: steps are collected, graphs captured."""
TRIAL_TIMEOUT_S = 10.0
"""How long the answer waits for the first steps of the new parts."""
IDLE_S = 0.5
"""Of these, while nothing runs that could take a step."""
_POLL_S = 0.01


@dataclass(frozen=True)
class Report:
    """What one engine has exchanged. ``proven``: the new parts have come through their first steps; False: nothing ran
    that could prove them yet."""

    replica: str
    parts: tuple[Difference, ...]
    effect: Effect = field(default_factory=Effect)
    proven: bool = False
    notes: tuple[str, ...] = ()

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "replica": self.replica, "exchanged": [part._asdict() for part in self.parts],
            "pause_ms": round(1000 * self.effect.pause_s, 3), "handed_over": self.effect.handed_over,
            "recomputed": self.effect.recomputed, "proven": self.proven, "notes": list(self.notes)}


class Exchanger:
    """For the engines of one process. Its methods may be called from any thread. ``needs``: of their model, by which
    ``attention: auto`` chooses."""

    def __init__(
        self, engines: Sequence[BuiltEngine], registry: Registry, needs: AttentionNeeds, max_model_len: int,
    ) -> None:
        self._engines, self._registry, self._needs, self._max_model_len = engines, registry, needs, max_model_len
        self._lock = threading.Lock()

    def exchange(self, sets: Iterable[str], replica: str | None = None) -> list[Report]:
        """Exchange what ``sets`` ("scheduler.policy=fair_share") name, in every engine or in the one called
        ``replica``.

        ConfigError: refused, and nothing has changed. ExchangeError: a new part has failed, and the old one is back; or
        one of several engines has ended over it; or ranks or loop have not answered in time. ExchangeUnderWayError:
        another is under way, if only on the loop of one engine. EngineStoppedError: of what was chosen, nothing runs.
        """
        sets, reports = list(sets), list[Report]()
        if not self._lock.acquire(blocking=False):
            raise ExchangeUnderWayError("another exchange is under way; try again when it has ended")
        try:
            chosen = [built for built in self._engines if replica in (None, built.replica.name)]
            if not chosen:
                names = ", ".join(repr(built.replica.name) for built in self._engines)
                raise ConfigError(f"there is no engine {replica!r}; there are {names}", "replica")
            begun, ended = self._begin(chosen, sets)
            for one in begun:
                try:
                    reports.append(one.carry_out())
                except (ConfigError, ExchangeError, EngineStoppedError) as error:
                    # Where one of several engines ends, the others serve: that is an ExchangeError.
                    alone = (ConfigError, EngineStoppedError) if len(begun) == 1 else (ConfigError,)
                    if isinstance(error, alone) and not reports:
                        raise
                    raise ExchangeError(f"{one.built.prefix}{error}", reports) from error
            notes = tuple(f"engine {name!r} has ended, and was left out: {why}" for name, why in ended.items())
            return [replace(reports[0], notes=(*reports[0].notes, *notes)), *reports[1:]]
        finally:
            self._lock.release()

    def _begin(
        self, chosen: Iterable[BuiltEngine], sets: Sequence[str],
    ) -> tuple[list["EngineExchange"], dict[str, str]]:
        """The exchanges of those that run, and by name why the others have ended. EngineStoppedError where all have."""
        begun, ended = list[EngineExchange](), dict[str, str]()
        for built in chosen:
            try:
                begun.append(EngineExchange(built, sets, self._registry, self._needs, self._max_model_len))
            except EngineStoppedError as error:
                ended[built.replica.name] = str(error)
        if not begun:
            raise EngineStoppedError(next(iter(ended.values())))
        return begun, ended


class EngineExchange:
    """One engine's exchange. ConfigError from the start for everything that can be refused without loading anything.

    The old combination is built anew beside the new one: it comes back where that fails, since what the old parts know
    is out of date by then.
    """

    def __init__(
        self, built: BuiltEngine, sets: Sequence[str], registry: Registry, needs: AttentionNeeds, max_model_len: int,
    ) -> None:
        self.built, self.old, self._max_model_len = built, built.made, max_model_len
        if (failure := built.engine.failure) is not None:
            raise EngineStoppedError(failure)
        if built.exchanging:
            raise ExchangeUnderWayError(
                f"{built.prefix}an exchange that took too long is still under way; try again once the log says what it "
                "has come to")
        self._resolved = changed(self.old.resolved, sets)
        config = self._resolved.config.model_copy(update={"parallel": self.old.config.parallel})
        self._target = check_config(config, registry, built.around, needs)
        self._spare = check_config(self.old.config, registry, built.around, needs)
        self._parts = (*differences(self.old.parts, self._target), *_sizes(self.old, config, self._target))
        self._sections = {part.path.partition(".")[0] for part in self._parts}
        for section in self._sections:
            self._refuse(section)
        self._new = replace(self.old, resolved=self._resolved, config=config)
        self._keeps_pages, self._in_place = True, False

    def _refuse(self, section: str) -> None:
        old, new = self.old.parts.built[section], self._target.built[section]
        if new.exchangeable is Exchange.NEVER:  # nobody has named it: "auto" chooses by what the others need
            raise ConfigError(
                f"the new combination needs {new.label} instead of {old.label}, which cannot be exchanged while "
                "serving; start again with it", section)
        LiveComponents().add(new)  # its hooks fit

    def carry_out(self) -> Report:
        """ConfigError: the old parts serve on. ExchangeError: they do, too, unless the message says that the loop is
        still at it, or that they have not come back yet. EngineStoppedError: the engine has ended."""
        name, notes = self.built.replica.name, (*self._resolved.warnings, *self._target.notes)
        if not self._parts:
            return Report(name, (), proven=True, notes=("these parts serve already", *notes))
        self._prepare()
        self.built.exchanging, left_to_the_loop = True, False
        try:
            trial, effect = self.built.engine.call(self._switch, LOOP_TIMEOUT_S, self._late)
        except LoopTimeoutError as error:
            left_to_the_loop = error.begun
            raise ExchangeError(f"{error}; what it comes to is logged" if error.begun else str(error)) from error
        except (ConfigError, ExchangeError, EngineStoppedError):
            raise
        except Exception as error:
            raise ExchangeError(f"the old parts serve on: {blame(error)}") from error
        finally:
            if not left_to_the_loop:
                self._conclude()
        return Report(name, self._parts, effect, self._await(trial), notes)

    def _late(self, answer: Future[Any]) -> None:
        """The loop is through with it, and nobody waits any more. What is let go may take long: not on its thread."""
        if (error := answer.exception()) is not None:
            logger.error("%san exchange that took too long has failed: %s", self.built.prefix, blame(error))
        threading.Thread(target=self._conclude, name="hotswap-conclude", daemon=True).start()

    def _conclude(self) -> None:
        """The loop is through with it, or will not begin; only now may anything be taken away from it."""
        if not self._in_place:
            self._let_go()
        self.built.exchanging = False

    # beside serving

    def _prepare(self) -> None:
        """Load what the ranks need, and divide the memory as it will be. ConfigError."""
        old, on_workers = self.old, self._on_workers()
        if on_workers:
            self._require_exchange()
            self._new = replace(self._new, info=self._bounded(self.built.preparing.load(on_workers)))
        try:
            self._divide()
            if self._changes_workers:
                self._require_exchange()
            if not self._keeps_pages and self.built.engine.loop.transfers.component is not None:
                raise ConfigError(
                    f"pages would lie elsewhere than {old.parts.kv_transfer.label} has told others; keep the layout of "
                    "the pages and the size of the cache, or start again with the new parts", "kv_transfer")
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        """What was prepared, and will not be put in place."""
        if self._on_workers():
            self.built.preparing.let_go()

    def _bounded(self, info: WorkerInfo) -> WorkerInfo:
        """What is free is measured while the engine serves: pages that nobody has touched yet count twice, and other
        processes come and go. So the room stays what it was while the same is stored in it, and never grows beyond
        what was free at the start."""
        same = info.cache_specs == self.old.info.cache_specs
        most = self.old.info.free_bytes if same else min(info.free_bytes, self.built.free_bytes)
        return replace(info, free_bytes=most)

    def _divide(self) -> None:
        old, new, most = self.old, self._new, self._max_model_len
        plan = divide_memory(new.config, self._target, new.info, most)
        before = divide_memory(old.config, self._spare, old.info, most)
        same = plan.groups == before.groups == old.cache_plan.groups
        self._keeps_pages = same and shares_pages(old.parts.attention, self._target.attention)
        self._new = replace(new, cache_plan=replace(plan, transfer=old.cache_plan.transfer))

    def _room(self, made: Made) -> CacheRoom:
        return cache_room(made.config, made.info, self._max_model_len)

    def _on_workers(self) -> dict[str, Component]:
        """Those of the new parts that live on the ranks, by kind."""
        found = [self._target.built[section] for section in self._sections]
        return {part.kind: part for part in found if part.exchangeable is Exchange.WORKERS}

    @property
    def _executor(self) -> Executor:
        return self.old.parts.executor

    @property
    def _replaced(self) -> set[str]:
        """The config's sections whose parts are other ones afterwards."""
        return self._sections if self._keeps_pages else self._sections | {"kvcache"}

    @property
    def _changes_workers(self) -> bool:
        return bool(self._on_workers()) or not self._keeps_pages

    def _require_exchange(self) -> None:
        if "exchange" not in self._executor.describe().offers:
            raise ConfigError(
                f"{self._executor.label} does not exchange parts or pages of its workers; start again with the new "
                "ones", "execution")
        if self.built.spans:
            raise ConfigError(
                "engines that compute every step together do not exchange parts or pages of their workers; start "
                "again with the new ones", "parallel")
        self.built.preparing.check_free()

    def _await(self, trial: Trial) -> bool:
        """Whether the first steps have gone well, as far as there are any. ExchangeError where they have not, and
        EngineStoppedError where the engine has ended over them."""
        engine = self.built.engine
        loop = engine.loop
        now = busy = loop.clock.now()
        until = now + TRIAL_TIMEOUT_S
        while not (trial.over.wait(_POLL_S) or engine.failure) and now < until and now < busy + IDLE_S:
            now = loop.clock.now()
            busy = now if loop.pool.states or trial.problem else busy
        over = trial.over.is_set()
        if (failure := engine.failure) is not None:
            raise EngineStoppedError(failure)
        if trial.problem is not None:
            back = "are back" if over else "have not come back yet"
            raise ExchangeError(f"the new parts failed in their first steps, the old ones {back}: {trial.problem}")
        return over

    # on the loop's thread

    def _switch(self) -> tuple[Trial, Effect]:
        self._end_trial_before()
        loop, before, switch = self.built.engine.loop, self.built.engine.loop.limits, self._to_new()
        try:
            effect = carry_out(loop, switch)
        except Exception:
            if self._changes_workers and loop.broken is None:
                self._executor.settle()  # the new ones are what the last exchange, the one back, took away
            raise
        self._in_place = True
        self._record(self._new, self._target)
        self._tell(effect)
        return self._begin_trial(switch, before), effect

    def _end_trial_before(self) -> None:
        """ExchangeError where parts of the exchange before this one have failed, so that it is being undone."""
        lifecycle = self.built.engine.loop.lifecycle
        if lifecycle.trial is not None:
            if not lifecycle.trial.cut_short():
                raise ExchangeError("an exchange before this one is being undone; try again")
            lifecycle.trial = None
        if self.built.made is not self.old:
            raise ExchangeError("an exchange before this one has just been undone; try again")

    def _to_new(self) -> Switch:
        target, info = self._target, self._new.info
        return Switch(
            replace(self.built.engine.loop.limits, lookahead=info.lookahead, reuse_tail=info.reuse_tail),
            target.scheduler if "scheduler" in self._replaced else None,
            target.kvcache if "kvcache" in self._replaced else None,
            self._on_ranks(self._new, Take.PREPARED if self._on_workers() else Take.SAME),
            self._on_ranks(self.old, Take.FORMER), self._keeps_pages, self._room(self._new))

    def _to_old(self, limits: Limits, lost: bool) -> Switch:
        """``lost``: what is in the pages cannot be trusted."""
        spare = self._spare
        return Switch(
            limits, spare.scheduler if "scheduler" in self._replaced else None,
            spare.kvcache if "kvcache" in self._replaced else None, self._on_ranks(self.old, Take.FORMER),
            self._on_ranks(self._new, Take.FORMER), self._keeps_pages and not lost, self._room(self.old))

    def _on_ranks(self, made: Made, take: Take) -> Callable[[], None] | None:
        """Has every rank take up parts, with the pages of ``made``; None where nothing changes there."""
        if not self._changes_workers:
            return None
        return partial(self._executor.exchange, made.cache_plan, self._keeps_pages, take)

    def _begin_trial(self, switch: Switch, before: Limits) -> Trial:
        loop, proposer = self.built.engine.loop, self._on_workers().get(Speculator.kind)
        trial = loop.lifecycle.trial = Trial(
            partial(self._settle, switch.kv), partial(self._revert, before), kv=switch.kv is not None,
            workers=self._changes_workers, speculator="" if proposer is None else proposer.label)
        if switch.kv is not None:
            loop.parts.kv = TriedKV.around(switch.kv, trial)
        return trial

    def _settle(self, kv: KVCacheManager | None) -> None:
        """The new parts have come through their trial. ``kv``: the KV manager among them."""
        if kv is not None:
            self.built.engine.loop.parts.kv = kv
        if self._changes_workers:
            self._executor.settle()

    def _revert(self, limits: Limits, problem: str, lost: bool) -> None:
        """They have not: the old ones come back, with the ``limits`` that they had."""
        undone = carry_out(self.built.engine.loop, self._to_old(limits, lost))
        if self._changes_workers:
            self._executor.settle()
        self._record(self.old, self._spare)
        self._tell(undone, problem)

    def _record(self, made: Made, source: Components) -> None:
        """What the engine is made of now: the sections that are replaced come from ``source``."""
        now = self.built.made.parts.built
        new = {section: source.built[section] for section in self._replaced}
        self.built.components.replace([now[section] for section in new], new.values())
        self.built.made = replace(made, parts=replace(self.old.parts, built={**now, **new}))

    def _tell(self, effect: Effect, problem: str = "") -> None:
        """The log and the observers. ``problem``: why the old parts are back."""
        loop = self.built.engine.loop
        now = loop.clock.now()
        for part in self._parts:
            old, new = (part.new, part.old) if problem else (part.old, part.new)
            logger.log(
                logging.ERROR if problem else logging.INFO,
                "%s%s: %s %s %s; pause %.1f ms, %d requests handed over, %d computed again%s", self.built.prefix,
                part.path, old, "gives way again to" if problem else "is exchanged for", new, 1000 * effect.pause_s,
                effect.handed_over, effect.recomputed, f", since {problem}" if problem else "")
            if loop.parts.observers.active:
                loop.parts.observers.notify(
                    "hotswap_component_exchanged", path=part.path, kind=part.kind, old=old, new=new,
                    options=part.options, pause=effect.pause_s, handed_over=effect.handed_over,
                    recomputed=effect.recomputed, problem=problem, time=now)


def shares_pages(old: AttentionBackend, new: AttentionBackend) -> bool:
    """Whether ``new`` can go on with the pages that ``old`` has written."""
    if old.origin == new.origin and old.options == new.options:
        return True
    before, after, axes = old.support(), new.support(), old.page_axes()
    # Bound without a layout that it is told, a backend takes the one that it prefers.
    alike = axes == new.page_axes() and axes in before.layouts and axes in after.layouts
    return alike and (before.leaves_clean_pages or not after.needs_clean_pages)


def _sizes(old: Made, config: Any, target: Components) -> list[Difference]:
    """Core's own keys that divide the memory anew."""
    label = target.kvcache.label
    return [
        Difference(path, target.kvcache.kind, f"{label} {before}", f"{label} {after}", {})
        for path in sorted(SIZES_OF_THE_CACHE)
        if (before := getattr(old.config.kvcache, path.partition(".")[2])) != (
            after := getattr(config.kvcache, path.partition(".")[2]))]
