"""What every exchangeable part has in common: options, a contract version, and a description of itself.

A component is one class and one line of ``pyproject.toml``::

    [project.entry-points."hotswap.scheduler"]
    mine = "my_package.scheduler:MyScheduler"

Core never asks a component's name. It asks what the component *offers* and *requires*.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_serializer, model_validator


class ComponentOptions(BaseModel):
    """Base of a component's part of the config. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RequestOptions(BaseModel):
    """Base of a component's part of a request's ``extra`` bag. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def use_by_name(value: Any) -> Any:
    """A bare name stands for a table with nothing but ``use``."""
    return {"use": value} if isinstance(value, str) else value


class ComponentRef(BaseModel):
    """A component named in the config: a bare name, or a table with ``use`` and the component's own options.

    ``use`` is an entry point's name, or ``distribution:name`` where two distributions offer the same name.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    use: str

    _bare_name = model_validator(mode="before")(use_by_name)

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})

    @model_serializer
    def _plain(self) -> dict[str, Any]:
        return {"use": self.use, **self.options}


@dataclass(frozen=True)
class Part:
    """Marks an option that names another component, which core builds and hands over in ``parts``::

        class Options(ComponentOptions):
            policy: Annotated[ComponentRef, Part("queue_policy")] = ComponentRef(use="fcfs")
    """

    kind: str


@dataclass(frozen=True)
class Requirement:
    """``kind``, or one of several, must offer ``capability``; else ``why`` and ``remedy`` (a config key to change) are
    shown."""

    kind: str | tuple[str, ...]
    capability: str
    why: str
    remedy: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,) if isinstance(self.kind, str) else self.kind


@dataclass(frozen=True)
class Description:
    """What a component offers and requires of others. Solved by ``hotswap config check`` before any memory is used."""

    offers: frozenset[str] = frozenset()
    requires: tuple[Requirement, ...] = ()


@dataclass(frozen=True)
class Origin:
    """Where a component was found. ``contract`` is the class's, e.g. "scheduler/1"."""

    kind: str
    name: str
    distribution: str
    version: str
    contract: str


class Exchange(Enum):
    """How the components of a kind are exchanged while serving.

    NEVER: with a restart. BETWEEN_STEPS: on the host, whatever is in flight; what it keeps it can lose. DRAINED: on the
    host, once every step in flight has been collected. WORKERS: on every rank, once every step has been collected; it
    is built and loaded there beside serving. A component that is a part of another is exchanged with its holder.
    """

    NEVER = "never"
    BETWEEN_STEPS = "between steps"
    DRAINED = "drained"
    WORKERS = "workers"


class Component(ABC):
    """Base class of every part.

    Subclasses of a kind set ``contract`` once, in the kind's interface. The docstring of an implementation says when to
    choose it and which paper or report it comes from; ``hotswap plugins show`` prints it.
    """

    kind: ClassVar[str]
    contract: ClassVar[str]  # "scheduler/1"
    exchangeable: ClassVar[Exchange] = Exchange.NEVER
    """Set once, in the kind's interface."""
    Options: ClassVar[type[ComponentOptions]] = ComponentOptions
    RequestOptions: ClassVar[type[RequestOptions] | None] = None
    origin: Origin | None = None
    """Set by the registry on what it builds."""

    def __init__(self, options: Any = None, parts: Mapping[str, Any] | None = None) -> None:
        """``options`` is an instance of ``Options``; ``parts`` maps each option marked with :class:`Part` to its
        built component. Reads nothing, opens nothing: ``hotswap config check`` builds components, too."""
        self.options: Any = self.Options() if options is None else options
        self.parts: Mapping[str, Any] = parts or {}

    @property
    def name(self) -> str:
        """As the config names it; the class's name stands in where no registry built it."""
        return self.origin.name if self.origin else type(self).__name__

    @property
    def ref(self) -> ComponentRef:
        """Names this very component, options included: what the registry of another process builds it from."""
        if self.origin is None:
            raise RuntimeError(f"{self.label} was not built by a registry, so no other process can find it")
        options = self.options.model_dump(mode="json", exclude_unset=True)
        return ComponentRef(use=f"{self.origin.distribution}:{self.origin.name}", **options)

    @property
    def label(self) -> str:
        """``kind:name``, as logs and errors name it."""
        return f"{self.kind}:{self.name}"

    def describe(self) -> Description:
        return Description()
