"""What an engine's decisions depend on besides its requests: enough to build the same host side again, without its
model."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hotswap.core.engine.context import Limits
from hotswap.core.explain import redact
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kvcache import CacheConstraints, CacheSpec, GroupPlan


@dataclass(frozen=True)
class CacheRoom:
    """What a KV manager is configured with."""

    specs: tuple[CacheSpec, ...]
    num_bytes: int
    constraints: CacheConstraints


@dataclass(frozen=True)
class EngineSetup:
    """Of one engine, when it starts.

    ``components``: by kind, what a registry builds scheduler, KV manager and KV transfer from; a kind is missing if
    there is none, or one that no registry has built. ``room`` is what the KV manager was configured
    with, ``groups`` what it made of it. ``model`` is the checkpoint's revision.
    """

    components: Mapping[str, Mapping[str, Any]]
    limits: Limits
    depth: int
    chained: bool
    ranks: int
    room: CacheRoom
    groups: Mapping[str, GroupPlan]
    model: str = ""

    def plain(self) -> dict[str, Any]:
        """As JSON knows it; without secrets."""
        return asdict(self)


def references(components: Iterable[Component | None]) -> dict[str, dict[str, Any]]:
    """What a registry builds each of ``components`` from, by kind."""
    return {
        part.kind: redact(part.ref.model_dump(mode="json")) for part in components
        if part is not None and part.origin is not None}


@dataclass(frozen=True)
class SwitchSetup:
    """Of an exchange of parts: what is put in place between two steps. ``replaced`` are the kinds, and ``components``
    what a registry builds the new ones from, where one has built them; ``room`` is given with a KV manager.
    ``workers``: they have forgotten every request, too. ``keeps_pages``: see ``Switch``."""

    replaced: tuple[str, ...]
    components: Mapping[str, Mapping[str, Any]]
    limits: Limits
    room: CacheRoom | None
    keeps_pages: bool
    workers: bool

    def plain(self) -> dict[str, Any]:
        """As JSON knows it; without secrets."""
        return asdict(self)
