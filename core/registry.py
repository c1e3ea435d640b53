"""Finds components through entry points, and builds those that the config names.

Listing reads metadata and imports nothing. Loading imports one module: a component that nobody selected has no effect,
however broken it is. Whatever is wrong with a selected one is a ConfigError that names it and its distribution.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from importlib import metadata
from typing import Any, NamedTuple

from pydantic import ValidationError

from hotswap.core.errors import (
    AmbiguousComponentError,
    BrokenComponentError,
    ConfigError,
    ContractMismatchError,
    UnknownComponentError,
)
from hotswap.core.explain import explain, join, nearest, raise_problems
from hotswap.core.hooks import Observer
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import Component, ComponentOptions, ComponentRef, Origin, Part, RequestOptions
from hotswap.core.interfaces.deployment import Deployment, Router
from hotswap.core.interfaces.kv_transfer import KVTransfer
from hotswap.core.interfaces.kvcache import EvictionPolicy, KVCacheManager
from hotswap.core.interfaces.logits import LogitsProcessor
from hotswap.core.interfaces.model import Model
from hotswap.core.interfaces.operators import Operators
from hotswap.core.interfaces.parallel import Executor, Launcher, ShardStrategy
from hotswap.core.interfaces.quantization import Quantization
from hotswap.core.interfaces.scheduler import QueuePolicy, Scheduler
from hotswap.core.interfaces.speculator import Speculator
from hotswap.core.interfaces.workload import Workload

PREFIX = "hotswap."
CONTRACT_GROUP = PREFIX + "contract"

INTERFACES: tuple[type[Component], ...] = (
    Scheduler, QueuePolicy, KVCacheManager, EvictionPolicy, AttentionBackend, Speculator, LogitsProcessor, Model,
    Quantization, Operators, Executor, ShardStrategy, Launcher, Deployment, Router, KVTransfer, Observer, Workload,
)
"""One a kind. A kind without a written contract cannot be registered."""


class Status(StrEnum):
    """AVAILABLE: not imported yet. AMBIGUOUS: two distributions offer the name. BROKEN: tried, and failed."""

    AVAILABLE = "available"
    LOADED = "loaded"
    INCOMPATIBLE = "incompatible"
    AMBIGUOUS = "ambiguous"
    BROKEN = "broken"


class Listing(NamedTuple):
    """A component as ``hotswap plugins`` shows it. ``contract`` is "unknown" where the distribution declares none."""

    kind: str
    name: str
    distribution: str
    version: str
    contract: str
    status: Status
    reason: str


@dataclass(frozen=True)
class Entry:
    """A component as metadata describes it. ``value`` is "module:Class"; ``declared`` is the contract version that the
    distribution's group ``hotswap.contract`` gives for the kind ("v1"), None where it gives none."""

    kind: str
    name: str
    distribution: str
    version: str
    value: str
    declared: str | None

    @property
    def ours(self) -> bool:
        """Whether hotswap itself brings it."""
        return same_distribution(self.distribution, "hotswap")

    def __str__(self) -> str:
        return f"{self.kind} '{self.name}' of package {self.distribution} {self.version} ({self.value})"


