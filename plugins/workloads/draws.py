"""What workloads draw: lengths, pauses and tokens, each from a generator that is named, so that one does not move the
others."""

import math
from random import Random
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from hotswap.core.interfaces.workload import WorkloadContext


class _Distribution(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    def __str__(self) -> str:
        given = ", ".join(f"{name}: {value}" for name, value in self if name != "dist")
        return f"{{dist: {self.dist}, {given}}}"  # type: ignore[attr-defined]


class Fixed(_Distribution):
    """Always the same."""

    dist: Literal["fixed"] = "fixed"
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @property
    def most(self) -> float:
        return self.value

    def draw(self, random: Random) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:g}"


class Uniform(_Distribution):
    """Each value from ``low`` to ``high`` is as likely."""

    dist: Literal["uniform"]
    low: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    high: Annotated[float, Field(ge=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _in_order(self) -> "Uniform":
        if self.low > self.high:
            raise ValueError(f"low ({self.low:g}) is above high ({self.high:g}).")
        return self

    @property
    def most(self) -> float:
        return self.high

    def draw(self, random: Random) -> float:
        return random.uniform(self.low, self.high)


class Lognormal(_Distribution):
    """Many short and few long ones, as in what people type: half are below ``median``, two thirds within a factor of
    e^``sigma`` of it. What exceeds ``max`` is cut to it."""

    dist: Literal["lognormal"]
    median: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sigma: Annotated[float, Field(ge=0, le=5)]
    max: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    @model_validator(mode="after")
    def _in_order(self) -> "Lognormal":
        if self.median > self.max:
            raise ValueError(f"median ({self.median:g}) is above max ({self.max:g}).")
        return self

    @property
    def most(self) -> float:
        return self.max

    def draw(self, random: Random) -> float:
        return min(self.max, random.lognormvariate(math.log(self.median), self.sigma))


def _bare_number(value: Any) -> Any:
    """A number stands for a distribution with nothing else in it."""
    bare = isinstance(value, (int, float)) and not isinstance(value, bool)
    return {"dist": "fixed", "value": value} if bare else value


Distribution = Annotated[
    Annotated[Fixed | Uniform | Lognormal, Field(discriminator="dist")], BeforeValidator(_bare_number)]
"""A number, or a table with ``dist``: fixed, uniform or lognormal."""


def fixed(value: float) -> Fixed:
    """For defaults."""
    return Fixed(value=value)


def length(distribution: Fixed | Uniform | Lognormal, random: Random, least: int = 1) -> int:
    """A number of tokens: whole, and at least ``least``."""
    return max(least, round(distribution.draw(random)))


def longest(distribution: Fixed | Uniform | Lognormal, least: int = 1) -> int:
    """The greatest :func:`length`."""
    return max(least, round(distribution.most))


def tokens(context: WorkloadContext, name: str, count: int) -> tuple[int, ...]:
    """``count`` token ids, the same for the same seed and name; fewer are the head of more."""
    return tuple(generator(context, name).choices(range(context.vocab_size), k=count))


def generator(context: WorkloadContext, name: str) -> Random:
    """A generator of its own for ``name``: seeded from text, it is the same on every machine."""
    return Random(f"{context.seed}:{name}")
