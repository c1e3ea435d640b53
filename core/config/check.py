"""Whether a config can work, before any memory is touched: every named component is built, and what each requires is
held against what the others offer. All refusals are told at once, each with the config key to change.

What depends on the checkpoint (its length, its layers, the memory it leaves) is checked when the engine is built; what
``attention: auto`` means is then chosen anew.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from hotswap.core.config.auto import choose_attention, choose_executor
from hotswap.core.config.components import Components
from hotswap.core.config.limits import AUTO, AttentionNeeds, attention_limits, not_taken, placement
from hotswap.core.config.schema import LISTS, SECTIONS, Config, known_keys
from hotswap.core.errors import ConfigError
from hotswap.core.explain import Problem, join, problems_of, raise_problems
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.deployment import Deployment
from hotswap.core.interfaces.kv_transfer import HANDOFF
from hotswap.core.interfaces.parallel import ShardStrategy
from hotswap.core.registry import Registry

CHOSEN = ("attention", "executor")
"""Kinds of which "auto" chooses one."""

def check_config(
    config: Config, registry: Registry, around: Sequence[Component] = (), needs: AttentionNeeds | None = None,
) -> Components:
    """Build every component that ``config`` names and solve their requirements. ConfigError tells all that is wrong.

    ``around``: the deployments of which ``config`` describes an engine. ``needs``: of the model, once it is known; but
    for the page size, which is the config's."""
    built: dict[str, Component] = {}
    problems: list[Problem] = []
    notes: list[str] = []
    for path, kinds, ref in named(config):
        try:
            if ref.use == AUTO and kinds == ("executor",):
                continue  # when it is known what it must offer
            if ref.use == AUTO and kinds == ("attention",):
                asked = needs or AttentionNeeds(_device(config), config.dtype)
                ref, note = choose_attention(registry, ref, replace(asked, page_size=config.kvcache.block_size))
                notes.append(note)
            built[path] = registry.build(kind_of(registry, kinds, ref, path), ref, path, known_keys())
        except ConfigError as error:
            problems += problems_of(error)
    if config.execution.use == AUTO:
        try:
            ref, chosen = choose_executor(registry, config.execution.ref, built)
            notes += chosen
            built["execution"] = registry.build("executor", ref, "execution", known_keys())
        except ConfigError as error:
            problems += problems_of(error)
    components = Components(built)
    problems += _model_options(config, registry)
    problems += unmet(dict(components.walk()), around)
    problems += _twice(components)
    problems += _deployments(components)
    problems += _folding(components)
    problems += _roles(config, registry, components, around, needs)
    problems += _files(config)
    if "speculator" in built:
        problems += _drafts(config, components.speculator.needs().lookahead)
    if "attention" in built:
        given = AttentionNeeds(config.device, config.dtype, config.kvcache.block_size)
        problems += not_taken(
            components.attention, lambda: attention_limits(given, components.attention.support()))
        if needs is not None or config.attention.use != AUTO:  # else it may be another that is chosen for the model
            problems += _graphs(config, components.attention)
    if "quantization" in built:
        problems += not_taken(components.quantization, lambda: placement(
            config.device, config.dtype, components.quantization.support()))
    notes += _idle_transfer(components)
    batch, batch_notes = _batch(config)
    raise_problems(problems + batch)
    return replace(components, notes=(*notes, *batch_notes))


def wrong_components(values: Mapping[str, Any], registry: Registry) -> list[Problem]:
    """What is wrong with the components that ``values`` name: for values that core's schema has refused already, so
    that both are told at once."""
    problems: list[Problem] = []
    for path, kinds, given in _given(values):
        try:
            ref = ComponentRef.model_validate(given)
            if ref.use != AUTO or kinds[0] not in CHOSEN:
                registry.build(kind_of(registry, kinds, ref, path), ref, path, known_keys())
        except ValidationError:
            continue  # the schema has said so
        except ConfigError as error:
            problems += problems_of(error)
    return problems


