"""An experiment worked out: which arms there are and how each runs. All that can be refused is refused here, before a
model is loaded."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from hotswap.core.config import ResolvedConfig, load_config
from hotswap.core.config.check import check_config
from hotswap.core.engine.build import Opened, open_model
from hotswap.core.errors import ConfigError, HotswapError
from hotswap.core.explain import Problem, join, nearest, problems_of, raise_problems
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.core.registry import Registry
from hotswap.lab.experiment import BASE, Experiment
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.server.frontend import sampling_of

CHECKED_ITEMS = 1000
"""So many requests of a workload are looked at before anything is loaded."""
_URL_KEYS = ("url", "model", "api_key", "token_ids")
FOREIGN_VOCABULARY = 1000
"""Ids below this are words or parts of words in every vocabulary that we know of."""


@dataclass(frozen=True)
class ArmPlan:
    """An arm that is an engine of ours (``config``), or a server that runs already (``endpoint``)."""

    name: str
    config: ResolvedConfig | None = None
    endpoint: Endpoint | None = None

    def hash(self) -> str:
        """The same for the same effective config, or the same server."""
        if self.config is not None:
            told: Any = self.config.effective()
        else:
            told = [self.endpoint.url, self.endpoint.model] if self.endpoint else None
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """``arms``: the base first. ``separate``: whether our engines run as servers of their own, and why."""

    experiment: Experiment
    arms: Sequence[ArmPlan]
    workload: Workload
    context: WorkloadContext
    separate: bool = False
    notes: list[str] = field(default_factory=list)

    def items(self) -> Iterator[WorkItem]:
        """The workload's requests, for ever: one that ends begins again with the next seed."""
        seed = self.context.seed
        while True:
            context = WorkloadContext(
                seed, self.context.vocab_size, self.context.max_model_len, self.context.encode)
            empty = True
            for item in self.workload.items(context):
                empty = False
                yield item
            if empty:
                raise ConfigError("it has no requests", "workload")
            seed += 1


def make_plan(experiment: Experiment, *, progress: bool = True) -> Plan:
    """ConfigError for whatever cannot work."""
    registry = Registry()
    workload: Workload = registry.build("workload", experiment.workload, "workload")
    base = None if experiment.base is None else _resolved(experiment, {}, BASE)
    arms = [_arm(experiment, name, experiment.arms.get(name, {})) for name in _names(experiment)]
    configs = {arm.name: arm.config for arm in arms if arm.config is not None}
    _same_model(configs)
    for name, config in configs.items():
        with _named(name):
            check_config(config.config, Registry())
    _check_sampling(experiment)
    notes: list[str] = []
    separate = _separate(experiment, configs, notes)
    context = _context(experiment, base or next(iter(configs.values()), None), configs, arms, progress)
    plan = Plan(experiment, arms, workload, context, separate, notes)
    check_workload(plan)
    check_out(experiment.out)
    return plan


def _names(experiment: Experiment) -> list[str]:
    return [BASE, *(name for name in experiment.arms if name != BASE)]


def _arm(experiment: Experiment, name: str, given: Mapping[str, Any]) -> ArmPlan:
    if "url" not in given:
        return ArmPlan(name, _resolved(experiment, given, name))
    for key in given:
        if key not in _URL_KEYS:
            near = nearest(key, _URL_KEYS)
            raise ConfigError(
                f"unknown key beside 'url'.{f' Did you mean {near!r}?' if near else ''} Valid here: "
                f"{', '.join(_URL_KEYS)}.", join("arms", name, key))
    if experiment.processes == "shared":
        raise ConfigError("a server is another process; leave processes out", "processes")
    return ArmPlan(name, endpoint=Endpoint(
        str(given["url"]), given.get("model"), experiment.sampling, api_key=given.get("api_key"),
        token_ids=bool(given.get("token_ids"))))


class _named:
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
    with _named(name):
        return load_config(base, list(overrides(given)))


def overrides(given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``{scheduler: {use: static}}`` and ``{scheduler.use: static}`` alike, as --set has them."""
    for key, value in given.items():
        path = join(prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from overrides(value, path)
        else:
            yield f"{path}={json.dumps(value)}"


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


def _check_sampling(experiment: Experiment) -> None:
    """The fields are those of a request; other servers may know more."""
    if "max_tokens" in experiment.sampling:
        raise ConfigError("the workload says how long answers are; leave it out", "sampling.max_tokens")
    if experiment.base is not None:
        try:
            sampling_of(experiment.sampling)
        except HotswapError as error:
            raise ConfigError(str(error), "sampling") from error


def _separate(experiment: Experiment, configs: Mapping[str, ResolvedConfig], notes: list[str]) -> bool:
    why = _apart(configs)
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


def _context(
    experiment: Experiment, config: ResolvedConfig | None, configs: Mapping[str, ResolvedConfig],
    arms: Sequence[ArmPlan], progress: bool,
) -> WorkloadContext:
    """What the workload may know: of our model, or of a foreign one as far as its server tells."""
    told = [OpenAITarget(arm.endpoint, lambda: 0.0).probe() for arm in arms if arm.endpoint is not None]
    lengths = [int(entry["max_model_len"]) for entry in told if entry.get("max_model_len")]
    if config is None:
        return foreign_context(experiment.seed, min(lengths, default=2048))
    opened = {name: open_model(one.config, Registry(), progress=progress) for name, one in configs.items()}
    first: Opened = next(iter(opened.values()), None) or open_model(config.config, Registry(), progress=progress)
    tokenizer = first.checkpoint.tokenizer()
    length = min([first.max_model_len, *(one.max_model_len for one in opened.values()), *lengths])
    return WorkloadContext(experiment.seed, first.facts.vocab_size, length, tokenizer.encode)


def foreign_context(seed: int, max_model_len: int, vocab_size: int = FOREIGN_VOCABULARY) -> WorkloadContext:
    """Of a server whose tokenizer we do not have."""
    def encode(text: str) -> list[int]:
        raise ConfigError(
            "it has texts, and there is no tokenizer to make tokens of them; give a base config with the model that "
            "the server has", "workload")
    return WorkloadContext(seed, vocab_size, max_model_len, encode)


def check_workload(plan: Plan) -> None:
    """The first requests fit into the shortest context."""
    most = plan.context.max_model_len
    for index, item in enumerate(islice(plan.items(), CHECKED_ITEMS)):
        if not item.prompt or len(item.prompt) + item.max_tokens > most:
            raise ConfigError(
                f"request {index} has {len(item.prompt)} tokens and asks for {item.max_tokens}, but the context of the "
                f"shortest arm holds {most}; make it shorter, or raise max_model_len", "workload")


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
