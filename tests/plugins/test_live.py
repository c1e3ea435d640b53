"""The live components of an engine, and what observers can and cannot do to it."""

import inspect
import logging
import timeit

import pytest

from hotswap.core.errors import BrokenComponentError
from hotswap.core.hooks import HookSpecs, Observer, hookimpl
from hotswap.core.interfaces.component import ComponentOptions, RequestOptions
from hotswap.core.interfaces.scheduler import QueuePolicy
from hotswap.core.live import LiveComponents, LiveRequestOptions, ObserverHub


class Watcher(Observer):
    def __init__(self):
        super().__init__()
        self.seen = []

    @property
    def expensive(self):
        raise AssertionError("a property is no hook and must not be evaluated")

    @hookimpl
    def hotswap_engine_stopped(self, time):
        self.seen.append(time)


class Faulty(Observer):
    @hookimpl
    def hotswap_engine_stopped(self):
        raise ValueError("oops")

    @hookimpl
    def hotswap_request_arrived(self):
        raise AssertionError("a silenced observer must not be called")


class Order(QueuePolicy):
    class Options(ComponentOptions):
        weight: int = 2

    def key(self, view, now):
        return (view.sequence,)


class Holder(Watcher):
    def __init__(self):
        super().__init__()
        self.parts = {"policy": Order(), "others": [Order()], "none": None}


def test_with_no_listener_the_hub_is_inactive_and_a_call_costs_next_to_nothing():
    hub = ObserverHub()
    assert not hub.active
    assert min(timeit.repeat(lambda: hub.notify("hotswap_engine_stopped", time=1.0), number=1000, repeat=5)) < 5e-3


def test_a_hook_is_told_what_it_asks_for_until_its_component_is_removed():
    live, watcher = LiveComponents(), Watcher()
    live.add(watcher)
    assert live.observers.active
    assert live.observers.listens("hotswap_engine_stopped")
    assert not live.observers.listens("hotswap_request_arrived")
    live.observers.notify("hotswap_engine_stopped", time=3.0)
    live.remove(watcher)
    live.remove(watcher)
    live.observers.notify("hotswap_engine_stopped", time=4.0)
    assert watcher.seen == [3.0]
    assert not live.observers.active


def test_an_observer_that_raises_is_logged_once_counted_and_silenced_and_reaches_nobody(caplog):
    live, watcher = LiveComponents(), Watcher()
    live.add(Faulty())
    live.add(watcher)
    with caplog.at_level(logging.ERROR):
        for time in (1.0, 2.0):
            live.observers.notify("hotswap_engine_stopped", time=time)
    live.observers.notify("hotswap_request_arrived", request=None, time=3.0)
    assert watcher.seen == [1.0, 2.0]
    assert live.observers.failures == 1
    assert len(caplog.records) == 1
    assert "observer:Faulty raised in hotswap_engine_stopped" in caplog.text
    silenced = {item["name"]: item["silenced"] for item in live.listing()}
    assert silenced == {"Faulty": "hotswap_engine_stopped: ValueError: oops", "Watcher": None}


def test_parts_are_registered_and_removed_with_their_holder_and_equal_names_are_numbered():
    live, holder = LiveComponents(), Holder()
    assert live.add(holder) == "observer:Holder"
    assert [(item["kind"], item["name"]) for item in live.listing()] == [
        ("observer", "Holder"), ("queue_policy", "Order"), ("queue_policy", "Order#2"),
    ]
    assert live.listing()[1]["options"] == {"weight": 2}
    assert live.listing()[1]["contract"] == "queue_policy/1"
    live.remove(holder)
    assert live.listing() == []


@pytest.mark.parametrize("hook", ["hotswap_engine_stoped", "hotswap_engine_stopped"])
def test_a_hook_that_does_not_fit_its_specification_leaves_nothing_behind(hook):
    def method(self, tme):
        raise AssertionError("never called")

    method.__name__ = hook
    good = hookimpl(lambda self: None)
    broken = type("Broken", (Observer,), {"hotswap_engine_started": good, hook: hookimpl(method)})
    live = LiveComponents()
    with pytest.raises(BrokenComponentError, match=f"observer:Broken.*{hook}"):
        live.add(broken())
    assert live.listing() == []
    assert not live.observers.active
    live.add(Watcher())
    live.observers.notify("hotswap_engine_stopped", time=1.0)


def test_every_hook_says_in_a_sentence_when_it_is_called_and_names_no_argument_that_it_lacks():
    hooks = {name: method for name, method in vars(HookSpecs).items() if name.startswith("hotswap_")}
    assert len(hooks) >= 10
    for name, method in hooks.items():
        documentation = inspect.getdoc(method)
        assert documentation and documentation.endswith("."), name
        arguments = inspect.signature(method).parameters
        for quoted in documentation.split("``")[1::2]:
            assert quoted.split(".")[0] in arguments, f"{name} speaks of {quoted}"


class Asking(Order):
    class RequestOptions(RequestOptions):
        soon: bool = False


def test_what_requests_may_ask_of_components_is_what_is_live_at_the_moment():
    engine, fronts, component = LiveComponents(), LiveComponents(), Asking()
    found = LiveRequestOptions((engine, fronts))
    engine.add(Order())
    assert not found and "Asking" not in found
    for live in (engine, fronts):
        live.add(component)
        assert dict(found) == {component.name: Asking.RequestOptions}
        live.remove(component)
    assert not found


def test_while_a_component_is_replaced_whoever_looks_finds_the_old_one_or_the_new_one(monkeypatch):
    live, old, new, seen = LiveComponents(), Asking(), Asking(), []
    found, forget = LiveRequestOptions((live,)), live.observers.forget

    def look(label):
        forget(label)
        assert not live._manager.has_plugin(label), "it has just been removed"
        seen.append((dict(found), list(live), [item["name"] for item in live.listing()]))

    live.add(old)
    monkeypatch.setattr(live.observers, "forget", look)
    live.replace([old], [new])
    assert seen == [({"Asking": Asking.RequestOptions}, [old], ["Asking"])]
    assert list(live) == [new]
    assert [item["name"] for item in live.listing()] == ["Asking"]
