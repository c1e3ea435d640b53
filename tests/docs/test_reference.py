"""What the pages list is what the code has: keys, options, hooks, kinds, fields, routes, components, tests, links."""

import ast
import inspect
import re
import tomllib
from dataclasses import fields

import pytest

from hotswap.core.config.auto import choose_attention, choose_executor
from hotswap.core.config.limits import AttentionNeeds
from hotswap.core.config.schema import LISTS, SECTIONS, Config, Section
from hotswap.core.config.units import parse_bytes
from hotswap.core.hooks import HookSpecs
from hotswap.core.interfaces.component import ComponentOptions, ComponentRef
from hotswap.core.registry import INTERFACES, Registry
from hotswap.core.request import SamplingParams
from hotswap.plugins.observers.bill import Invoice
from hotswap.server.protocol.chat import ChatBody
from hotswap.server.protocol.common import INDIFFERENT, LABELS, UNSUPPORTED
from hotswap.server.protocol.completions import CompletionBody

UNSET = "–"


def schema_keys(model: type[Section] = Config, prefix: str = "") -> dict[str, object]:
    """Every key of the config with its default."""
    keys: dict[str, object] = {}
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys |= schema_keys(field.annotation, f"{prefix}{name}.")
        else:
            keys[prefix + name] = field.get_default(call_default_factory=True)
    return keys


def shown(default: object) -> str:
    """A default as the tables write it."""
    if default is None:
        return UNSET
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, ComponentRef):
        return default.use
    if isinstance(default, list):
        return "[" + ", ".join(map(shown, default)) + "]"
    return str(default)


@pytest.fixture
def configuration(pages):
    return pages.ROOT / "docs/configuration.md"


