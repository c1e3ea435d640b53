"""Writes the project of a new plugin from the templates in ``server/scaffold``.

A template is a plugin that works, called ``mypart``: its module and its tests are linted, type-checked and run as they
stand. A new project is such a template under another name.
"""

import keyword
import re
from importlib.resources import files
from pathlib import Path

from hotswap.core.config.files import parse_yaml
from hotswap.core.errors import ConfigError
from hotswap.core.registry import INTERFACES, Registry, same_distribution

_TEMPLATES = files("hotswap.server") / "scaffold"
_NO_SERVER = {"workload"}
"""Kinds that no server runs, but an experiment."""

SELECTED = {
    "scheduler": "scheduler: {use: mypart, max_chunk: 128}",
    "queue_policy": "scheduler:\n  policy: {use: mypart, tokens_per_second: 200}",
    "kvcache": "kvcache: {use: mypart, memory: 256MiB}",
    "eviction_policy": "kvcache: {use: prefix, eviction: mypart}",
    "kv_transfer": "kv_transfer: mypart",
    "attention": "attention: mypart",
    "speculator": "speculator: {use: mypart, max_draft: 3}",
    "logits_processor": "logits_processors: [penalties, bias, bad_words, min_tokens, mypart]",
    "model": "model: {name: smollm2-135m-instruct, use: mypart}",
    "quantization": "quantization: {use: mypart, keep: [lm_head]}",
    "operators": "model: {name: smollm2-135m-instruct, operators: mypart}",
    "executor": "execution: {use: mypart, depth: 2}",
    "launcher": "execution: {use: processes, launcher: mypart}",
    "shard": "parallel: [{use: mypart, size: 2}]",
    "deployment": "parallel: [{use: mypart, spares: 1}]",
    "router": "parallel: [{use: data, replicas: 2, router: mypart}]",
    "observer": "observers: [metrics, mypart]",
    "workload": "workload: mypart",
}
"""By kind, the line of a config that selects ``mypart``."""


def check_name(kind: str, name: str, registry: Registry) -> None:
    """ConfigError where a project of that kind and name cannot be made."""
    if kind not in registry.kinds:
        raise ConfigError(registry.no_kind(kind))
    letters, example = ("A-Za-z", "MyForCausalLM") if kind == "model" else ("a-z", "my_part")
    if not re.fullmatch(f"[{letters}][{letters}0-9]*(_[{letters}0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"'{name}' is no name for a {kind}: it stands in configs and in a module's name, so give letters, digits "
            f"and underscores, as in {example}")
    if name == "auto" or parse_yaml(name) != name:
        raise ConfigError(f"'{name}' means something else in a config: give the {kind} another name, as {example}")
    if there := [entry for entry in registry.entries if (entry.kind, entry.name) == (kind, name)]:
        raise ConfigError(f"there is a {there[0]} already: give yours another name")
    project = distribution_of(name)
    if there := [entry for entry in registry.entries if same_distribution(entry.distribution, project)]:
        raise ConfigError(f"pip would put the project in the place of another of that name, with the {there[0]}: give "
                          "yours another name")
    if re.search(rf"\b{_camel(name)}\b", "".join(_sources(kind).values())):
        raise ConfigError(f"the class would be called {_camel(name)}, as something that it needs: give the {kind} "
                          f"another name, as {name}_{kind}")


def write_project(kind: str, name: str, folder: Path) -> list[Path]:
    """The files of a project for a ``kind`` called ``name``, which :func:`check_name` has passed; nothing is written
    over. ConfigError where ``folder`` is not empty or cannot be written."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"{folder} is there and is no empty folder: give another one with --dir")
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for file, text in project(kind, name).items():
            path = folder / file
            path.write_text(text, encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return written


def distribution_of(name: str) -> str:
    """The name of its project, and of its folder."""
    return f"hotswap-{_snake(name).replace('_', '-')}"


def _sources(kind: str) -> dict[str, str]:
    """The Python files of a template, by their names there."""
    return {file: (_TEMPLATES / kind / file).read_text("utf-8")
            for file in ("hotswap_mypart.py", "test_hotswap_mypart.py")}


def project(kind: str, name: str) -> dict[str, str]:
    """File name -> text."""
    template = _TEMPLATES / kind
    serves = kind not in _NO_SERVER
    filled = {
        "kind": kind,
        "version": next(cls.contract for cls in INTERFACES if cls.kind == kind).rpartition("/")[2],
        "about": (template / "about.md").read_text("utf-8").strip(),
        "use": "serve with it" if serves else "use it",
        "command": "hotswap serve config.yaml" if serves else f"hotswap plugins doctor {kind}:mypart",
        "selected": SELECTED[kind],
    }
    texts = {**_sources(kind), "config.yaml": (template / "config.yaml").read_text("utf-8")}
    for file in ("pyproject.toml", "README.md"):
        text = (_TEMPLATES / f"{file}.in").read_text("utf-8")
        for key, value in filled.items():
            text = text.replace(f"{{{key}}}", value)
        texts[file] = text
    return {_renamed(file, name): _renamed(text, name) for file, text in texts.items()}


def _renamed(text: str, name: str) -> str:
    """Every spelling of the template's name becomes that spelling of ``name``."""
    text = text.replace("hotswap_mypart", f"hotswap_{_snake(name)}").replace("hotswap-mypart", distribution_of(name))
    return text.replace("MyPart", _camel(name)).replace("mypart", name)


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _camel(name: str) -> str:
    return "".join(part[0].upper() + part[1:] for part in name.split("_") if part)
