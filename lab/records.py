"""What an experiment measures, as plain values: the requests of a block, the block, the pairs that are compared.

Times are seconds on the load generator's clock, from the start of the block. Everything here can be written as JSON and
read back; reports and statistics see nothing else of a run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Better(StrEnum):
    """Which direction of a metric is the good one."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True)
class MetricSpec:
    """``name`` as in reports ("ttft_p50"); ``unit`` ("s", "tokens/s", "share", "bytes"); ``formula`` in words, printed
    in the report. Ratios of a metric that can be 0 make no sense: ``additive`` compares differences instead."""

    name: str
    unit: str
    better: Better
    formula: str
    additive: bool = False


@dataclass(frozen=True)
class RequestRecord:
    """One request as its client saw it.

    ``planned`` is when it was due, ``sent`` when it left: latency counts from ``planned`` where the load is open.
    ``chunks``: (time, tokens) of each delivery, so that a chunk of several tokens is never taken for one token.
    ``error``: why it failed or was cut; such a request is in no latency and in no goodput. ``incomplete``: the window
    of a run limited in time ended before it did, which is nobody's failure. ``answered``: when the first of the answer
    itself came, behind any reasoning. ``tokens`` are the output's ids where the target tells them. ``queued``,
    ``preemptions``: None where the target does not tell.
    """

    index: int
    planned: float
    sent: float
    chunks: tuple[tuple[float, int], ...]
    ended: float
    prompt_tokens: int
    output_tokens: int
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int | None = None
    queued: float | None = None
    preemptions: int | None = None
    tokens: tuple[int, ...] | None = None
    answered: float | None = None
    incomplete: bool = False


@dataclass(frozen=True)
class BlockRecord:
    """A stretch of time in which one arm served the requests of one pair, alone on the machine.

    ``pair`` numbers the pairs: both of its blocks got the same requests from the same cache state. ``position`` is the
    block's place in the whole run, 0 first. ``engine``: what the engine counted meanwhile (steps, seconds of steps,
    drafts, peak KV bytes …), empty for a foreign server. ``timeline``: (time, running, waiting, cache share).
    ``disturbed``: cores that other processes used meanwhile.
    """

    arm: str
    pair: int
    position: int
    wall: float
    requests: tuple[RequestRecord, ...]
    cpu: float | None = None
    engine: Mapping[str, float] = field(default_factory=dict)
    timeline: tuple[tuple[float, int, int, float], ...] = ()
    disturbed: float | None = None


@dataclass(frozen=True)
class Pair:
    """The same requests through both arms, one after the other: metric values by name. A metric that a block cannot
    give (no request succeeded) is absent; one that is without bound is infinite. ``base_first``: which of the two ran
    first, drawn by seed for two pairs at a time, a quad: base, arm, arm, base or arm, base, base, arm. A pair that went
    wrong keeps its place, with what it has."""

    base: Mapping[str, float]
    arm: Mapping[str, float]
    base_first: bool


@dataclass(frozen=True)
class Look:
    """When the growing data was judged: ``progress``, the share of the planned time that was over, and ``pairs``, how
    many there were of each arm."""

    progress: float
    pairs: Mapping[str, int]


class Outcome(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference"
    """None larger than the margin."""
    NOT_ENOUGH_DATA = "not enough data"


@dataclass(frozen=True)
class Comparison:
    """One metric of one arm against the base. ``effect``, ``low``, ``high``: relative (0.03 is 3 % more than the base),
    or a plain difference where the metric is additive, and so is ``margin``; the interval is simultaneous over all that
    are compared. Without data they are NaN, without a bound infinite. ``p``: adjusted for multiple comparisons and
    looks."""

    arm: str
    metric: str
    base_value: float
    arm_value: float
    effect: float
    low: float
    high: float
    p: float
    outcome: Outcome
    margin: float
    n_pairs: int


@dataclass(frozen=True)
class Result:
    """An experiment, whole or as far as it came. ``stopped``: why it ended ("all verdicts are in", "time is over",
    "arm b died: …"); ``partial`` where that was not as planned. ``divergences``: where greedy outputs of an arm first
    differ from the base's (``arm``, ``index`` of the request, ``position`` of the token, ``base`` and ``arm_token``);
    ``outputs_compared``: by arm, of how many requests they were compared; None where nobody wrote that down.

    ``configs``: each arm's effective config, the base's first: its key is the base's name among the blocks. ``pairs``:
    by arm, in the order in which they ran; with ``looks`` and the experiment's ``statistics`` they give
    ``comparisons`` again.
    """

    experiment: Mapping[str, Any]
    environment: Mapping[str, Any]
    metrics: Sequence[MetricSpec]
    blocks: Sequence[BlockRecord]
    comparisons: Sequence[Comparison]
    stopped: str
    partial: bool
    divergences: Sequence[Mapping[str, Any]] = ()
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pairs: Mapping[str, Sequence[Pair]] = field(default_factory=dict)
    looks: Sequence[Look] = ()
    outputs_compared: Mapping[str, int] | None = None
