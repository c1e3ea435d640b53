"""Numbers and verdicts as people read them, on the page and in the terminal."""

from collections.abc import Sequence
from math import expm1, isfinite, isinf, isnan

from hotswap.lab.records import Comparison, MetricSpec, Outcome

NONE = "–"
_SCALES: dict[str, Sequence[tuple[float, str]]] = {
    "s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "µs")],
    "bytes": [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")],
    "share": [(0.01, "%")],
}


def value(number: float, unit: str) -> str:
    """Three digits or more, in the multiple of the unit that suits the size: 0.0123 s is "12.3 ms"."""
    if isnan(number):
        return NONE
    if isinf(number):
        return "unbounded"
    scales = _SCALES.get(unit, [(1.0, unit)])
    size, name = next((scale for scale in scales if abs(number) >= scale[0]), scales[0 if number == 0 else -1])
    return f"{digits(number / size)} {name}"


def digits(number: float) -> str:
    """About three digits: 1234, 123, 12.3, 1.23, 0.0123."""
    size = abs(number)
    if size >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if size >= 10 else f"{number:.2f}" if size >= 1 or number == 0 else f"{number:.3g}"


def effect(number: float, spec: MetricSpec) -> str:
    """"+3.1 %"; of additive metrics the plain difference, of shares in points."""
    if isnan(number):
        return NONE
    if isinf(number):
        return "∞" if number > 0 else "-∞"
    if not number:
        return "0"
    if spec.additive:
        if spec.unit == "share":
            return f"{100 * number:+.2f} points"
        text = value(number, spec.unit)
        return text if text.startswith("-") else f"+{text}"
    if number > 9:
        return f"x {digits(1 + number)}"
    percent = 100 * number
    return f"{percent:+.2f} %" if abs(percent) < 1 else f"{percent:+.1f} %"


def interval(found: Comparison, spec: MetricSpec) -> str:
    low_open = isinf(found.low) or (not spec.additive and found.low <= -1)
    if isnan(found.low) or low_open and isinf(found.high):
        return NONE
    low, high = effect(found.low, spec), effect(found.high, spec)
    return low if low == high else f"{low} … {high}"


def verdict(found: Comparison, spec: MetricSpec) -> str:
    if found.outcome is Outcome.NO_DIFFERENCE:
        return f"no difference > {margin(found, spec)}" if found.margin else "no difference"
    return found.outcome.value


def margin(found: Comparison, spec: MetricSpec) -> str:
    text = effect(found.margin, spec).lstrip("+").replace(".00 ", " ").replace(".0 ", " ")
    return text.removesuffix("s") if text == "1 points" else text


def linear(number: float, spec: MetricSpec) -> float:
    """A difference as statistics computes it (a logarithm of a ratio) as an effect."""
    return number if spec.additive or not isfinite(number) else expm1(number)
