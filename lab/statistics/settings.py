"""How an experiment is judged: the keys of its ``statistics`` section."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from hotswap.core.config.schema import Section

Share = Annotated[float, Field(gt=0, lt=1)]
Width = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Settings(Section):
    """The defaults suit ten minutes of short blocks; docs/statistics.md tells what each of them costs."""

    confidence: Share = 0.95
    """Of all statements of an experiment together: 1 minus the share of experiments of two equal arms in which any
    metric of any arm is called better or worse."""
    margin: Width = 0.01
    """The largest difference that does not matter, as a part of the base's value (0.01 is 1 %); of shares, such as the
    hit rate, in points (0.01 is one of a hundred)."""
    margins: dict[str, Width] = {}
    """``margin`` of single metrics, by name; of those that are compared as differences, in their unit."""
    stop: Literal["verdicts", "width", "time"] = "verdicts"
    """When to end before the time is over: once every verdict is in; once every interval is narrow enough; never, which
    looks once, at the end, and so has the narrowest intervals."""
    width: Width | None = None
    """For ``stop: width``: the half width that is narrow enough, in the terms of ``margin``."""
    decide: list[str] = []
    """Metrics that ``stop`` waits for; empty: all that have data."""
    looks: Annotated[int, Field(ge=1, le=200)] = 12
    """How often the verdicts are asked for, at equal shares of the planned time."""
    spending: Annotated[float, Field(ge=0.5, le=5)] = 2.0
    """The exponent rho of alpha * t**rho, the error that may be spent by the share t of the planned time: 1 decides
    early (like Pocock's bounds), 3 keeps nearly all for the end (like O'Brien and Fleming's)."""
    flips: Annotated[int, Field(ge=999, le=1_000_000)] = 16_383
    """Random assignments of the arms that the observed one is compared with."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of those assignments."""

    @model_validator(mode="after")
    def _width_where_it_ends_the_run(self) -> "Settings":
        if (self.stop == "width") != (self.width is not None):
            raise ValueError("'width' and 'stop: width' need each other.")
        return self

    @property
    def alpha(self) -> float:
        """The error of all statements together: 0.05, and not what binary fractions make of 1 - 0.95."""
        return round(1 - self.confidence, 12)