@pytest.fixture
def project(pages):
    return tomllib.loads((pages.ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture
def components(project):
    """(kind, name) -> "module:Class" of every component in pyproject.toml."""
    return {
        (group.removeprefix("hotswap."), name): value
        for group, entries in project["entry-points"].items() if group != "hotswap.contract"
        for name, value in entries.items()
    }


def test_every_config_key_is_documented_with_its_default(pages, configuration):
    rows = pages.table(pages.section(configuration, "## Keys"))
    documented = {pages.names(row[0])[0]: "".join(pages.names(row[1])) or row[1] for row in rows}
    keys = schema_keys()
    assert documented.keys() == keys.keys()
    for key, default in keys.items():
        given = documented[key]
        assert given == shown(default) or parse_bytes(given) == default, f"{key}: the default is {shown(default)}"


def test_every_option_of_our_components_is_documented_with_its_default(pages, configuration, components):
    rows = pages.table(pages.section(configuration, "## Options of the components in the box"))
    documented = {
        (pages.names(row[0])[0], pages.names(row[1])[0]): "".join(pages.names(row[2])) or row[2] for row in rows}
    expected = {}
    for (kind, name), value in components.items():
        module, _, cls = value.partition(":")
        options: type[ComponentOptions] = getattr(__import__(module, fromlist=[cls]), cls).Options
        for option, field in options.model_fields.items():
            default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
            expected[f"{kind}:{name}", option] = default
    assert documented == expected


def test_every_hook_is_documented_with_its_arguments(pages):
    rows = pages.table((pages.ROOT / "docs/kinds/observer.md").read_text("utf-8"))
    documented = {pages.names(row[0])[0]: pages.names(row[1])[0] for row in rows}
    hooks = {
        name: ", ".join(list(inspect.signature(function).parameters)[1:])
        for name, function in vars(HookSpecs).items() if name.startswith("hotswap_")
    }
    assert documented == hooks
    assert all(row[2].endswith(".") for row in rows), "each hook has one sentence"


@pytest.mark.parametrize("interface", INTERFACES, ids=lambda cls: cls.kind)
def test_every_kind_is_documented_with_its_contract_and_methods(pages, interface):
    text = (pages.ROOT / f"docs/kinds/{interface.kind}.md").read_text("utf-8")
    assert text.startswith(f"# {interface.kind}\n")
    assert f"`{interface.contract}`" in text
    path = interface.__module__.removeprefix("hotswap.").replace(".", "/")
    assert f"`{path}.py`" in text
    members = {name for name, value in vars(interface).items() if callable(value) or isinstance(value, classmethod)}
    missing = [name for name in members if not name.startswith("_") and not re.search(rf"`{name}\b", text)]
    assert not missing, f"the page of '{interface.kind}' does not say what {missing} do"


def test_every_kind_has_one_page_and_one_row_in_the_index_of_contracts(pages):
    kinds = {interface.kind for interface in INTERFACES}
    assert {page.stem for page in (pages.ROOT / "docs/kinds").iterdir()} == kinds
    rows = pages.table((pages.ROOT / "docs/contracts.md").read_text("utf-8").partition("## ")[0])
    assert sorted(row[0] for row in rows) == sorted(f"[{kind}](kinds/{kind}.md)" for kind in kinds)


def test_the_table_of_components_in_the_readme_is_that_of_pyproject(pages, components):
    rows = pages.table(pages.section(pages.ROOT / "README.md", "## Components"))
    listed = [(row[0], *pages.names(row[1])) for row in rows]
    empty = {kind[0] for kind in listed if len(kind) == 1}
    assert {entry for entry in listed if len(entry) == 2} == components.keys()
    assert empty == {cls.kind for cls in INTERFACES} - {kind for kind, _ in components}
    status = {entry: row[3] for entry, row in zip(listed, rows, strict=True)}
    assert set(status.values()) <= {"default", "ready", "contract only"}
    assert {entry for entry, state in status.items() if state == "default"} == default_components()
    assert all((state == "contract only") == (len(entry) == 1) for entry, state in status.items())


def default_components() -> set[tuple[str, str]]:
    config = Config(model={"name": "m"})
    chosen = {(kind, getattr(config, section).use) for section, kind in SECTIONS.items() if section != "model"}
    registry, auto = Registry(), ComponentRef(use="auto")
    chosen -= {("executor", "auto"), ("attention", "auto")}
    chosen.add(("executor", choose_executor(registry, auto, {})[0].use))
    chosen.add(("attention", choose_attention(registry, auto, AttentionNeeds("cpu"))[0].use))
    chosen |= {(LISTS[section][0], ref.use) for section in LISTS for ref in getattr(config, section)}
    chosen |= {("queue_policy", "fcfs"), ("eviction_policy", "lru"), ("launcher", "local"), ("operators", "auto")}
    return chosen | {("model", config.model.fallback)}


def test_every_sampling_field_is_documented_with_its_default(pages):
    rows = pages.table((pages.ROOT / "docs/sampling.md").read_text("utf-8").partition("## Order")[0])
    documented = {pages.names(row[0])[0]: row[1].strip("`") for row in rows}
    assert documented.keys() == SamplingParams.model_fields.keys()
    for name, field in SamplingParams.model_fields.items():
        default = field.get_default(call_default_factory=True)
        assert name == "max_tokens" or documented[name] == shown(default), name


def test_every_request_field_is_documented(pages):
    text = pages.section(pages.ROOT / "docs/server.md", "## Request fields")
    own = {name for row in pages.table(text) for name in pages.names(row[0])}
    fields = ChatBody.model_fields.keys() | CompletionBody.model_fields.keys()
    assert fields - SamplingParams.model_fields.keys() <= own <= fields | {"logprobs", "max_tokens"}
    refused = re.search(r"\*\*Refused by name\*\*.*?:\n(.*?)\n\n", text, re.DOTALL)
    assert set(pages.names(refused[1])) == set(UNSUPPORTED)
    accepted = re.search(r"\*\*Accepted.*?:(.*?)\n\n", text, re.DOTALL)
    assert set(pages.names(accepted[1])) == LABELS | INDIFFERENT


def test_every_route_is_documented(pages, routes):
    rows = pages.table(pages.section(pages.ROOT / "docs/server.md", "## Endpoints"))
    documented = {(row[0], pages.names(row[1])[0]) for row in rows}
    assert documented - {("GET", "/metrics")} == {(method, path) for path, method in routes.items()}


def test_every_metric_is_documented(pages, registry):
    metrics = registry.build("observer", ComponentRef(use="metrics"), "observers")
    rows = pages.table(pages.section(pages.ROOT / "docs/server.md", "## Metrics"))
    documented = {name for row in rows for name in pages.names(row[1])} - {"finished_reason"}
    assert documented == {family.name.removeprefix("hotswap:") for family in metrics.families()}


def test_every_field_of_a_bill_is_documented(pages):
    text = pages.section(pages.ROOT / "docs/server.md", "## Bills").partition("```")[0]
    assert {field.name for field in fields(Invoice)} - {"id"} == set(pages.names(text)) - {"bill"}


def test_the_readme_has_the_line_that_runs_the_tests(pages):
    text = pages.section(pages.ROOT / "README.md", "## Tests")
    assert re.fullmatch(r"\n```sh\n[^\n]+pytest\n```\n\n", text), "one fenced line directly under the heading"


def test_relative_links_lead_somewhere(pages, page):
    for target in re.findall(r"\]\(([^)\s]+)\)", pages.prose(page)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text("utf-8"), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


def test_files_that_the_pages_name_exist(pages, page):
    """Paths in backticks that begin with one of our folders."""
    named = re.findall(
        r"`((?:core|plugins|server|lab|tests|benchmarks|examples|docs)/[\w/.*-]+)(?:::\w+)?`", pages.prose(page))
    missing = [path for path in named if not list(pages.ROOT.glob(path.rstrip("/")))]
    assert not missing, missing


def test_tests_that_the_pages_name_exist(pages, page):
    named = set(re.findall(r"`((?:tests|core)/[\w/]+\.py)::(\w+)(?:::(\w+))?`", page.read_text("utf-8")))
    for path, *parts in named:
        tree = ast.parse((pages.ROOT / path).read_text("utf-8"))
        for part in filter(None, parts):
            tree = next((n for n in tree.body if isinstance(n, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                         and n.name == part), None)
            assert tree is not None, f"{path} has no {part}"


def test_every_page_is_in_the_index(pages):
    index = (pages.ROOT / "docs/index.md").read_text("utf-8")
    names = {page.name for page in (pages.ROOT / "docs").glob("*.md")} - {"index.md"}
    missing = [name for name in names if name not in index]
    assert not missing
