"""A result as JSON, and back: all raw samples, nothing lost."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from hotswap.core.explain import redact
from hotswap.lab.journal import block_of
from hotswap.lab.records import Better, Comparison, Look, MetricSpec, Outcome, Pair, Result

FORMAT = 1


def write_result(result: Result, path: Path) -> None:
    """JSON has no infinity and no NaN: they are the strings "inf", "-inf" and "nan". Secrets of configs are hidden."""
    values = {"format": FORMAT, **_plain(asdict(result))}
    values |= {name: redact(values[name]) for name in ("experiment", "configs")}
    path.write_text(json.dumps(values, allow_nan=False, separators=(",", ":"), default=str), "utf-8")


def read_result(path: Path) -> Result:
    """What ``write_result`` wrote. ValueError where it is another version's."""
    values = json.loads(path.read_text("utf-8"))
    if values.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is no result of format {FORMAT}; read it with the version that wrote it.")
    return Result(**{
        **values,
        "metrics": [MetricSpec(**{**metric, "better": Better(metric["better"])}) for metric in values["metrics"]],
        "blocks": [block_of(block) for block in values["blocks"]],
        "comparisons": [_comparison(found) for found in values["comparisons"]],
        "pairs": {arm: [_pair(pair) for pair in pairs] for arm, pairs in values["pairs"].items()},
        "looks": [Look(**look) for look in values["looks"]],
    })


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _comparison(values: Mapping[str, Any]) -> Comparison:
    numbers = {name: float(values[name]) for name in (
        "base_value", "arm_value", "effect", "low", "high", "p", "margin")}
    return Comparison(**{**values, **numbers, "outcome": Outcome(values["outcome"])})


def _pair(values: Mapping[str, Any]) -> Pair:
    sides = {side: {name: float(number) for name, number in values[side].items()} for side in ("base", "arm")}
    return Pair(sides["base"], sides["arm"], values["base_first"])
