"""Parts of an experiment that a single measurement has, too: load, limits on latencies, and how durations are spelled.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator

from hotswap.core.config.schema import Count, Section
from hotswap.core.explain import explain, nearest, raise_problems
from hotswap.lab.load import ClosedLoop, Load, OpenLoop
from hotswap.lab.metrics import LATENCIES, Slo

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z%]*)")


def parse_seconds(value: object) -> object:
    """``"500ms"``, ``"2 s"``, ``"1.5min"`` in seconds. ValueError for what has no unit, or an unknown one."""
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2] not in _SECONDS:
        raise ValueError(f"should be a duration with its unit ({', '.join(_SECONDS)}), such as '500ms', not {value!r}.")
    return float(match[1]) * _SECONDS[match[2]]


Duration = Annotated[
    float, Field(gt=0, allow_inf_nan=False), BeforeValidator(parse_seconds),
    WithJsonSchema({"type": "string", "description": "A number with a unit: '500ms', '2s', '1.5min'."})]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False, strict=False)]


def known(name: str, names: Iterable[str]) -> str:
    if name not in names:
        near = nearest(name, names)
        hint = f" Did you mean '{near}'?" if near else ""
        raise ValueError(f"there is no {name!r}.{hint} There are {', '.join(names)}.")
    return name


def _known_latencies(slo: dict[str, float]) -> dict[str, float]:
    return {known(name, LATENCIES): most for name, most in slo.items()}


Slos = Annotated[dict[str, Duration], AfterValidator(_known_latencies)]


class LoadSection(Section):
    """Closed: ``concurrency`` requests are kept in flight. Open: ``rate`` requests a second, or the workload's own
    times. By default closed, with 8."""

    concurrency: Count | None = None
    rate: Positive | None = None
    """Requests a second."""
    arrivals: Literal["poisson", "constant", "bursty", "workload"] = "poisson"
    """Of an open loop; workload: at the items' own times."""
    burstiness: Positive = 0.25
    """Shape of the gamma distribution of gaps when bursty: 1 is Poisson, less is burstier."""
    limit: Count | None = None
    """Of an open loop: most requests under way; who waits for that at the client is charged for it."""

    @model_validator(mode="after")
    def _one_loop(self) -> "LoadSection":
        own_times = self.arrivals == "workload"
        if self.concurrency is not None and (self.rate is not None or own_times or self.limit is not None):
            raise ValueError("'concurrency' makes a closed loop, 'rate', 'limit' and the workload's own times an open "
                             "one; keep one of them.")
        if own_times and self.rate is not None:
            raise ValueError("the workload's own times know no 'rate'; leave it out.")
        if self.concurrency is None and self.rate is None and "arrivals" in self.model_fields_set and not own_times:
            raise ValueError(f"{self.arrivals} arrivals need a 'rate'.")
        return self

    @property
    def loop(self) -> Load:
        if self.rate is None and self.arrivals != "workload":
            return ClosedLoop(self.concurrency or 8)
        return OpenLoop(self.rate or 1.0, self.arrivals, self.burstiness, self.limit)


class _Part(Section):
    load: LoadSection = LoadSection()
    slo: Slos = Field(default_factory=dict)


def load_part(values: Mapping[str, Any]) -> tuple[Load, Slo]:
    """The ``load`` and ``slo`` of an experiment alone. ConfigError tells every problem."""
    try:
        part = _Part.model_validate(dict(values))
    except ValidationError as error:
        raise_problems(explain(error, _Part))
        raise
    return part.load.loop, Slo(part.slo)
