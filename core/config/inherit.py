"""What becomes of a component's options when a later source of the config exchanges the component.

A file says ``scheduler: {use: chunked, policy: priority, max_chunk: 64}`` and a flag ``scheduler.use=static``. Both
components have a policy, so it stays; the other option is left out with a warning. Nothing is forgiven to the source
that names the component nor to a later one, and nothing that the former component would have refused, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotswap.core.config.schema import SECTIONS, Config
from hotswap.core.errors import ConfigError
from hotswap.core.explain import join
from hotswap.core.interfaces.component import Part
from hotswap.core.registry import Registry


def hand_on(
    values: dict[str, Any], sources: dict[str, str],
    layers: Sequence[Mapping[str, Any]], layer_of: Callable[[str], int],
) -> list[str]:
    """Leave out of ``values`` and ``sources`` what was told to components that a later source exchanged, and say so.

    ``layers`` are the values as each source left them, the first one's first; ``layer_of`` a source is its index there.
    """
    named = [
        path.removesuffix(".use") for path, source in sources.items() if path.endswith(".use") and layer_of(source)]
    heir = _Heir(sources, layers, layer_of)
    for section, kind in SECTIONS.items():
        if any(path == section or path.startswith(f"{section}.") for path in named):
            core = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]  # sections are classes
            heir.visit(kind, section, values.get(section), frozenset(core), core["use"].default)
    return heir.warnings


@dataclass
class _Heir:
    sources: dict[str, str]
    layers: Sequence[Mapping[str, Any]]
    layer_of: Callable[[str], int]
    registry: Registry = field(default_factory=Registry)
    warnings: list[str] = field(default_factory=list)

    def visit(self, kind: str, path: str, given: Any, core: frozenset[str], default: str | None) -> None:
        """The component that ``given`` names, and its parts. ``core``: the keys that are none of its options."""
        use = given.get("use", default) if isinstance(given, dict) else None
        options = self._options(kind, use)
        if use is None or options is None:
            return  # nothing to hand on, or the check says what is wrong with the name
        for option in [key for key in given if key not in core and key not in options]:
            inner = join(path, str(option))
            source = max(self._told(inner), key=self.layer_of)
            former = self._named(path, self.layer_of(source), default)
            if former in (None, use) or self.layer_of(source) >= self.layer_of(self._told(f"{path}.use")[0]):
                continue
            had = self._options(kind, former)
            if had is None or option in had:
                self._leave_out(given, option, inner)
                told = inner if source == "argument" else f"{inner} of {source}"
                self.warnings.append(
                    f"{told} was given to '{former}'; '{use}' has no such option, so it is left out")
        for option, info in options.items():
            for mark in info.metadata:
                if isinstance(mark, Part) and isinstance(given.get(option), dict):
                    self.visit(mark.kind, join(path, option), given[option], frozenset({"use"}), None)

    def _options(self, kind: str, name: Any) -> Mapping[str, Any] | None:
        """The options of a component; None where it cannot be asked."""
        try:
            return self.registry.load(kind, name).Options.model_fields if isinstance(name, str) else None
        except ConfigError:
            return None

    def _told(self, path: str) -> list[str]:
        """The sources of the value at ``path``: of each value inside it, or of what holds it."""
        while path:
            found = [s for key, s in self.sources.items() if key == path or key.startswith((f"{path}.", f"{path}["))]
            if found:
                return found
            path = path.rpartition(".")[0]
        return [""]

    def _named(self, path: str, layer: int, default: str | None) -> Any:
        """The component at ``path`` as one layer left it."""
        value: Any = self.layers[layer]
        for key in path.split("."):
            value = value.get(key, {}) if isinstance(value, dict) else {}
        return value.get("use", default) if isinstance(value, dict) else value

    def _leave_out(self, given: dict[str, Any], option: str, path: str) -> None:
        del given[option]
        for key in [key for key in self.sources if key == path or key.startswith((f"{path}.", f"{path}["))]:
            del self.sources[key]
