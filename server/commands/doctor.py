"""``hotswap plugins doctor``: what a user of a plugin will meet, before the user does.

Each look at a component is a :class:`Finding`. A problem means that it cannot be used as it is; a warning, that it can
be made better; skipped, that something must be given or installed first.
"""

import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from pydantic import ValidationError

from hotswap.core.errors import ConfigError
from hotswap.core.interfaces.component import Component, ComponentRef, Description
from hotswap.core.registry import Entry, Registry, Status
from hotswap.server.commands.doctor_kit import at, place_in, run_kit
from hotswap.server.commands.strangers import aside, run_child

SLOW_IMPORT_S = 1.0
IMPORT_TIMEOUT_S = 60.0
"""A module that takes longer is taken for one that never ends."""

HEAVY = ("torch", "transformers", "triton", "ray", "scipy", "pandas", "matplotlib", "tensorflow", "jax", "fastapi")
"""Packages whose import takes long: they are named where a component brings them."""

THERE_ANYWAY = dict.fromkeys((
    "attention", "executor", "kv_transfer", "logits_processor", "model", "operators", "quantization", "speculator"),
    ("torch",))
"""By kind: what it costs nothing to import. Parts that compute with tensors, or send them, stand beside an attention
backend in every config, and that one brings torch."""

ENDS = ("import", "contract", "options", "description")
"""Checks behind which nothing can be looked at, where they find a problem."""

_IMPORT = """
import functools, importlib, json, sys, time, traceback
result, module, name, *before = sys.argv[1:]
for other in before:
    importlib.import_module(other)
known, began = {name.partition(".")[0] for name in sys.modules}, time.perf_counter()
try:
    found = importlib.import_module(module)
    seconds = time.perf_counter() - began
    functools.reduce(getattr, filter(None, name.split(".")), found)
except Exception as error:
    told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
else:
    told = {"seconds": seconds, "modules": sorted({name.partition(".")[0] for name in sys.modules} - known)}
with open(result, "w") as file:
    json.dump(told, file)
"""
"""Writes a file, since the module may print, or end the interpreter."""