class Registry:
    """The installed components. ``kinds`` are the interfaces that this host knows, one class a kind."""

    def __init__(self, interfaces: Iterable[type[Component]] = INTERFACES) -> None:
        self._interfaces: Mapping[str, type[Component]] = {cls.kind: cls for cls in interfaces}
        self._loaded: dict[Entry, type[Component]] = {}
        self._failed: dict[Entry, tuple[Status, str]] = {}

    @property
    def kinds(self) -> list[str]:
        return list(self._interfaces)

    @cached_property
    def entries(self) -> list[Entry]:
        """Every component of every distribution, sorted. Read once from the metadata on ``sys.path``."""
        found = [entry for distribution in _distributions() for entry in _entries(distribution)]
        return sorted(found, key=lambda e: (e.kind, e.name, e.distribution))

    def listing(self, kind: str | None = None) -> list[Listing]:
        """What is installed, of one kind or of all; imports nothing."""
        return [
            Listing(e.kind, e.name, e.distribution, e.version, self._contract(e), *self._status(e))
            for e in self.entries if kind in (None, e.kind)
        ]

    def names(self, kind: str) -> list[str]:
        """The names of a kind's components, each once."""
        return sorted({e.name for e in self.entries if e.kind == kind})

    def find(self, kind: str, name: str, path: str = "") -> Entry:
        """The one entry that ``name`` or ``distribution:name`` selects. Imports nothing.

        Raises UnknownComponentError or AmbiguousComponentError.
        """
        distribution, _, bare = name.rpartition(":")
        named = [e for e in self.entries if e.kind == kind and e.name == bare]
        found = [e for e in named if not distribution or same_distribution(e.distribution, distribution)]
        if len(found) == 1:
            return found[0]
        if found:
            choices = " or ".join(f"'{e.distribution}:{e.name}'" for e in found)
            packages = " and ".join(f"{e.distribution} {e.version}" for e in found)
            raise AmbiguousComponentError(f"{kind} '{bare}' is offered by {packages}: choose {choices}.", path)
        raise UnknownComponentError(self._unknown(kind, name, named), path)

    def load(self, kind: str, name: str, path: str = "") -> type[Component]:
        """Import the class that ``name`` or ``distribution:name`` selects, after its contract has been checked.

        Raises UnknownComponentError, AmbiguousComponentError, ContractMismatchError or BrokenComponentError.
        """
        entry = self.find(kind, name, path)
        if entry not in self._loaded:
            try:
                self._loaded[entry] = self._import(entry, path)
            except BrokenComponentError as error:
                self._failed[entry] = Status.BROKEN, error.message
                raise
            except ContractMismatchError as error:
                self._failed[entry] = Status.INCOMPATIBLE, error.message
                raise
        return self._loaded[entry]

    def build(self, kind: str, ref: ComponentRef, path: str, known: Mapping[str, str] | None = None) -> Any:
        """An instance of the component that ``ref`` selects, with its options validated and its parts built.

        ``path`` is where the config names it; ``known`` maps keys that a mistyped option may have meant to their
        config paths. Raises ConfigError, as do :meth:`load` and the component itself.
        """
        entry, cls = self.find(kind, ref.use, path), self.load(kind, ref.use, path)
        options = self.options(kind, ref, path, known)
        parts = {name: self._part(part, value, join(path, name)) for name, part, value in parts_of(options)}
        try:
            component = cls(options, parts)
        except ConfigError as error:
            raise ConfigError(error.message, join(path, error.path) if error.path else path) from error
        except Exception as error:
            raise BrokenComponentError(f"{entry} cannot be built: {_cause(error)}", path) from error
        component.origin = Origin(kind, entry.name, entry.distribution, entry.version, cls.contract)
        return component

    def options(
        self, kind: str, ref: ComponentRef, path: str, known: Mapping[str, str] | None = None,
    ) -> ComponentOptions:
        """The validated options of the component that ``ref`` selects."""
        model = self.load(kind, ref.use, path).Options
        try:
            return model.model_validate(ref.options)
        except ValidationError as error:
            raise_problems(explain(error, model, path, known))
            raise

    def _part(self, part: Part, value: Any, path: str) -> Any:
        if isinstance(value, ComponentRef):
            return self.build(part.kind, value, path)
        if isinstance(value, (list, tuple)):
            return [self._part(part, item, join(path, i)) for i, item in enumerate(value)]
        return None

    def _import(self, entry: Entry, path: str) -> type[Component]:
        if refusal := self._refusal(entry):
            raise ContractMismatchError(f"{entry} {refusal}. It has not been imported.", path)
        interface = self._interfaces[entry.kind]
        try:
            cls = metadata.EntryPoint(entry.name, entry.value, PREFIX + entry.kind).load()
        except (Exception, SystemExit) as error:  # whatever a stranger's module does
            raise BrokenComponentError(f"{entry} cannot be imported: {_cause(error)}", path) from error
        if not (isinstance(cls, type) and issubclass(cls, interface)):
            wanted = f"{interface.__module__}.{interface.__qualname__}"
            raise BrokenComponentError(f"{entry} is not a subclass of {wanted}.", path)
        if refusal := self._unaccepted(entry.kind, cls.contract):
            raise ContractMismatchError(f"{entry} {refusal} (its class says contract = '{cls.contract}').", path)
        models: dict[str, tuple[Any, type]] = {"Options": (cls.Options, ComponentOptions)}
        if cls.RequestOptions is not None:
            models["RequestOptions"] = cls.RequestOptions, RequestOptions
        for name, (model, base) in models.items():
            if not (isinstance(model, type) and issubclass(model, base)):
                wanted = f"{base.__module__}.{base.__qualname__}"
                raise BrokenComponentError(f"{entry} has {name} that are no subclass of {wanted}.", path)
        if inspect.isabstract(cls):
            missing = ", ".join(sorted(cls.__abstractmethods__))
            raise BrokenComponentError(f"{entry} does not define {missing}.", path)
        return cls

    def _status(self, entry: Entry) -> tuple[Status, str]:
        if refusal := self._refusal(entry):
            return Status.INCOMPATIBLE, refusal
        if entry in self._failed:
            return self._failed[entry]
        others = [e for e in self.entries if (e.kind, e.name) == (entry.kind, entry.name) and e is not entry]
        if others:
            packages = ", ".join(e.distribution for e in others)
            return Status.AMBIGUOUS, f"also in {packages}: choose '{entry.distribution}:{entry.name}'"
        return (Status.LOADED if entry in self._loaded else Status.AVAILABLE), ""

    def _contract(self, entry: Entry) -> str:
        if entry in self._loaded:
            return self._loaded[entry].contract
        return _declared(entry) or entry.declared or "unknown"

    def _refusal(self, entry: Entry) -> str:
        """Why metadata alone rules an entry out; empty where it does not."""
        if entry.kind not in self._interfaces:
            return f"is of a kind that this hotswap does not know; it knows {', '.join(self._interfaces)}"
        if entry.declared is None:
            return ""
        said = f"its entry-point group {CONTRACT_GROUP} says {entry.kind} = '{entry.declared}'"
        contract = _declared(entry)
        if contract is None:
            number = self._interfaces[entry.kind].contract.rpartition("/")[2]
            return f"names no contract: {said}; write \"v{number}\", the number alone, and install it again"
        refusal = self._unaccepted(entry.kind, contract)
        return refusal and f"{refusal} ({said})"

    def _unaccepted(self, kind: str, contract: str) -> str:
        """Why the host refuses a contract; it accepts its own version N of the kind, and N - 1."""
        current = int(self._interfaces[kind].contract.rpartition("/")[2])
        accepted = [f"{kind}/{version}" for version in (current - 1, current) if version > 0]
        if contract in accepted:
            return ""
        host = f"hotswap {metadata.version('hotswap')}"
        return f"was written for contract {contract}, but {host} accepts {' and '.join(accepted)}"

    def no_kind(self, kind: str) -> str:
        """What to say of a kind that there is not."""
        near = nearest(kind, self.kinds)
        hint = f" Did you mean '{near}'?" if near else ""
        return f"there is no kind '{kind}'.{hint} The kinds are {', '.join(self.kinds)}."

    def _unknown(self, kind: str, name: str, elsewhere: list[Entry]) -> str:
        if kind not in self._interfaces:
            return self.no_kind(kind)
        if elsewhere:
            offered = ", ".join(f"'{e.distribution}:{e.name}'" for e in elsewhere)
            return f"no {kind} is called '{name}'; there is {offered}."
        near = nearest(name, self.names(kind))
        hint = f" Did you mean '{near}'?" if near else ""
        other = sorted({e.kind for e in self.entries if e.name == name})
        note = f" ('{name}' is a {' and a '.join(other)}.)" if other else ""
        return f"no {kind} is called '{name}'.{hint} Installed: {', '.join(self.names(kind)) or 'none'}.{note}"