def _given(values: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """As :func:`named`, from values that may be of any shape."""
    for section, kind in SECTIONS.items():
        value = values.get(section)
        if isinstance(value, dict) and section != "model" and all(isinstance(key, str) for key in value):
            core = Config.model_fields[section].annotation.model_fields  # type: ignore[union-attr]  # sections are classes
            options = {key: option for key, option in value.items() if key not in core}
            yield section, (kind,), {"use": value.get("use", core["use"].default), **options}
    for section, kinds in LISTS.items():
        entries = values.get(section)
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            yield join(section, index), kinds, entry


def unmet(components: Mapping[str, Component], around: Sequence[Component] = ()) -> list[Problem]:
    """The requirements of ``components`` (by config path) that no component of the required kind meets, be it one of
    those ``around`` them.

    A kind of which none is given is left to a later check, when its component (the model's) is known; except those that
    a list of the config names, which is the whole of them.
    """
    offers: dict[str, set[str]] = {kind: set() for kinds in LISTS.values() for kind in kinds}
    holders: dict[str, list[str]] = {}
    for path, component in (*(("around it", each) for each in around), *components.items()):
        offers.setdefault(component.kind, set()).update(component.describe().offers)
        holders.setdefault(component.kind, []).append(f"{component.label} ({path})")
    problems = []
    for path, component in components.items():
        for need in component.describe().requires:
            known = all(kind in offers for kind in need.kinds)
            offered = {capability for kind in need.kinds for capability in offers.get(kind, ())}
            if known and need.capability not in offered:
                there = " and ".join(holder for kind in need.kinds for holder in holders.get(kind, ())) or "nobody"
                problems.append(Problem(path, (
                    f"{component.label} requires '{need.capability}' of the {' or the '.join(need.kinds)}: "
                    f"{need.why.rstrip('.')}. {there} offers {', '.join(sorted(offered)) or 'nothing'}. "
                    f"Change {need.remedy or need.kinds[0]}."
                )))
    return problems


def _device(config: Config) -> str:
    if config.device != AUTO:
        return config.device
    from hotswap.core.execution.device import auto_device  # here, since it imports torch

    return auto_device()


def named(config: Config) -> Iterator[tuple[str, tuple[str, ...], ComponentRef]]:
    """(config path, kinds it may be of, reference) of every component that the config names, the model aside."""
    for section, kind in SECTIONS.items():
        if section != "model":
            yield section, (kind,), getattr(config, section).ref
    for section, kinds in LISTS.items():
        for index, ref in enumerate(getattr(config, section)):
            yield join(section, index), kinds, ref


def kind_of(registry: Registry, kinds: tuple[str, ...], ref: ComponentRef, path: str) -> str:
    """Which of ``kinds`` has the component; the first where none has, so that its error names what there is."""
    name = ref.use.rpartition(":")[2]
    having = [kind for kind in kinds if name in registry.names(kind)]
    if len(having) > 1:
        raise ConfigError(f"'{name}' is the name of a {' and of a '.join(having)}.", path)
    return having[0] if having else kinds[0]


def _model_options(config: Config, registry: Registry) -> list[Problem]:
    """Only where the config names the model component; else the checkpoint does, and it is checked at loading."""
    if config.model.use is None:
        return []
    try:
        registry.options("model", ComponentRef(use=config.model.use, **config.model.options), "model", known_keys())
    except ConfigError as error:
        return problems_of(error)
    return []


def _twice(components: Components) -> list[Problem]:
    """A logits processor that ran twice would count every penalty twice, an observer every token. Deployments nest."""
    problems, seen = [], set()
    for path, component in components.built.items():
        if component.kind == Deployment.kind:
            continue
        place = path.rpartition("[")[0], component.origin
        if place in seen:
            problems.append(Problem(path, f"'{component.name}' is listed twice."))
        seen.add(place)
    return problems


def _idle_transfer(components: Components) -> list[str]:
    """No error: what it costs is little, and a plugin's transfer may do other things, too."""
    offering = [(path, part) for path, part in components.walk() if HANDOFF in part.describe().offers]
    wanted = any(
        need.capability == HANDOFF for _, part in components.walk() for need in part.describe().requires)
    return [] if wanted else [
        f"{path}: no deployment in parallel hands requests over, so that {part.label} will carry nothing to another "
        "engine; add one that does, or leave it out" for path, part in offering]


def _files(config: Config) -> list[Problem]:
    """Files that would be missed only after the weights have been loaded."""
    template = config.server.chat_template
    if template is None or Path(template).is_file():
        return []
    return [Problem("server.chat_template", f"there is no file {template!r}; give the path of a Jinja template.")]


def _deployments(components: Components) -> list[Problem]:
    """A deployment runs engines, of which a strategy spreads one over ranks: none may stand behind a strategy."""
    problems, strategy = [], None
    for path, component in components.built.items():
        if not path.startswith("parallel["):
            continue
        if component.kind != Deployment.kind:
            strategy = component
        elif strategy is not None:
            problems.append(Problem(path, (
                f"{component.label} runs several engines and cannot stand behind {strategy.label}, which spreads one "
                "over several ranks; put it before.")))
    return problems


def _folding(components: Components) -> list[Problem]:
    """Strategies are folded from the last one on: one that requires something of others must stand before them."""
    problems, listed = [], components.listed("parallel")
    for place, strategy in enumerate(listed):
        needs = {need.capability for need in strategy.describe().requires if ShardStrategy.kind in need.kinds}
        for early, other in enumerate(listed[:place]):
            if other.kind == ShardStrategy.kind and needs & other.describe().offers:
                order = [*listed[:early], strategy, *listed[early:place], *listed[place + 1 :]]
                problems.append(Problem(join("parallel", place), (
                    f"{strategy.label} spreads over the ranks that {other.label} makes, and must stand before it: "
                    f"parallel: [{', '.join(each.name for each in order)}].")))
                break
    return problems


def _roles(
    config: Config, registry: Registry, components: Components, around: Sequence[Component],
    needs: AttentionNeeds | None,
) -> list[Problem]:
    """What is wrong with the strategies that a role of a deployment names for itself."""
    problems = []
    for path, deployment in components.built.items():
        if deployment.kind != Deployment.kind:
            continue
        for role in cast(Deployment, deployment).roles():
            if role.parallel is None:
                continue
            try:
                inner = config.model_copy(update={"parallel": list(role.parallel)})
                check_config(inner, registry, [*around, deployment], needs)
            except ConfigError as error:
                problems += [
                    Problem(join(path, role.path) + found.path.removeprefix("parallel"), found.message)
                    for found in problems_of(error) if found.path.startswith("parallel")]
    return problems


def _drafts(config: Config, lookahead: int) -> list[Problem]:
    problems = []
    if config.max_model_len is not None and lookahead >= config.max_model_len:
        problems.append(Problem("speculator", (
            f"{lookahead} drafts a step do not fit into max_model_len {config.max_model_len}; lower the drafts.")))
    if lookahead + 1 > config.scheduler.max_batch_tokens:
        problems.append(Problem("scheduler.max_batch_tokens", (
            f"{config.scheduler.max_batch_tokens} is too small for one token and its {lookahead} drafts; "
            f"give at least {lookahead + 1}.")))
    return problems


def _graphs(config: Config, attention: AttentionBackend) -> list[Problem]:
    """Of "full" what the backend alone makes impossible; the model and its strategies have a say at the start."""
    if config.execution.graphs != "full":
        return []
    from hotswap.core.execution.graphs import not_full, obstacle_of  # here, since it imports torch

    try:
        obstacle = obstacle_of(attention, _device(config))
    except ConfigError:
        return []  # it cannot be used here, which is told of it
    return [Problem("execution.graphs", not_full(obstacle))] if obstacle else []


def _batch(config: Config) -> tuple[list[Problem], list[str]]:
    """A step that cannot hold a token of every running request starves prompts where those need several steps."""
    tokens, running = config.scheduler.max_batch_tokens, config.scheduler.max_running
    if tokens >= running:
        return [], []
    if config.max_model_len is None or config.max_model_len > tokens:
        message = (
            f"{tokens} is less than max_running {running}: steps full of decodes would leave no room for prompts. "
            f"Give at least {running}, or lower scheduler.max_running.")
        return [Problem("scheduler.max_batch_tokens", message)], []
    return [], [f"scheduler.max_batch_tokens {tokens} is less than max_running {running}: running requests take turns"]
