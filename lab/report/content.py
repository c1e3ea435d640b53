"""What the terminal and the page say of a result, in words and in their order."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hotswap.core.explain import redact
from hotswap.lab.metrics import STATISTICS, error_counts, failed, hit_rate, succeeded, summary
from hotswap.lab.processes import BUSY_CORES
from hotswap.lab.records import BlockRecord, Comparison, MetricSpec, Outcome, RequestRecord, Result
from hotswap.lab.report import words
from hotswap.lab.statistics.settings import Settings

SHOWN = ("ttft", "ttft_answer", "tpot", "itl", "inter_chunk", "e2e", "queue")


@dataclass(frozen=True)
class Row:
    """A line of the table of verdicts. ``found`` and ``spec`` are what it was made from."""

    metric: str
    base: str
    arm: str
    effect: str
    interval: str
    verdict: str
    found: Comparison
    spec: MetricSpec


def base_of(result: Result) -> str:
    """The arm that the others are compared with."""
    names = [*result.configs, *(block.arm for block in result.blocks)]
    return names[0] if names else "base"


def arms_of(result: Result) -> list[str]:
    """The base first."""
    return list(dict.fromkeys([base_of(result), *result.configs, *(block.arm for block in result.blocks)]))


def confidence(result: Result) -> str:
    """With which all intervals hold together: "95 %"."""
    settings = result.experiment.get("statistics") or {}
    return f"{100 * settings.get('confidence', Settings().confidence):g} %"


def rows(result: Result) -> dict[str, list[Row]]:
    """By arm, metrics that no block of either arm could give left out."""
    specs = {spec.name: spec for spec in result.metrics}
    by_arm: dict[str, list[Row]] = {}
    for found in result.comparisons:
        spec = specs[found.metric]
        lines = by_arm.setdefault(found.arm, [])
        if found.n_pairs:
            lines.append(Row(
                found.metric, words.value(found.base_value, spec.unit), words.value(found.arm_value, spec.unit),
                words.effect(found.effect, spec), words.interval(found, spec), words.verdict(found, spec), found, spec))
    return by_arm


def uncompared(result: Result) -> list[str]:
    """Metrics that one of two arms tells and the other never does, such as the acceptance length of the one that
    drafts."""
    units = {spec.name: spec.unit for spec in result.metrics}
    lines = []
    for found in result.comparisons:
        name, pairs = found.metric, result.pairs.get(found.arm, ())
        told = {base_of(result): [pair.base[name] for pair in pairs if name in pair.base],
                found.arm: [pair.arm[name] for pair in pairs if name in pair.arm]}
        if sum(bool(values) for values in told.values()) == 1:
            lines += [f"{arm}: {name} {words.value(median(values), units[name])} in the median of its blocks, with "
                      "nothing to compare it with" for arm, values in told.items() if values]
    return list(dict.fromkeys(lines))


def headline(lines: Sequence[Row]) -> str:
    """An arm in one sentence."""
    parts = []
    for outcome, word in ((Outcome.BETTER, "better"), (Outcome.WORSE, "worse")):
        names = [f"{row.metric} ({row.effect})" for row in lines if row.found.outcome is outcome]
        if names:
            parts.append(f"{word} in {', '.join(names)}")
    counts = Counter(row.found.outcome for row in lines)
    if count := counts[Outcome.NO_DIFFERENCE]:
        parts.append(f"no difference that matters in {count} metric{'s' if count > 1 else ''}")
    if count := counts[Outcome.NOT_ENOUGH_DATA]:
        parts.append(f"not enough data for {count}")
    text = "; ".join(parts) or "nothing could be compared"
    return text[0].upper() + text[1:] + "."


def requests_of(result: Result, arm: str) -> list[RequestRecord]:
    return [record for block in result.blocks if block.arm == arm for record in block.requests]


@dataclass(frozen=True)
class Percentiles:
    """Of one latency of one arm over all its blocks. ``adjusted``: with failures as endless."""

    latency: str
    arm: str
    count: int
    success: list[str]
    adjusted: list[str]
    error_share: str


def percentiles(result: Result) -> Iterator[Percentiles]:
    for name in SHOWN:
        for arm in arms_of(result):
            if found := summary(name, requests_of(result, arm)):
                yield Percentiles(
                    name, arm, found.count, [words.value(found.percentiles[label], "s") for label in STATISTICS],
                    [words.value(found.adjusted[label], "s") for label in STATISTICS],
                    words.value(found.error_share, "share"))


@dataclass(frozen=True)
class Tally:
    """What became of an arm's requests. ``statuses``: failures by status. ``cut``: still under way when a block ended.
    ``hit_rate``: of the prompt tokens of the successes; None where the target does not tell."""

    arm: str
    blocks: int
    disturbed: int
    succeeded: int
    statuses: Mapping[str, int]
    cut: int
    hit_rate: float | None

    @property
    def hits(self) -> str:
        return words.NONE if self.hit_rate is None else words.value(self.hit_rate, "share")

    @property
    def failures(self) -> str:
        return ", ".join(f"{count} x {status}" for status, count in self.statuses.items()) or "none"


def tallies(result: Result) -> list[Tally]:
    return [_tally(arm, [block for block in result.blocks if block.arm == arm]) for arm in arms_of(result)]


def _tally(arm: str, blocks: Sequence[BlockRecord]) -> Tally:
    requests = [record for block in blocks for record in block.requests]
    good = succeeded(requests)
    return Tally(
        arm, len(blocks), sum((block.disturbed or 0.0) > BUSY_CORES for block in blocks), len(good),
        dict(error_counts(requests)), len(requests) - len(good) - len(failed(requests)), hit_rate(requests))


def outputs(result: Result, most: int) -> list[str]:
    """Whether greedy outputs agree with the base's, arm by arm; the first ``most`` places where they do not."""
    lines, counts = divergence_lines(result, most), result.outputs_compared
    if counts is None:
        return lines
    differing = {str(found["arm"]) for found in result.divergences}
    for arm in [arm for arm in arms_of(result)[1:] if arm not in differing]:
        if count := counts.get(arm, 0):
            lines.append(f"{arm}: greedy outputs agree with the base's in all of {count:,} requests")
        else:
            lines.append(f"{arm}: outputs were not compared: only greedy ones are, where both arms tell their tokens")
    return lines


