"""What every observer must do. The whole test file of an observer::

    class TestMine(ObserverSuite):
        def make_observer(self):
            return MyObserver()
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_origin

import pytest

from hotswap.core.engine.loop import EngineLoop
from hotswap.core.engine.switch import Switch, carry_out
from hotswap.core.hooks import HookSpecs, Observer
from hotswap.core.interfaces.scheduler import StepPlan
from hotswap.core.live import LiveComponents, ObserverHub
from hotswap.core.testing.rig import Rig, build, make_rig
from hotswap.core.testing.wrapping import Wrapped

HOOKS = [name for name in vars(HookSpecs) if name.startswith("hotswap_")]

SELDOM = (
    "hotswap_pages_leaked", "hotswap_transfers_ended", "hotswap_component_exchanged", "hotswap_cache_reset")
"""Hooks that the kit's traffic does not lead to, and that are called with values made up for them."""

FOR_SERVERS = ("hotswap_server_routes",)
"""Hooks that the kit does not call: there is no server."""


def _example(annotation: Any) -> Any:
    """A value of a hook's argument."""
    kind = get_origin(annotation) or annotation
    return {str: "scheduler", int: 1, float: 1.0}.get(kind, {"one": 1})


class _Unsteady(Wrapped):
    """Plans nothing in its fifth plan, and raises in its tenth."""

    plans = 0

    def plan(self, ctx: Any) -> Any:
        self.plans += 1
        if self.plans == 5:
            ctx.hold(ctx.running[0].id, "planted")
            return StepPlan()
        if self.plans == 10:
            raise RuntimeError("planted")
        return self.inner.plan(ctx)


class _Refusing(Wrapped):
    """Cannot take over from another scheduler."""

    def admit(self, view: Any) -> None:
        raise RuntimeError("planted")


def _exchange(loop: EngineLoop) -> None:
    """Of the scheduler, while requests wait: one that is undone, and one that stays."""
    with pytest.raises(RuntimeError, match="planted"):
        carry_out(loop, Switch(loop.limits, _Refusing(build("scheduler", "chunked"))))
    carry_out(loop, Switch(loop.limits, build("scheduler", "continuous")))


class ObserverSuite:
    """Subclass it and provide ``make_observer``."""

    def make_observer(self) -> Observer:
        raise NotImplementedError("return a new instance of the observer under test")

    @contextmanager
    def watched(self) -> Iterator[ObserverHub]:
        """What calls an observer's hooks, until its engine has stopped."""
        components = LiveComponents()
        components.add(self.make_observer())
        try:
            yield components.observers
        finally:
            components.observers.notify("hotswap_engine_stopped", time=9.0)
        assert not components.observers.silenced, f"a hook raised: {components.observers.silenced}"

    def test_its_hooks_exist_are_marked_and_take_what_they_are_given(self) -> None:
        observer = self.make_observer()
        components = LiveComponents()
        components.add(observer)  # raises where an argument is none of the hook's
        named = [name for name in dir(type(observer)) if name.startswith("hotswap_")]
        assert not set(named) - set(HOOKS), f"there is no hook {sorted(set(named) - set(HOOKS))}; there are {HOOKS}"
        heard = [name for name in HOOKS if components.observers.listens(name)]
        assert set(named) == set(heard), f"{sorted(set(named) - set(heard))} is not called: mark it with @hookimpl"
        assert heard, "it implements no hook"

    def test_a_busy_engine_does_not_make_it_raise(self) -> None:
        """Drafts, a shortage with suspensions, aborts, a plan that fails, exchanges, prompts that come back."""
        with self.watched() as hub:
            self._traffic(hub)
            for hook in SELDOM:
                hub.notify(hook, **{
                    name: _example(parameter.annotation)
                    for name, parameter in inspect.signature(vars(HookSpecs)[hook]).parameters.items()
                    if name != "self"})

    def test_it_changes_nothing_that_it_watches(self) -> None:
        alone = self._traffic(ObserverHub())
        with self.watched() as hub:
            watched = self._traffic(hub)
            assert _decisions(watched) == _decisions(alone), "the engine's decisions differ"
            assert watched.client.outputs == alone.client.outputs, "clients get other outputs"

    def test_each_engine_has_one_of_its_own(self) -> None:
        """Two engines of one process that run at the same time."""
        with self.watched() as first, self.watched() as second:
            self._traffic(first)
            self._traffic(second)

    def _traffic(self, hub: ObserverHub) -> Rig:
        rig = make_rig(
            num_pages=1 + 30, max_model_len=96, max_batch_tokens=24, max_running=3, depth=2, lookahead=2, observers=hub)
        rig.loop.parts.scheduler = _Unsteady(rig.loop.parts.scheduler)
        rig.loop.parts.kv.keep_events(True)
        rig.start_observers({"model": {"name": "toy"}})
        for i in range(6):
            rig.add(f"r{i}", [1 + i % 2] * 30, 30)
        for turn in range(14):
            rig.loop.turn()
            rig.clock.advance(0.01)
            if turn == 6:
                rig.loop.abort("r5")  # which waits
        rig.loop.abort(next(iter(rig.loop.pool.running)))
        _exchange(rig.loop)
        rig.run()
        assert [ending for i in range(6) for ending in rig.client.endings(f"r{i}")].count("abort") == 2
        return rig


def _decisions(rig: Rig) -> list[Any]:
    return [(message.step_id, message.rows, message.suspensions, message.drops, message.resumes)
            for message in rig.executor.messages]
