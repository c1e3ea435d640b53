"""The experiment file as a model: what is compared, under which load, and when there is enough of it.

Durations and shares have units: ``500ms``, ``2s``, ``3%``. A number without one is refused, since it could be meant in
several.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from hotswap.core.config.files import read_file
from hotswap.core.config.schema import Count, Section
from hotswap.core.explain import Problem, explain, join, raise_problems
from hotswap.core.interfaces.component import ComponentRef
from hotswap.lab.metrics import COMPARED, METRICS, Slo
from hotswap.lab.refusals import BASE
from hotswap.lab.settings import LoadSection, Positive, Slos, known
from hotswap.lab.statistics.settings import Settings

_ARM_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+=:-]*")


class BlockSection(Section):
    """A block is what an arm serves before the other one has its turn. Noise of a machine comes and goes over seconds
    and minutes: arms that take turns faster than that suffer it alike, and it cancels."""

    seconds: Positive = 1.0
    """As many requests as the slowest arm needs about so long for, found out while warming up."""
    requests: Count | None = None
    """A fixed number instead."""


class Experiment(Section):
    """The whole file."""

    name: str | None = None
    """The title of the report."""
    base: str | dict[str, Any] | None = None
    """A config file, relative to this one, or a config. Not needed where every arm is a URL."""
    arms: dict[str, dict[str, Any]]
    """Name -> what is different from the base, by section or with dots, as in --set; or ``url`` (and ``model``,
    ``api_key``, ``token_ids``) of a server."""
    against: str = BASE
    """The arm that the others are compared with. ``base``, where no arm is called so: the base config as it is."""
    workload: ComponentRef = ComponentRef(use="synthetic")
    load: LoadSection = LoadSection()
    block: BlockSection = BlockSection()
    slo: Slos = Field(default_factory=dict)
    """Most that a good request may take, by latency: ``{ttft: 500ms, tpot: 50ms}``."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Fields that every request has. What is not said is not sent."""
    metrics: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: list(COMPARED))
    """What is compared. Each more costs all of them some certainty."""
    statistics: Settings = Settings()
    """How it is judged, and when there is enough."""
    minutes: Positive = 10.0
    """The run takes no longer than this, loading and warming up aside."""
    pairs: Annotated[int, Field(ge=2, multiple_of=2)] | None = None
    """No more pairs of blocks than this; even, since only two pairs are balanced."""
    cache: Literal["cold", "warm"] = "cold"
    """cold: every block starts with an empty prefix cache. warm: with what the blocks before left, which is the same
    for all arms."""
    warm_up: Annotated[int, Field(ge=1, le=100)] = 2
    """Blocks of each arm that are not counted."""
    seed: int = 0
    """Of the workload, the arrivals and the order of arms."""
    processes: Literal["auto", "shared", "separate"] = "auto"
    """shared: all arms in this process, with one copy of the weights. separate: each is a server of its own, and its
    memory can be told. auto: shared where that can be."""
    out: str | None = None
    """The folder for records and report, relative to the working directory."""

    @field_validator("arms")
    @classmethod
    def _arms_with_names(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        if not arms:
            raise ValueError("there should be an arm, such as 'static: {scheduler: static}'.")
        for name in arms:
            if not _ARM_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name for an arm: a letter or digit, then those and . _ + = : -")
        return arms

    @field_validator("metrics")
    @classmethod
    def _known_metrics(cls, names: list[str]) -> list[str]:
        return [known(name, [spec.name for spec in METRICS]) for name in dict.fromkeys(names)]

    @model_validator(mode="after")
    def _something_to_compare(self) -> "Experiment":
        if self.base is None and not all("url" in arm for arm in self.arms.values()):
            raise ValueError("'base' is required where an arm is no URL: the config that arms are changes of.")
        if self.against not in self.arms and (self.against != BASE or self.base is None):
            raise ValueError(f"'against' names no arm; there are {', '.join(self.arms)}.")
        for name in (*self.statistics.decide, *self.statistics.margins):
            known(name, self.metrics)
        if not self.compared:
            raise ValueError(f"there is nothing but {self.against!r}; give an arm to compare with it.")
        return self

    @property
    def compared(self) -> list[str]:
        """The arms that are compared with the one of ``against``."""
        return [name for name in self.arms if name != self.against]

    @property
    def limits(self) -> Slo:
        return Slo(self.slo)


def load_experiment(
    source: str | Path | Mapping[str, Any], folder: Path = Path(),
    beyond: Callable[["Experiment"], Iterable[Problem]] = lambda experiment: (),
) -> Experiment:
    """Read an experiment file (YAML, JSON or TOML), or take a mapping, whose paths are relative to ``folder``.
    ConfigError tells every problem with its path. ``beyond``: what is wrong with an experiment that is well formed;
    where a part of this one is not, the rest is asked, so that all is told at once."""
    if isinstance(source, Mapping):
        values = dict(source)
    else:
        values, folder = read_file(Path(source)), Path(source).parent
    if isinstance(values.get("base"), str):
        values["base"] = str(folder / values["base"])
    try:
        return Experiment.model_validate(values)
    except ValidationError as error:
        rest = _without(values, [detail["loc"] for detail in error.errors()])
        raise_problems([
            *explain(error, Experiment, known=_known_keys()), *([] if rest is None else beyond(rest))])
        raise


def _without(values: Mapping[str, Any], wrong: Iterable[tuple[int | str, ...]]) -> Experiment | None:
    """The experiment without the sections, and the arms, in which something is ill formed; None where that is none."""
    left = {loc[:2] if loc[:1] == ("arms",) else loc[:1] for loc in wrong}
    rest = {key: value for key, value in values.items() if (key,) not in left}
    if isinstance(rest.get("arms"), Mapping):
        rest["arms"] = {name: arm for name, arm in rest["arms"].items() if ("arms", name) not in left}
    try:
        return Experiment.model_validate(rest)
    except ValidationError:
        return None


def overrides(given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """``{scheduler: {use: static}}`` and ``{scheduler.use: static}`` alike, as --set has them."""
    for key, value in given.items():
        path = join(prefix, str(key))
        if isinstance(value, Mapping) and value:
            yield from overrides(value, path)
        else:
            yield f"{path}={json.dumps(value)}"


def _known_keys() -> dict[str, str]:
    """What somebody may type at the top -> the path that is meant."""
    keys = {name: name for name in Experiment.model_fields}
    for section, model in (("load", LoadSection), ("block", BlockSection), ("statistics", Settings)):
        keys |= {inner: f"{section}.{inner}" for inner in model.model_fields}
    return keys
