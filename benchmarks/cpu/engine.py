"""What an adapter is: how one engine is started and asked. Standard library only, on any Python.

A module of ``adapters/`` imports its engine where it is used, for others read the module, too. It has

- ``DISTRIBUTIONS``: whose versions are told, the first being the one without which it is not installed;
- ``Offline``, a class, where the engine can be asked in its own process;
- ``serve(setup, python, port) -> Command``, where it has an OpenAI server.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from benchmarks.workloads import Item


@dataclass(frozen=True)
class Setup:
    """``model``: a folder or file of weights, or what else the adapter takes. ``cpus``: the processors for its kernels,
    one a core. ``options`` are the adapter's own."""

    model: str
    cpus: Sequence[int]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def threads(self) -> int:
        return len(self.cpus)


@dataclass
class Answer:
    """One request. Seconds from the start of the load: when it was ``sent``, and (time, tokens) of each delivery."""

    sent: float
    chunks: list[tuple[float, int]] = field(default_factory=list)


class Offline(Protocol):
    """Made with a :class:`Setup`, it is ready for requests."""

    def run(self, items: Sequence[Item], streams: int) -> list[Answer]:
        """Greedy, beyond any end of sequence, at most ``streams`` under way. Raises where a request fails."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Command:
    """How its server is started on 127.0.0.1. ``ready``: the route that answers 200 when it can serve. ``fields``: what
    a request's body says besides."""

    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: str = "/health"
    fields: Mapping[str, Any] = field(default_factory=dict)
