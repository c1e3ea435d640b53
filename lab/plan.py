"""An experiment worked out: which arms there are and how each runs. All that can be refused is refused here, before a
model is loaded."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hotswap.core.config import ResolvedConfig, load_config
from hotswap.core.config.check import check_config
from hotswap.core.errors import ConfigError
from hotswap.core.explain import Problem, join, nearest, raise_problems
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.core.registry import Registry
from hotswap.lab.experiment import Experiment, overrides
from hotswap.lab.refusals import BASE, Refusals
from hotswap.lab.requests import check_limits, check_sampling, check_workload, context_of, endless, length_of
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
    """ConfigError for whatever cannot work: all that can be known without the model at once; behind that, a model that
    cannot be opened, or requests that do not fit it."""
    parts = _Parts(experiment)
    raise_problems(parts.refusals.problems)
    assert parts.workload is not None  # or it would have been refused
    known = [*parts.configs.values()] or ([] if parts.base is None else [parts.base])
    context, tokenizer = context_of(experiment.seed, known, parts.lengths, progress)
    check_workload(parts.workload, context, experiment.load.loop)
    return Plan(experiment, parts.arms, parts.workload, context, tokenizer, bool(parts.separate), parts.notes)


def refusals(experiment: Experiment) -> list[Problem]:
    """What is wrong with a file that is well formed, as far as that can be known without its model."""
    return _Parts(experiment).refusals.problems


class _Parts:
    """All that an experiment names, as far as it is there; what is not is among the ``refusals``."""

    def __init__(self, experiment: Experiment) -> None:
        self.refusals, self.notes = Refusals(), list[str]()
        self._experiment, attempt = experiment, self.refusals.attempt
        self.workload: Workload | None = attempt(
            "", partial(Registry().build, "workload", experiment.workload, "workload"))
        self.base = None if experiment.base is None else attempt(BASE, partial(load_config, experiment.base))
        self.names = [experiment.against, *experiment.compared]
        self.servers = [name for name in self.names if "url" in experiment.arms.get(name, {})]
        found = {name: attempt(path_of(experiment, name), partial(self._arm, name)) for name in self.names}
        self.arms = [arm for arm in found.values() if arm is not None]
        self.lengths = [
            attempt(path_of(experiment, arm.name), partial(length_of, arm.endpoint))
            for arm in self.arms if arm.endpoint is not None]
        self.configs = self._of_one_model()
        for name, resolved in self.configs.items():
            attempt(path_of(experiment, name), partial(check_config, resolved.config, Registry()))
        ours = len(self.servers) < len(self.names)
        attempt("", partial(check_sampling, experiment.sampling, ours=ours))
        self.separate = attempt("", partial(self._separate, ours))
        attempt("", partial(check_limits, experiment.limits, bool(self.servers or self.separate)))
        attempt("", partial(check_out, experiment.out))

    def _arm(self, name: str) -> ArmPlan:
        experiment, given = self._experiment, self._experiment.arms.get(name, {})
        if "url" in given:
            raise_problems([*_wrong_keys(given)])
            return ArmPlan(name, endpoint=Endpoint(
                str(given["url"]), given.get("model"), experiment.sampling, api_key=given.get("api_key"),
                token_ids=given.get("token_ids", False), reset=given.get("reset", False)))
        assert experiment.base is not None  # the model has seen to it
        return ArmPlan(name, load_config(experiment.base, list(overrides(given))))

    def _of_one_model(self) -> dict[str, ResolvedConfig]:
        """The arms that are engines of ours. Those with another model than the first answer other questions."""
        configs = {arm.name: arm.config for arm in self.arms if arm.config is not None}
        models = {name: (one.config.model.source, one.config.model.revision) for name, one in configs.items()}
        first = next(iter(models), "")
        others = [name for name, model in models.items() if model != models[first]]
        self.refusals.problems += [
            Problem(join("arms", name, "model"), (
                f"the arm serves {_model(models[name])}, but {first!r} serves {_model(models[first])}; arms differ in "
                "the parts around one model")) for name in others]
        return {name: config for name, config in configs.items() if name not in others}

    def _separate(self, ours: bool) -> bool:
        """Whether our engines run as servers of their own, by the file or by need."""
        wanted = self._experiment.processes
        if wanted == "shared" and self.servers:
            raise ConfigError("a server is another process; leave processes out", "processes")
        why = "an arm is a server, and is spoken to over HTTP" if self.servers and ours else _apart(self.configs)
        if wanted == "separate" or why is None:
            return wanted == "separate"
        if wanted == "shared":
            raise ConfigError(f"arms cannot share this process: {why}; choose separate", "processes")
        self.notes.append(f"arms run as separate processes: {why}")
        return True


def path_of(experiment: Experiment, name: str) -> str:
    """Where the file says what the arm is."""
    return join("arms", name) if name in experiment.arms else BASE


def _wrong_keys(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Of an arm that is a server."""
    for key in given:
        if key not in _URL_KEYS:
            near = nearest(key, _URL_KEYS)
            hint = f" Did you mean {near!r}?" if near else ""
            yield Problem(key, f"unknown key beside 'url'.{hint} Valid here: {', '.join(_URL_KEYS)}.")
    for key in ("token_ids", "reset"):
        if not isinstance(given.get(key, False), bool):
            yield Problem(key, f"should be true or false, not {given[key]!r}")


def _model(model: tuple[str, str | None]) -> str:
    return model[0] if model[1] is None else f"{model[0]} at {model[1]}"


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
    """ConfigError where a report could not be written, which nobody wants to learn at the end. Leaves nothing there."""
    if out is None:
        return
    folder = Path(out)
    try:
        with TemporaryFile(dir=next(path for path in (folder, *folder.absolute().parents) if path.exists())):
            """It can be written."""
    except OSError as error:
        raise ConfigError(f"nothing can be written to {out!r}: {error.strerror or error}", "out") from error
