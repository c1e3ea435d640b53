"""The JSON schema of the config, in which each component's own options stand beside core's keys."""

import inspect
from typing import Any

from hotswap.core.config.check import CHOSEN, kind_of, named
from hotswap.core.config.limits import AUTO
from hotswap.core.config.schema import LISTS, SECTIONS, Config
from hotswap.core.errors import ConfigError
from hotswap.core.explain import join
from hotswap.core.interfaces.component import ComponentRef, Part
from hotswap.core.registry import Registry, Status, parts_of


def json_schema(registry: Registry, config: Config | None = None) -> dict[str, Any]:
    """The JSON schema of the config with the options of the components that ``config`` names; None: of all that are
    installed and can be imported."""
    return _SchemaWriter(registry, config).write()


class _SchemaWriter:
    """Collects each kind's components under ``$defs``, where sections, lists and parts refer to them."""

    def __init__(self, registry: Registry, config: Config | None) -> None:
        self.registry = registry
        self.wanted = None if config is None else _used(config, registry)
        self.schema = Config.model_json_schema()
        self.definitions: dict[str, Any] = self.schema["$defs"]

    def write(self) -> dict[str, Any]:
        for section, kind in SECTIONS.items():
            field = Config.model_fields[section]
            definition = self.definitions[field.annotation.__name__]  # type: ignore[union-attr]  # sections are classes
            self._section(definition, kind)
        for section, kinds in LISTS.items():
            items = [{"$ref": self._kind(kind)} for kind in kinds]
            self.schema["properties"][section]["items"] = items[0] if len(items) == 1 else {"anyOf": items}
        self.definitions.pop("ComponentRef", None)
        return self.schema

    def _section(self, definition: dict[str, Any], kind: str) -> None:
        """A section of core's keys becomes a choice: a bare name, or a table for each component with its options."""
        own = definition.pop("properties")
        default = own["use"].get("default")
        choices = [self._table(kind, name, own, required=name != default) for name in self._names(kind)]
        if kind in CHOSEN:  # whose options are whatever the one takes that is chosen
            chosen = {"type": "object", "properties": {**own, "use": {"const": AUTO}}, "additionalProperties": True}
            choices = [{"title": AUTO, **chosen}, *choices]
        if kind == "model":
            choices = [{"type": "object", "properties": own, "additionalProperties": True}, *choices]
        for key in ("type", "additionalProperties", "required"):
            definition.pop(key, None)
        definition["anyOf"] = [{"type": "string"}, *choices]

    def _kind(self, kind: str) -> str:
        """A reference to the definition of a kind, written at the first call."""
        if kind not in self.definitions:
            self.definitions[kind] = {}  # a part may be of its holder's kind
            tables = [self._table(kind, name, {"use": {}}, required=True) for name in self._names(kind)]
            self.definitions[kind] = {"anyOf": [{"type": "string"}, *tables]}
        return f"#/$defs/{kind}"

    def _table(self, kind: str, name: str, own: dict[str, Any], required: bool) -> dict[str, Any]:
        cls = self.registry.load(kind, name)
        options = cls.Options.model_json_schema(ref_template=f"#/$defs/{kind}:{name}:{{model}}")
        for inner, definition in options.pop("$defs", {}).items():
            if inner != ComponentRef.__name__:
                self.definitions[f"{kind}:{name}:{inner}"] = definition
        properties = {**options.get("properties", {}), **own, "use": {"const": name}}
        for option, field in cls.Options.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Part):
                    properties[option] = self._part(properties[option], mark.kind)
        return {
            "title": name, "description": inspect.getdoc(cls) or "", "type": "object", "properties": properties,
            "required": [*(["use"] if required else []), *options.get("required", [])], "additionalProperties": False,
        }

    def _part(self, option: dict[str, Any], kind: str) -> dict[str, Any]:
        """The schema of an option that names a component, several, or perhaps none."""
        reference = {"$ref": self._kind(kind)}
        if option.get("type") == "array":
            return {"type": "array", "items": reference}
        return {"anyOf": [reference, {"type": "null"}]} if "anyOf" in option else reference

    def _names(self, kind: str) -> list[str]:
        if self.wanted is not None:
            return sorted(self.wanted.get(kind, ()))
        loadable = []
        for item in self.registry.listing(kind):
            name = f"{item.distribution}:{item.name}" if item.status is Status.AMBIGUOUS else item.name
            try:
                self.registry.load(kind, name)
            except ConfigError:
                continue  # shown as broken by ``hotswap plugins``
            loadable.append(name)
        return loadable


def _used(config: Config, registry: Registry) -> dict[str, set[str]]:
    """kind -> names of the components that the config names, parts included."""
    used: dict[str, set[str]] = {}

    def visit(kind: str, ref: ComponentRef, path: str) -> None:
        if ref.use == AUTO and kind in CHOSEN:
            return
        used.setdefault(kind, set()).add(ref.use)
        for name, mark, value in parts_of(registry.options(kind, ref, path)):
            for part in value if isinstance(value, (list, tuple)) else [value] if value else []:
                visit(mark.kind, part, join(path, name))

    for path, kinds, ref in named(config):
        visit(kind_of(registry, kinds, ref, path), ref, path)
    if config.model.use:
        visit("model", ComponentRef(use=config.model.use, **config.model.options), "model")
    return used
