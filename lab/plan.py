"""An experiment worked out: which arms there are and how each runs. All that can be refused is refused here, before a
model is loaded."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from hotswap.core.config import ResolvedConfig, load_config
from hotswap.core.config.check import check_config
from hotswap.core.engine.build import open_model
from hotswap.core.errors import ConfigError, RequestError
from hotswap.core.explain import Problem, join, nearest, problems_of, raise_problems
from hotswap.core.interfaces.workload import WorkItem, Workload, WorkloadContext
from hotswap.core.registry import Registry
from hotswap.lab.experiment import Experiment
from hotswap.lab.targets.openai import Endpoint, OpenAITarget
from hotswap.server.frontend import sampling_of
from hotswap.server.templates.chat import ChatTemplate

CHECKED_ITEMS = 1000
"""So many requests of a workload are looked at before anything is loaded."""
_NOT_FOR_SAMPLING = {
    "max_tokens": "the workload says how long answers are", "n": "a request is measured as one answer",
    "stream": "answers are always streamed", "prompt": "it comes from the workload",
}
_URL_KEYS = ("url", "model", "api_key", "token_ids")
FOREIGN_VOCABULARY = 1000
"""Ids below this are words or parts of words in every vocabulary that we know of."""
FOREIGN_LENGTH = 2048
"""The context of a server that does not tell."""


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
        return endless(self.workload, self.context)


def endless(workload: Workload, context: WorkloadContext) -> Iterator[WorkItem]:
    """The workload's requests, for ever: one that ends begins again with the next seed."""
    seed, count = context.seed, 0
    while True:
        first = count
        for item in workload.items(replace(context, seed=seed)):
            count += 1
            yield item if item.after is None else replace(item, after=item.after + first)
        if count == first:
            raise ConfigError("it has no requests", "workload")
        seed += 1


def make_plan(experiment: Experiment, *, progress: bool = True) -> Plan:
    """ConfigError for whatever cannot work."""
    registry = Registry()
    workload: Workload = registry.build("workload", experiment.workload, "workload")
    base = None if experiment.base is None else _resolved(experiment, {}, experiment.against)
    arms = [_arm(experiment, name, experiment.arms.get(name, {})) for name in _names(experiment)]
    configs = {arm.name: arm.config for arm in arms if arm.config is not None}
    _same_model(configs)
    for name, config in configs.items():
        with _named(name):
            check_config(config.config, Registry())
    check_sampling(experiment.sampling, ours=bool(configs))
    notes: list[str] = []
    separate = _separate(experiment, configs, notes)
    known = [*configs.values()] or ([] if base is None else [base])
    endpoints = [arm.endpoint for arm in arms if arm.endpoint is not None]
    context = context_of(experiment.seed, known, endpoints, progress)
    check_workload(workload, context)
    plan = Plan(experiment, arms, workload, context, separate, notes)
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


def check_sampling(fields: Mapping[str, Any], ours: bool) -> None:
    """``ours``: an engine of ours gets them. Other servers may know more fields, and judge them themselves."""
    for name, why in _NOT_FOR_SAMPLING.items():
        if name in fields:
            raise ConfigError(f"{why}; leave it out", join("sampling", name))
    if ours:
        try:
            sampling_of(fields)
        except RequestError as error:
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


def context_of(
    seed: int, configs: Iterable[ResolvedConfig], endpoints: Iterable[Endpoint], progress: bool,
) -> WorkloadContext:
    """What a workload may know: of our model, or of a foreign one as far as its server tells."""
    told = [OpenAITarget(endpoint, lambda: 0.0).probe() for endpoint in endpoints]
    lengths = [int(entry["max_model_len"]) for entry in told if entry.get("max_model_len")]
    opened = [open_model(one.config, Registry(), progress=progress) for one in configs]
    if not opened:
        return foreign_context(seed, min(lengths, default=FOREIGN_LENGTH))
    checkpoint, vocab_size = opened[0].checkpoint, opened[0].facts.vocab_size
    length = min([one.max_model_len for one in opened] + lengths)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template
    if template is None:
        return WorkloadContext(seed, vocab_size, length, tokenizer.encode)
    chat = ChatTemplate(template, tokenizer)

    def encode_chat(messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return chat.encode(
            messages, add_generation_prompt=True, continue_final_message=False, variables=None,
            check_length=lambda text: None)

    return WorkloadContext(seed, vocab_size, length, tokenizer.encode, encode_chat)


def foreign_context(seed: int, max_model_len: int, vocab_size: int = FOREIGN_VOCABULARY) -> WorkloadContext:
    """Of a server whose tokenizer we do not have."""
    def encode(text: str) -> list[int]:
        raise ConfigError(
            "it has texts, and there is no tokenizer to make tokens of them; give a base config with the model that "
            "the server has", "workload")
    return WorkloadContext(seed, vocab_size, max_model_len, encode)


def check_workload(workload: Workload, context: WorkloadContext) -> None:
    """The first requests fit into the shortest context."""
    for index, item in enumerate(islice(endless(workload, context), CHECKED_ITEMS)):
        if not item.prompt or len(item.prompt) + item.max_tokens > context.max_model_len:
            raise ConfigError(
                f"request {index} has {len(item.prompt)} tokens and asks for {item.max_tokens}, but the context of the "
                f"shortest arm holds {context.max_model_len}; make it shorter, or raise max_model_len", "workload")


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