class Health(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    SKIPPED = "skipped"


class Finding(NamedTuple):
    component: str
    check: str
    health: Health
    detail: str


@dataclass(frozen=True)
class Patient:
    """One component, and the options that it is to be built with."""

    entry: Entry
    registry: Registry
    options: Mapping[str, Any]

    @property
    def use(self) -> str:
        return f"{self.entry.distribution}:{self.entry.name}"

    @property
    def cls(self) -> type[Component]:
        return self.registry.load(self.entry.kind, self.use)

    @property
    def refused(self) -> bool:
        """Whether its metadata alone rules it out."""
        return any(
            item.status is Status.INCOMPATIBLE for item in self.registry.listing(self.entry.kind)
            if (item.name, item.distribution) == (self.entry.name, self.entry.distribution))

    def build(self) -> Any:
        return self.registry.build(self.entry.kind, ComponentRef(use=self.use, **self.options), "")


def examine(patient: Patient, kit: bool = True) -> Iterator[Finding]:
    """Every check of one component, in order; those behind one that ends the examination are left out."""
    name = f"{patient.entry.kind}:{patient.entry.name}"
    for check, look in (
        ("import", _import), ("contract", _contract), ("documentation", _documentation), ("options", _options),
        ("description", _description), *([("kit", _kit)] if kit else []),
    ):
        health, detail = _guarded(look, patient)
        yield Finding(name, check, health, detail)
        if health is Health.PROBLEM and check in ENDS or health is Health.SKIPPED and check == "options":
            return


def _guarded(look: Callable[[Patient], tuple[Health, str]], patient: Patient) -> tuple[Health, str]:
    """A stranger's code may raise anything, and print: standard output is for findings."""
    try:
        with aside():
            return look(patient)
    except ConfigError as error:
        return Health.PROBLEM, str(error)
    except (Exception, SystemExit) as error:
        return Health.PROBLEM, f"{type(error).__name__}: {error}"


def _import(patient: Patient) -> tuple[Health, str]:
    """In an interpreter of its own, which has what hotswap itself has imported by then. Never what does not fit."""
    if patient.refused:
        return Health.SKIPPED, "it was written for another contract, and so is not imported"
    (module, _, name), before = patient.entry.value.partition(":"), THERE_ANYWAY.get(patient.entry.kind, ())
    with TemporaryDirectory(prefix="hotswap-doctor-") as folder:
        result = Path(folder) / "result.json"
        done = run_child(
            [sys.executable, "-P", "-c", _IMPORT, str(result), module, name, "hotswap.core.registry", *before],
            IMPORT_TIMEOUT_S)
        if done.code is None:
            return Health.PROBLEM, f"importing {module} has not ended within {IMPORT_TIMEOUT_S:g} s"
        if not result.exists():
            said = done.err.strip().splitlines() if done.code else []
            ends = f"importing {module} ends the interpreter, with exit code {done.code}"
            return Health.PROBLEM, said[-1] if said else ends
        found = json.loads(result.read_text())
    if "error" in found:
        return Health.PROBLEM, found["error"] + at(place_in(found["trace"], module))
    heavy = [name for name in HEAVY if name in found["modules"]]
    told = f"{found['seconds']:.2f} s" + (f", and brings {', '.join(heavy)}" if heavy else "")
    advice = []
    if found["seconds"] > SLOW_IMPORT_S:
        advice.append("import what takes long inside the methods that need it: `config check` imports the module, too")
    if done.out:
        advice.append("it prints while it is imported, into what others read from standard output: log it instead")
    return (Health.WARNING, "; ".join([told, *advice])) if advice else (Health.OK, told)


def _contract(patient: Patient) -> tuple[Health, str]:
    contract = patient.cls.contract  # raises where it does not fit
    if patient.entry.declared is None:
        return Health.WARNING, (
            f"its class says {contract}, its package nothing: add {patient.entry.kind} = "
            f"\"v{contract.rpartition('/')[2]}\" under [project.entry-points.\"hotswap.contract\"], so that another "
            "hotswap can refuse it before it runs it")
    return Health.OK, contract


def _documentation(patient: Patient) -> tuple[Health, str]:
    doc = patient.cls.__doc__ or ""
    if not doc.strip():
        return Health.WARNING, "the class has no docstring: say in it what it does and when to choose it"
    if "Choose it ..." in doc:
        return Health.WARNING, "its docstring still says 'Choose it ...' where it should say when"
    return Health.OK, inspect.cleandoc(doc).partition("\n\n")[0].replace("\n", " ").partition(". ")[0]


def _options(patient: Patient) -> tuple[Health, str]:
    fields = patient.cls.Options.model_fields
    schema = patient.cls.Options.model_json_schema()
    json.dumps(schema)
    missing = [name for name, field in fields.items() if field.is_required() and name not in patient.options]
    if missing:
        return Health.SKIPPED, f"it must be told {', '.join(missing)}: give --set {missing[0]}=VALUE"
    try:
        json.dumps(patient.build().options.model_dump(mode="json"))
    except (TypeError, ValidationError) as error:
        return Health.PROBLEM, f"its options cannot be written as JSON, as reports and other processes need: {error}"
    bare = [name for name, field in fields.items() if not field.description]
    if bare:
        return Health.WARNING, f"no docstring behind {', '.join(bare)}: `plugins show` has nothing to say of them"
    return Health.OK, f"{', '.join(fields)}: each described" if fields else "it has none"


def _description(patient: Patient) -> tuple[Health, str]:
    component = patient.build()
    found = component.describe()
    if not isinstance(found, Description) or found != component.describe():
        return Health.PROBLEM, f"describe() should return the same Description each time, and returned {found!r}"
    for requirement in found.requires:
        if unknown := [kind for kind in requirement.kinds if kind not in patient.registry.kinds]:
            return Health.PROBLEM, f"it requires {requirement.capability!r} of {unknown[0]!r}, which is no kind"
        if not requirement.why:
            return Health.PROBLEM, f"it does not say why it requires {requirement.capability!r}"
    offers = ", ".join(sorted(found.offers)) or "nothing in particular"
    needs = "; ".join(f"{one.capability} of {' or '.join(one.kinds)}" for one in found.requires) or "nothing"
    return Health.OK, f"offers {offers}; requires {needs}"


def _kit(patient: Patient) -> tuple[Health, str]:
    offers = patient.build().describe().offers
    home = patient.entry.value.partition(":")[0]
    report = run_kit(patient.entry.kind, patient.use, patient.options, offers, home)
    if report.skipped:
        return Health.SKIPPED, report.skipped
    if report.broken:
        return Health.PROBLEM, report.broken
    if report.failures:
        return Health.PROBLEM, f"{report.failed} of {report.checks} checks fail:\n" + "\n".join(report.failures)
    return Health.OK, f"{report.checks} checks in {report.seconds:.1f} s"


def told(findings: Iterable[Finding]) -> Iterator[str]:
    """Lines for the terminal, each as soon as it is known: a paragraph a component, and what it comes to."""
    component, counts = "", Counter[Health]()
    for finding in findings:
        counts[finding.health] += 1
        if finding.component != component:
            if component:
                yield ""
            yield finding.component
            component = finding.component
        first, *more = finding.detail.splitlines() or [""]
        yield f"  {finding.health:<8} {finding.check:<14} {first}"
        for line in more:
            yield f"{'':26}{line}"
    yield ""
    yield ", ".join(f"{health} {counts[health]}" for health in (Health.PROBLEM, Health.WARNING, Health.SKIPPED))
