"""An experiment worked out: which arms there are and how each runs. All that can be refused is refused here, before a
model is loaded."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotswap.core.config import ResolvedConfig, load_config
from hotswap.core.config.check import check_config
from hotswap.core.errors import ConfigError
from hotswap.core.explain import Problem, join, nearest, problems_of, raise_problems
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.registry import Registry
from hotswap.lab.experiment import Experiment, overrides
from hotswap.lab.requests import check_limits, check_sampling, check_workload, context_of, endless
from hotswap.lab.targets.openai import Endpoint

_URL_KEYS = ("url", "model", "api_key", "token_ids", "reset")


@dataclass(frozen=True)
class ArmPlan:
    """An arm that is an engine of ours (``config``), or a server that runs already (``endpoint``)."""

    name: str
    config: ResolvedConfig | None = None
    endpoint: Endpoint | None = None

    def told(self) -> dict[str, Any]:
        """The effective config, or which server it is; secrets hidden."""
        if self.config is not None:
            return self.config.effective()
        assert self.endpoint is not None
        return {"url": self.endpoint.url, "model": self.endpoint.model}

    def hash(self) -> str:
        """The same for the same effective config, or the same server."""
        return hashlib.sha256(json.dumps(self.told(), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """``arms``: the base first. ``separate``: whether our engines run as servers of their own, and why."""

    experiment: Experiment
    arms: Sequence[ArmPlan]
    workload: Workload
    context: WorkloadContext
    tokenizer: Tokenizer | None = None
    separate: bool = False
    notes: list[str] = field(default_factory=list)

    def items(self) -> Iterator[WorkItem]:
        return endless(self.workload, self.context)

    def text(self, token: int) -> str:
        """A token as people read it."""
        return str(token) if self.tokenizer is None else self.tokenizer.decode([token], False)


def make_plan(experiment: Experiment, *, progress: bool = True) -> Plan:
    """ConfigError for whatever cannot work."""
    registry = Registry()
    workload: Workload = registry.build("workload", experiment.workload, "workload")
    base = None if experiment.base is None else _resolved(experiment, {}, experiment.against)
    arms = [_arm(experiment, name, experiment.arms.get(name, {})) for name in _names(experiment)]
    configs = {arm.name: arm.config for arm in arms if arm.config is not None}
    _same_model(configs)
    for name, config in configs.items():
        with AtArm(name):
            check_config(config.config, Registry())
    check_sampling(experiment.sampling, ours=bool(configs))
    notes: list[str] = []
    foreign = any(arm.endpoint is not None for arm in arms)
    separate = _separate(experiment, configs, foreign, notes)
    check_limits(experiment.limits, foreign or separate)
    known = [*configs.values()] or ([] if base is None else [base])
    endpoints = [arm.endpoint for arm in arms if arm.endpoint is not None]
    context, tokenizer = context_of(experiment.seed, known, endpoints, progress)
    check_workload(workload, context, experiment.load.loop)
    plan = Plan(experiment, arms, workload, context, tokenizer, separate, notes)
    check_out(experiment.out)
    return plan


def _names(experiment: Experiment) -> list[str]:
    return [experiment.against, *experiment.compared]


def _arm(experiment: Experiment, name: str, given: Mapping[str, Any]) -> ArmPlan:
    if "url" not in given:
        return ArmPlan(name, _resolved(experiment, given, name))
    for key in given:
        if key not in _URL_KEYS:
            near = nearest(key, _URL_KEYS)
            raise ConfigError(
                f"unknown key beside 'url'.{f' Did you mean {near!r}?' if near else ''} Valid here: "
                f"{', '.join(_URL_KEYS)}.", join("arms", name, key))
    for key in ("token_ids", "reset"):
        if not isinstance(given.get(key, False), bool):
            raise ConfigError(f"should be true or false, not {given[key]!r}", join("arms", name, key))
    if experiment.processes == "shared":
        raise ConfigError("a server is another process; leave processes out", "processes")
    return ArmPlan(name, endpoint=Endpoint(
        str(given["url"]), given.get("model"), experiment.sampling, api_key=given.get("api_key"),
        token_ids=given.get("token_ids", False), reset=given.get("reset", False)))


class AtArm:
    """Puts ``arms.NAME`` before the path of what is refused inside."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, ConfigError):
            prefix = join("arms", self._name)
            raise_problems([Problem(join(prefix, p.path) if p.path else prefix, p.message) for p in problems_of(error)])


def _resolved(experiment: Experiment, given: Mapping[str, Any], name: str) -> ResolvedConfig:
    base = experiment.base
    assert base is not None
    with AtArm(name):
        return load_config(base, list(overrides(given)))


def _same_model(configs: Mapping[str, ResolvedConfig]) -> None:
    """Arms of other models answer other questions."""
    models = {name: (config.config.model.source, config.config.model.revision) for name, config in configs.items()}
    first = next(iter(models), None)
    for name, model in models.items():
        if first is not None and model != models[first]:
            raise ConfigError(
                f"the arm serves {_model(model)}, but {first!r} serves {_model(models[first])}; arms differ in the "
                "parts around one model", join("arms", name, "model"))


def _model(model: tuple[str, str | None]) -> str:
    return model[0] if model[1] is None else f"{model[0]} at {model[1]}"


def _separate(
    experiment: Experiment, configs: Mapping[str, ResolvedConfig], foreign: bool, notes: list[str],
) -> bool:
    why = "an arm is a server, and is spoken to over HTTP" if foreign and configs else _apart(configs)
    if experiment.processes == "separate" or why is None:
        return experiment.processes == "separate"
    if experiment.processes == "shared":
        raise ConfigError(f"arms cannot share this process: {why}; choose separate", "processes")
    notes.append(f"arms run as separate processes: {why}")
    return True


def _apart(configs: Mapping[str, ResolvedConfig]) -> str | None:
    """Why arms cannot run in one process on the same weights, if so."""
    first_name, first = next(iter(configs.items()), ("", None))
    for name, resolved in configs.items():
        config = resolved.config
        if config.parallel:
            return f"{name!r} has a parallel list, and its ranks are processes"
        if first is not None and (config.dtype, config.device) != (first.config.dtype, first.config.device):
            return f"{name!r} runs in another dtype or on another device than {first_name!r}"
        if first is not None and config.model != first.config.model:
            return f"{name!r} has other options of the model than {first_name!r}"
    return None


def check_out(out: str | None) -> None:
    """ConfigError where a report could not be written, which nobody wants to learn at the end."""
    if out is None:
        return
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"nothing can be written to {out!r}: {error.strerror or error}", "out") from error
