"""What a config names, built: its components, by the config path of each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from hotswap.core.explain import join
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import Component
from hotswap.core.interfaces.kv_transfer import KVTransfer
from hotswap.core.interfaces.kvcache import KVCacheManager
from hotswap.core.interfaces.parallel import Executor
from hotswap.core.interfaces.quantization import Quantization
from hotswap.core.interfaces.scheduler import Scheduler
from hotswap.core.interfaces.speculator import Speculator


@dataclass(frozen=True)
class Components:
    """What a config names, built. ``built`` maps config paths ("scheduler", "observers[0]") to components; their parts
    are reached through ``parts``. ``notes``: what was chosen, and what works but hardly as meant."""

    built: Mapping[str, Component]
    notes: tuple[str, ...] = ()

    @property
    def scheduler(self) -> Scheduler:
        return cast(Scheduler, self.built["scheduler"])

    @property
    def kvcache(self) -> KVCacheManager:
        return cast(KVCacheManager, self.built["kvcache"])

    @property
    def kv_transfer(self) -> KVTransfer:
        return cast(KVTransfer, self.built["kv_transfer"])

    @property
    def attention(self) -> AttentionBackend:
        return cast(AttentionBackend, self.built["attention"])

    @property
    def quantization(self) -> Quantization:
        return cast(Quantization, self.built["quantization"])

    @property
    def speculator(self) -> Speculator:
        return cast(Speculator, self.built["speculator"])

    @property
    def executor(self) -> Executor:
        return cast(Executor, self.built["execution"])

    def listed(self, section: str) -> list[Any]:
        """The components of ``logits_processors``, ``parallel`` or ``observers``, in order."""
        return [component for path, component in self.built.items() if path.startswith(f"{section}[")]

    def walk(self) -> Iterator[tuple[str, Component]]:
        """Every component with its config path, parts included, holders before their parts."""
        for path, component in self.built.items():
            yield path, component
            yield from _parts(component, path)


def _parts(component: Component, path: str) -> Iterator[tuple[str, Component]]:
    for name, part in component.parts.items():
        listed = isinstance(part, (list, tuple))
        for index, item in enumerate(part if listed else [part]):
            if item is not None:
                inner = join(path, name, index) if listed else join(path, name)
                yield inner, item
                yield from _parts(item, inner)
