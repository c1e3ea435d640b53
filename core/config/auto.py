"""What "auto" means where a config names a component so: which of those installed is taken, and why."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from hotswap.core.config.limits import AUTO, AttentionNeeds, Limit, attention_limits, lacking
from hotswap.core.config.schema import known_keys
from hotswap.core.errors import BrokenComponentError, ConfigError
from hotswap.core.explain import join, problems_of, raise_problems
from hotswap.core.interfaces.attention import AttentionBackend
from hotswap.core.interfaces.component import Component, ComponentRef
from hotswap.core.interfaces.parallel import Executor
from hotswap.core.registry import Entry, Registry

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")


class _Passed(NamedTuple):
    """A backend that was passed over. ``ruled_out``: by what is given, or because it is broken, so that somebody may
    change it. ``elsewhere``: it is for other devices."""

    reason: str
    ruled_out: bool = False
    elsewhere: bool = False


def choose_attention(registry: Registry, ref: ComponentRef, needs: AttentionNeeds) -> tuple[ComponentRef, str]:
    """What ``attention: auto`` means, and why: a backend made for the device before one for any device, and one of
    hotswap's own before those of other packages.

    Backends that cannot be used here, or lack what is known of ``needs``, are passed over. Why names those that what is
    given rules out, and where none is made for the device those that are absent; the others are for the log's DEBUG.
    Before the model is known it names those, too, that may take the chosen one's place. ConfigError where none is left.
    """
    kind = needs.device.partition(":")[0]
    ranked, passed = [], []

    def fit(backend: AttentionBackend) -> tuple[bool, list[Limit]]:
        support = backend.support()
        return support.devices is None, lacking(attention_limits(needs, support))

    plain = {name: answer for _, name, answer in _answers(
        registry, "attention", ComponentRef(use=AUTO), "attention", fit)} if ref.options else {}
    for entry, name, answer in _answers(registry, "attention", ref, "attention", fit):
        if isinstance(answer, ConfigError):
            if plain.get(name) == (False, []):
                options = " and ".join(join("attention", option) for option in ref.options)
                reason = f"{name}, made for {kind}, does not take {options}: leave it out to have {name}"
                passed.append(_Passed(reason, ruled_out=True))
            elif not _must_be_told(registry, name, ref):
                broken = isinstance(answer, BrokenComponentError)
                passed.append(_Passed(f"{name}: {' '.join(answer.message.split())}", broken))
        elif lacks := answer[1]:
            elsewhere = lacks[0].key == "device"
            passed.append(_Passed(f"{name} does not take {lacks[0]}", not elsewhere, elsewhere))
        else:
            ranked.append((answer[0], not entry.ours, name))
    if not ranked:
        raise ConfigError(f"no installed backend does what is needed on {needs.device}{_why(passed)}.", "attention")
    logger.debug("attention: auto passed over%s", _why(passed))
    (general, _, name), *others = sorted(ranked)
    why = f"it runs on any device, and none that is made for {kind} will do" if general else f"it is made for {kind}"
    note = f"attention: auto chose '{name}', because {why}"
    if needs.shapes is None and others:
        note += f", unless the model needs what it lacks: then {' or '.join(repr(other) for *_, other in others)}"
    told = [each for each in passed if each.ruled_out or general and not each.elsewhere]
    return ComponentRef(use=name, **ref.options), note + _why(told)


def _why(passed: list[_Passed]) -> str:
    return f" ({'; '.join(each.reason for each in passed)})" if passed else ""


def _must_be_told(registry: Registry, name: str, ref: ComponentRef) -> bool:
    """Whether a backend has options without a default, such as its parts, that ``ref`` does not give: "auto" can never
    choose it, and nobody who reads why need hear of it."""
    try:
        fields = registry.load("attention", name).Options.model_fields
    except ConfigError:
        return False
    return any(field.is_required() and option not in ref.options for option, field in fields.items())


def _answers(
    registry: Registry, kind: str, ref: ComponentRef, path: str, ask: Callable[[Any], _Answer],
) -> Iterator[tuple[Entry, str, _Answer | ConfigError]]:
    """(entry, how a config names it, what it answers when it is built with the options of ``ref``, or why it cannot be
    used here) of every component of ``kind``. It is named with its package where several bring the name, so that no
    package can take ours out of the choice by its name.

    Nobody has named these: whatever a stranger's raises is why it is passed over. Of hotswap's own only ConfigError is;
    anything else is a mistake, of which nobody would hear.
    """
    entries = [entry for entry in registry.entries if entry.kind == kind]
    bringing = Counter(entry.name for entry in entries)
    for entry in entries:
        name = entry.name if bringing[entry.name] == 1 else f"{entry.distribution}:{entry.name}"
        answer: _Answer | ConfigError
        try:
            answer = ask(registry.build(kind, ComponentRef(use=name, **ref.options), path, known_keys()))
        except ConfigError as error:
            answer = error
        except Exception as error:
            if entry.ours:
                raise
            answer = BrokenComponentError(f"{entry} raised {type(error).__name__}: {error}", path)
        yield entry, name, answer


def choose_executor(
    registry: Registry, ref: ComponentRef, components: Mapping[str, Component],
) -> tuple[ComponentRef, list[str]]:
    """What ``execution: auto`` means beside ``components``: of the executors that offer what these require the one that
    offers the least else, hotswap's own before those of other packages. Those that cannot be used here are passed
    over. ConfigError where none is left.
    """
    needs = {need.capability: path for path, component in components.items()
             for need in component.describe().requires if need.kinds == ("executor",)}
    ranked, refused = [], []

    def offered(executor: Executor) -> frozenset[str]:
        return executor.describe().offers

    for entry, name, offers in _answers(registry, "executor", ref, "execution", offered):
        if isinstance(offers, ConfigError):
            refused += problems_of(offers)
        elif needs.keys() <= offers:
            ranked.append((not entry.ours, len(offers), name))
    if not ranked:
        raise_problems(list(dict.fromkeys(refused)))
        wanted = " and ".join(f"'{need}', which {path} requires" for need, path in needs.items())
        raise ConfigError(f"no installed executor offers {wanted}; install one, or leave the strategies out.",
                          "execution")
    *_, name = min(ranked)
    notes = [f"execution: auto chose '{name}', because it offers '{need}', which {path} requires"
             for need, path in needs.items()]
    return ComponentRef(use=name, **ref.options), notes
