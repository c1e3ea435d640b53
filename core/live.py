"""The components of one running engine, held by pluggy, and the hub through which observers are told what happens."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import pluggy

from hotswap.core.errors import BrokenComponentError
from hotswap.core.hooks import HookSpecs
from hotswap.core.interfaces.component import Component, RequestOptions

log = logging.getLogger(__name__)


class ObserverHub:
    """Calls hooks, one implementation after the other. One that raises is logged, counted, and silenced for good; its
    exception reaches neither the engine nor another observer."""

    def __init__(self) -> None:
        self.failures = 0
        """How many components were silenced since the start."""
        self.silenced: dict[str, str] = {}
        """Why, per label, as long as the component is registered."""
        self.active = False
        """Whether anybody listens to anything: ask it before gathering what a hook is told."""
        self._listeners: dict[str, list[tuple[str, Callable[..., object], tuple[str, ...]]]] = {
            name: [] for name in vars(HookSpecs) if name.startswith("hotswap_")
        }

    def listens(self, hook: str) -> bool:
        """Whether anybody implements ``hook``."""
        return bool(self._listeners[hook])

    def notify(self, hook: str, **arguments: Any) -> None:
        """Call every implementation of ``hook`` with those of ``arguments`` that it asks for."""
        for label, function, names in tuple(self._listeners[hook]):
            try:
                function(*[arguments[name] for name in names])
            except Exception as error:
                self.forget(label)
                self.failures += 1
                self.silenced[label] = f"{hook}: {type(error).__name__}: {error}"
                log.exception("%s raised in %s and is not called any more", label, hook)

    def forget(self, label: str) -> None:
        """Stop calling a component."""
        self.silenced.pop(label, None)
        for hook, listeners in self._listeners.items():
            self._listeners[hook] = [listener for listener in listeners if listener[0] != label]
        self.active = any(self._listeners.values())

    def listen(self, label: str, hook: str, function: Callable[..., object], names: tuple[str, ...]) -> None:
        """Call ``function`` with the arguments ``names`` whenever ``hook`` is notified."""
        self._listeners[hook].append((label, function, names))
        self.active = True


class LiveComponents:
    """What an engine is made of, under ``kind:name``. Methods marked with ``hookimpl`` are called from then on.

    One thread at a time changes it; others may look meanwhile, and see it as it was before the change, or after it.
    """

    def __init__(self) -> None:
        self.observers = ObserverHub()
        self._shown: tuple[tuple[str, Component], ...] = ()
        """By label: what those see who look."""
        self._manager = _PluginManager("hotswap")
        self._manager.add_hookspecs(HookSpecs)
        # A manager hangs in rings of its own: what it holds would live on until Python looks for those.
        weakref.finalize(self, _let_go, self._manager).atexit = False

    def add(self, component: Component) -> str:
        """Register a component and its parts; returns its label. Of two alike the second is called ``kind:name#2``;
        a component that is registered already stays as it is.

        Raises BrokenComponentError, and registers nothing, where a hook does not match its specification.
        """
        label = self._register(component)
        self._show()
        return label

    def remove(self, component: Component) -> None:
        """Unregister a component and its parts; a no-op for what is not registered."""
        self._unregister(component)
        self._show()

    def replace(self, old: Iterable[Component], new: Iterable[Component]) -> None:
        """Remove ``old`` and add ``new``, as one change: nobody who looks finds the place of one empty."""
        for component in old:
            self._unregister(component)
        for component in new:
            self._register(component)
        self._show()

    def _show(self) -> None:
        self._shown = tuple(cast(list[tuple[str, Component]], self._manager.list_name_plugin()))

    def _register(self, component: Component) -> str:
        if known := self._manager.get_name(component):
            return known
        label = self._free_label(component.label)
        try:
            self._manager.register(component, label)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(component):
                self._manager.unregister(component)
            raise BrokenComponentError(f"{component.label} has a hook that does not fit: {error}") from error
        for caller in self._manager.get_hookcallers(component) or []:
            for implementation in caller.get_hookimpls():
                if implementation.plugin is component:
                    self.observers.listen(
                        label, caller.name, implementation.function, tuple(implementation.argnames))
        for part in _components(component.parts.values()):
            self._register(part)
        return label

    def _unregister(self, component: Component) -> None:
        label = self._manager.get_name(component)
        if label is None:
            return
        self._manager.unregister(component)
        self.observers.forget(label)
        for part in _components(component.parts.values()):
            self._unregister(part)

    def __iter__(self) -> Iterator[Component]:
        return iter([component for _, component in self._shown])

    def listing(self) -> list[dict[str, Any]]:
        """Every live component, as JSON: kind, name, distribution, version, contract, options, and why its hooks are
        not called any more (None where they are)."""
        listed = []
        for label, component in self._shown:
            origin = component.origin
            listed.append({
                "kind": component.kind,
                "name": label.partition(":")[2],
                "distribution": origin.distribution if origin else None,
                "version": origin.version if origin else None,
                "contract": component.contract,
                "options": component.options.model_dump(mode="json"),
                "silenced": self.observers.silenced.get(label),
            })
        return listed

    def _free_label(self, wanted: str) -> str:
        label, count = wanted, 1
        while self._manager.has_plugin(label):
            count += 1
            label = f"{wanted}#{count}"
        return label


class LiveRequestOptions(Mapping[str, type[RequestOptions]]):
    """By the name of a live component that reads a part of a request's ``extra``: the model of that part."""

    def __init__(self, lives: Sequence[LiveComponents]) -> None:
        self._lives = lives

    def __getitem__(self, name: str) -> type[RequestOptions]:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())

    def _now(self) -> dict[str, type[RequestOptions]]:
        return {
            component.name: component.RequestOptions
            for live in self._lives for component in live if component.RequestOptions is not None}


class _PluginManager(pluggy.PluginManager):
    """Looks for hooks among methods only: pluggy would evaluate a component's properties."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> Any:
        if not callable(getattr(type(plugin), name, None)):
            return None
        return super().parse_hookimpl_opts(plugin, name)


def _let_go(manager: pluggy.PluginManager) -> None:
    for plugin in manager.get_plugins():
        manager.unregister(plugin)


def _components(values: Any) -> list[Component]:
    """The components among a component's parts; a part may be a list of them, or absent."""
    flat: list[Component] = []
    for value in values:
        if isinstance(value, (list, tuple)):
            flat += _components(value)
        elif value is not None:
            flat.append(value)
    return flat