def divergence_lines(result: Result, most: int) -> list[str]:
    """The first ``most`` places where greedy outputs differ from the base's, and how many there are by arm."""
    counts, whole = Counter(str(found["arm"]) for found in result.divergences), result.outputs_compared or {}
    lines = [f"{arm}: greedy outputs differ from the base's in {_requests(count, whole.get(arm))}"
             for arm, count in counts.items()]
    return lines + [_divergence(found) for found in result.divergences[:most]]


def _requests(count: int, whole: int | None) -> str:
    """So many of ``whole``, or of nobody knows how many."""
    among = "" if whole is None else f" of {whole:,}"
    return f"{count:,}{among} request{'' if (whole or count) == 1 else 's'}"


def _divergence(found: Mapping[str, Any]) -> str:
    """Of any record of a divergence: which request, where, and what stood there."""
    where = ", ".join(f"{key} {found[key]}" for key in ("pair", "request", "index", "position") if key in found)
    texts = [found.get(f"{who}_text", found.get(f"{who}_token")) for who in ("base", "arm")]
    return f"{found['arm']}: {where}: {texts[0]!r} in the base, {texts[1]!r} in the arm"


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Leaves of nested mappings by dotted path."""
    leaves: dict[str, str] = {}
    for key, inner in values.items():
        if isinstance(inner, Mapping) and inner:
            leaves |= flat(inner, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = words.NONE if inner is None else str(inner)
    return leaves


def config_differences(result: Result) -> list[tuple[str, list[str]]]:
    """(key, its value in each arm) for the keys in which the arms' configs are not all alike."""
    configs = {arm: flat(redact(dict(result.configs.get(arm, {})))) for arm in arms_of(result)}
    keys = dict.fromkeys(key for config in configs.values() for key in config)
    values = ((key, [config.get(key, words.NONE) for config in configs.values()]) for key in keys)
    return [(key, row) for key, row in values if len(set(row)) > 1]
