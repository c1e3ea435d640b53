"""A config for people: each value with its source, the components' own options and defaults included."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hotswap.core.config.check import CHOSEN, kind_of
from hotswap.core.config.limits import AUTO
from hotswap.core.config.schema import LISTS, SECTIONS, ComponentSection, Config, ModelSection, Section
from hotswap.core.config.sources import ResolvedConfig
from hotswap.core.explain import join, redact
from hotswap.core.interfaces.component import ComponentRef
from hotswap.core.registry import Registry, parts_of


class Row(NamedTuple):
    """One value; ``source`` is "default" or what :meth:`ResolvedConfig.source` says."""

    path: str
    value: Any
    source: str


def public_name(source: str) -> str:
    """What clients call the model of that name or path: of a path the last part, as where files lie concerns nobody."""
    return Path(source).name.removesuffix(".gguf") if Path(source).exists() else source


def rows(resolved: ResolvedConfig, registry: Registry) -> Iterator[Row]:
    """Every value in the order of the schema, the components' own options and their defaults included."""
    config = resolved.config
    for name in Config.model_fields:
        if name in LISTS:
            yield from _list_rows(resolved, registry, name)
            continue
        value = getattr(config, name)
        if not isinstance(value, Section):
            yield Row(name, value, _source(resolved, name, name in config.model_fields_set))
            continue
        for key in type(value).model_fields:
            path = join(name, key)
            shown = redact(getattr(value, key), key)
            yield Row(path, shown, _source(resolved, path, key in value.model_fields_set))
        if isinstance(value, (ComponentSection, ModelSection)) and value.use:
            ref = ComponentRef(use=value.use, **(value.model_extra or {}))
            yield from _option_rows(resolved, registry, SECTIONS[name], ref, name)


def _list_rows(resolved: ResolvedConfig, registry: Registry, section: str) -> Iterator[Row]:
    refs = getattr(resolved.config, section)
    if not refs:
        yield Row(section, [], _source(resolved, section, section in resolved.config.model_fields_set))
    for index, ref in enumerate(refs):
        path = join(section, index)
        yield Row(join(path, "use"), ref.use, resolved.source(path))
        yield from _option_rows(resolved, registry, kind_of(registry, LISTS[section], ref, path), ref, path)


def _option_rows(
    resolved: ResolvedConfig, registry: Registry, kind: str, ref: ComponentRef, path: str,
) -> Iterator[Row]:
    if ref.use == AUTO and kind in CHOSEN:
        return
    options = registry.options(kind, ref, path)
    parts = {name: (mark, value) for name, mark, value in parts_of(options)}
    plain = redact(options.model_dump(mode="json"))
    for name in type(options).model_fields:
        inner = join(path, name)
        source = _source(resolved, inner, name in options.model_fields_set)
        mark, value = parts.get(name, (None, None))
        if mark is None or not value:
            yield Row(inner, plain[name], source)
            continue
        several = isinstance(value, (list, tuple))
        for index, part in enumerate(value if several else [value]):
            at = join(inner, index) if several else inner
            yield Row(join(at, "use"), part.use, source)
            yield from _option_rows(resolved, registry, mark.kind, part, at)


def _source(resolved: ResolvedConfig, path: str, given: bool) -> str:
    return resolved.source(path) if given else "default"
