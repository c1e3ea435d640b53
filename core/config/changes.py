"""Another combination of parts for an engine that serves: what may be changed, and why the rest may not."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from hotswap.core.config.components import Components
from hotswap.core.config.schema import SECTIONS, Config, Section
from hotswap.core.config.sources import ResolvedConfig, load_config
from hotswap.core.explain import Problem, join, raise_problems, redact
from hotswap.core.interfaces.component import Component, Exchange
from hotswap.core.registry import INTERFACES

SOURCE = "exchange"
"""What :meth:`ResolvedConfig.source` says of values that were changed while serving."""

SIZES_OF_THE_CACHE = frozenset({"kvcache.block_size", "kvcache.memory", "kvcache.num_blocks"})
"""Keys of core's that may change: pages are then divided anew, and what runs is computed again."""

_WHY = {
    "model": "weights are never loaded anew while serving",
    "dtype": "the weights are loaded in it",
    "device": "the weights are loaded there",
    "max_model_len": "requests were taken that need it",
    "scheduler.max_batch_tokens": "the workers' buffers are as large",
    "scheduler.max_running": "the workers' buffers are as large",
    "kv_transfer": "it has told the workers, and other engines, where its pages are",
    "parallel": "it says which processes there are",
    "execution": "it runs the workers",
}

_EXCHANGE = {interface.kind: interface.exchangeable for interface in INTERFACES}


class Difference(NamedTuple):
    """A component at a config path that another one takes the place of. ``old`` and ``new`` are their labels; equal
    where only options differ."""

    path: str
    kind: str
    old: str
    new: str
    options: dict[str, Any]
    """The new one's."""


def changed(resolved: ResolvedConfig, sets: Iterable[str]) -> ResolvedConfig:
    """``resolved`` with ``sets`` ("scheduler.policy=fair_share") on top, as ``--set`` would have put them there.

    ConfigError for what is no config, and for what can only be changed by a restart, with the reason.
    """
    values = resolved.config.model_dump(mode="json", exclude_unset=True)
    new = load_config(values, sets, environ={})
    sources = {
        path: resolved.source(path) if source == "argument" else SOURCE for path, source in new.sources.items()}
    raise_problems(list(_fixed(resolved.config, new.config)))
    return ResolvedConfig(new.config, sources, new.warnings)


def _fixed(old: Config, new: Config) -> Iterator[Problem]:
    """What differs and cannot be exchanged."""
    for name in Config.model_fields:
        before, after = getattr(old, name), getattr(new, name)
        if _plain(before) == _plain(after):
            continue
        if _EXCHANGE.get(SECTIONS.get(name, ""), Exchange.NEVER) is Exchange.NEVER:
            yield Problem(name, _refusal(name))
            continue
        assert isinstance(before, Section)
        for key in type(before).model_fields:
            path = join(name, key)
            if key != "use" and getattr(before, key) != getattr(after, key) and path not in SIZES_OF_THE_CACHE:
                yield Problem(path, _refusal(path))


def _refusal(path: str) -> str:
    why = f": {_WHY[path]}" if path in _WHY else ""
    can = ", ".join(section for section, kind in SECTIONS.items() if _EXCHANGE[kind] is not Exchange.NEVER)
    return f"cannot be changed while serving{why}; start again with it. What can be exchanged: {can}."


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    return [_plain(item) for item in value] if isinstance(value, list) else value


def differences(old: Components, new: Components) -> list[Difference]:
    """Which components of ``new`` are others than those of ``old`` at the same path. Where nothing but a part of one
    differs, the part is named."""
    return [
        found for path, component in new.built.items() if path in old.built
        for found in _differences(path, old.built[path], component)]


def _differences(path: str, old: Component, new: Component) -> Iterator[Difference]:
    if old.origin != new.origin or _own(old) != _own(new):
        yield Difference(path, new.kind, old.label, new.label, redact(new.options.model_dump(mode="json")))
        return
    for name, part in new.parts.items():
        before, after = _listed(old.parts.get(name)), _listed(part)
        if len(before) != len(after):
            yield Difference(path, new.kind, old.label, new.label, redact(new.options.model_dump(mode="json")))
            return
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(join(path, name, index) if isinstance(part, list) else join(path, name), one, other)


def _own(component: Component) -> dict[str, Any]:
    """The options but for those that name parts."""
    return {key: value for key, value in component.options.model_dump(mode="json").items()
            if key not in component.parts}


def _listed(part: Any) -> list[Component]:
    return [item for item in (part if isinstance(part, (list, tuple)) else [part]) if item is not None]