def _distributions() -> list[metadata.Distribution]:
    """Each distribution that offers components, once: the one that Python would import."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if PREFIX not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name = distribution.metadata["Name"]
        if name and _normal(name) not in found:
            found[_normal(name)] = metadata.distribution(name)
    return list(found.values())


def _entries(distribution: metadata.Distribution) -> list[Entry]:
    try:
        points = list(distribution.entry_points)
    except Exception:  # metadata that cannot be parsed offers nothing
        return []
    name, version = distribution.metadata["Name"], distribution.version or "unknown"
    declared = {p.name: p.value for p in points if p.group == CONTRACT_GROUP}
    return [
        Entry(kind := p.group.removeprefix(PREFIX), p.name, name, version, p.value, declared.get(kind))
        for p in points if p.group.startswith(PREFIX) and p.group != CONTRACT_GROUP
    ]


def _declared(entry: Entry) -> str | None:
    """The contract that metadata declares, from "v1" or "1"; None where it declares none."""
    match = re.fullmatch(r"v?(\d+)", entry.declared or "")
    return f"{entry.kind}/{match[1]}" if match else None


def parts_of(options: ComponentOptions) -> list[tuple[str, Part, Any]]:
    """(option, its mark, its value) of every option that names another component."""
    return [
        (name, mark, getattr(options, name))
        for name, field in type(options).model_fields.items() for mark in field.metadata if isinstance(mark, Part)
    ]


def same_distribution(one: str, other: str) -> bool:
    """Whether two spellings name the same distribution."""
    return _normal(one) == _normal(other)


def _normal(distribution: str) -> str:
    """A distribution's name as package indexes compare names (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
