"""``hotswap plugins``: what is installed, what of it can be used, and what a component can be told."""

import contextlib
import inspect
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from hotswap.core.config.files import parse_yaml
from hotswap.core.errors import ConfigError
from hotswap.core.explain import join, nearest
from hotswap.core.registry import Entry, Listing, Registry, same_distribution
from hotswap.server.commands.doctor import Finding, Health, Patient, examine, told
from hotswap.server.commands.scaffold import check_name, distribution_of, write_project
from hotswap.server.commands.strangers import aside
from hotswap.server.commands.table import table

_as_json = click.option("--json", "as_json", is_flag=True, help="For programs.")


@click.group("plugins", invoke_without_command=True)
@click.option("--load", is_flag=True, help="Import every component, to find those that are broken.")
@_as_json
@click.pass_context
def command(ctx: click.Context, load: bool, as_json: bool) -> None:
    """List the installed components; imports none of them."""
    if ctx.invoked_subcommand is not None:
        return
    registry = Registry()
    if load:
        for item in registry.listing():
            with contextlib.suppress(ConfigError), aside():  # the listing will say why
                registry.load(item.kind, f"{item.distribution}:{item.name}")
    listed = registry.listing()
    if as_json:
        click.echo(json.dumps([item._asdict() for item in listed], indent=2))
    else:
        click.echo(table(Listing._fields, listed))


@command.command()
@click.argument("component", metavar="KIND:NAME")
@_as_json
def show(component: str, as_json: bool) -> None:
    """Say when to choose a component and what options it takes; imports this one."""
    kind, _, name = component.partition(":")
    if not name:
        raise click.UsageError(f"'{component}' should be KIND:NAME, such as scheduler:chunked.")
    registry = Registry()
    with aside():
        cls = registry.load(kind, name)
    found = registry.find(kind, name)
    listing = next(item for item in registry.listing(kind) if item[:3] == (kind, found.name, found.distribution))
    facts: dict[str, Any] = {
        **listing._asdict(),
        "class": found.value,
        "documentation": inspect.getdoc(cls) or "",
        "options": cls.Options.model_json_schema(),
        "request_options": cls.RequestOptions.model_json_schema() if cls.RequestOptions else None,
    }
    click.echo(json.dumps(facts, indent=2) if as_json else _page(facts))


@command.command(epilog=f"Kinds: {', '.join(Registry().kinds)}.")
@click.argument("kind")
@click.argument("name")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Its folder; by default ./hotswap-NAME.")
def new(kind: str, name: str, folder: Path | None) -> None:
    """Write the project of a new plugin that works: a module, its tests, an entry point, a config."""
    check_name(kind, name, Registry())
    folder = folder or Path(distribution_of(name))
    written = write_project(kind, name, folder)
    click.echo("\n".join(str(path) for path in written))
    click.echo(
        f"\nNow, where hotswap[kit] is installed:  cd {shlex.quote(str(folder))} && "
        f"pip install --no-build-isolation -e . && pytest && hotswap plugins show {kind}:{name}")


@command.command()
@click.argument("target", metavar="[KIND:NAME | DISTRIBUTION]", required=False)
@click.option("--set", "sets", multiple=True, metavar="OPTION=VALUE", help="An option to build it with.")
@click.option("--no-kit", is_flag=True, help="Leave out the conformance kit's quick part.")
@_as_json
@click.pass_context
def doctor(ctx: click.Context, target: str | None, sets: tuple[str, ...], no_kit: bool, as_json: bool) -> None:
    """Examine a component, all of a distribution, or all that are not hotswap's own: what importing it costs, its
    contract, its options and what it says of itself, and the quick part of its kind's tests. Exit code 1: a problem."""
    registry = Registry()
    entries = _targets(registry, target)
    options = _given(sets)
    if options and len(entries) > 1:
        raise click.UsageError("--set is for one component: name it as KIND:NAME.")
    if not entries and not as_json:
        click.echo("No component is installed but hotswap's own: name one of them.")
        return
    findings: list[Finding] = []

    def examined() -> Iterator[Finding]:
        for entry in entries:
            for finding in examine(Patient(entry, registry, options), kit=not no_kit):
                findings.append(finding)
                yield finding

    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in examined()], indent=2))
    else:
        for line in told(examined()):
            click.echo(line)
    ctx.exit(1 if any(finding.health is Health.PROBLEM for finding in findings) else 0)


def _targets(registry: Registry, target: str | None) -> list[Entry]:
    if target is None:
        return [entry for entry in registry.entries if not entry.ours]
    kind, colon, name = target.partition(":")
    if colon:
        return [registry.find(kind, name)]
    if found := [entry for entry in registry.entries if same_distribution(entry.distribution, target)]:
        return found
    known = sorted({entry.distribution for entry in registry.entries})
    near = nearest(target, known)
    hint = f" Did you mean '{near}'?" if near else ""
    raise ConfigError(
        f"no distribution with components is called '{target}'.{hint} Installed: {', '.join(known)}; one component is "
        "named as KIND:NAME, such as scheduler:chunked.")


def _given(sets: tuple[str, ...]) -> dict[str, Any]:
    """"policy.use=fcfs" -> {"policy": {"use": "fcfs"}}; values are YAML, as for `hotswap serve --set`."""
    options: dict[str, Any] = {}
    for text in sets:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise click.UsageError(f"--set {text}: should be OPTION=VALUE, such as size=2.")
        section, *inner = options, *key.split(".")
        for name in inner[:-1]:
            section = section.setdefault(name, {})
        section[inner[-1]] = parse_yaml(value)
    return options


def _page(facts: dict[str, Any]) -> str:
    lines = [
        f"{facts['kind']}:{facts['name']}  {facts['distribution']} {facts['version']}  {facts['contract']}",
        facts["class"], "", facts["documentation"], "",
    ]
    lines += _options("Options", facts["options"])
    if facts["request_options"]:
        lines += ["", *_options("In a request's extra", facts["request_options"])]
    return "\n".join(lines)


def _options(title: str, schema: dict[str, Any], prefix: str = "") -> list[str]:
    properties = schema.get("properties", {})
    if not properties:
        return [f"{title}: none."]
    required = schema.get("required", [])
    lines = [f"{title}:"]
    for name, option in properties.items():
        default = "required" if name in required else f"default {json.dumps(option.get('default'))}"
        lines.append(f"  {join(prefix, name)}: {_type(option)}, {default}")
        lines += [f"      {line}" for line in option.get("description", "").splitlines()]
    return lines


def _type(option: dict[str, Any]) -> str:
    if "enum" in option:
        return " or ".join(json.dumps(value) for value in option["enum"])
    if "anyOf" in option:
        return " or ".join(_type(choice) for choice in option["anyOf"])
    reference = option.get("$ref", "").rpartition("/")[2]
    return str(option.get("type") or ("component" if reference == "ComponentRef" else reference) or "any")
