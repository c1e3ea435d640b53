"""What travels between loop and workers: small values of numbers and strings, one message and one verdict a step."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hotswap.core.interfaces.kvcache import Grant
from hotswap.core.interfaces.scheduler import Row, SuspendMode
from hotswap.core.request import SamplingParams, TokenLogprob


@dataclass(frozen=True)
class NewRequest:
    """A request that the workers have not seen. ``tokens`` are all that the host knows, prompt first."""

    id: str
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


class Resume(NamedTuple):
    """The request starts (again) with ``computed`` tokens in its pages, its table empty before this step's grants."""

    request: str
    computed: int


@dataclass
class StepMessage:
    """Order of work: suspensions, drops, new, resumes, grants (each with its copies), transfers, rows.

    A suspension makes the worker forget the request; it comes again as new, with all tokens that were kept. Its mode is
    RECOMPUTE or SWAP, which says that ``transfer`` saves its pages. ``news`` are the tokens kept since the last
    message, for ranks that did not sample them. ``transfer`` is what a KV transfer's host half tells its worker halves,
    opaque.
    """

    step_id: int
    rows: list[Row] = field(default_factory=list)
    suspensions: list[tuple[str, SuspendMode]] = field(default_factory=list)
    drops: list[str] = field(default_factory=list)
    new: list[NewRequest] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    grants: list[tuple[str, Grant]] = field(default_factory=list)
    news: list[tuple[str, list[int]]] = field(default_factory=list)
    transfer: Any = None

    @property
    def has_operations(self) -> bool:
        return bool(self.suspensions or self.drops or self.grants or self.transfer)


@dataclass(slots=True)
class RowVerdict:
    """``computed``: the true length in the model's cache groups after the step; a group of the speculator may be up to
    ``lag`` tokens behind.

    ``prompt_logprobs`` start at position ``prompt_logprobs_from`` of the prompt. ``error`` ends this request alone.
    ``own``: it comes of what the request has asked for (a logits processor has raised, or leaves it no token), so that
    no part that serves others, too, is in doubt.
    """

    request: str
    kept: list[int]
    computed: int
    drafted: int = 0
    accepted: int = 0
    lag: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    prompt_logprobs_from: int = 0
    error: str | None = None
    own: bool = False


class Suspended(NamedTuple):
    """True lengths per group when the suspension was carried out; ``swapped``: its mode was SWAP."""

    request: str
    computed: dict[str, int]
    swapped: bool = False


class EndedTransfer(NamedTuple):
    """``tokens`` None: all was done. Else it failed; where it was to fill a request's pages, so many leading tokens of
    the request (those that were cached included) are right, the rest is not."""

    name: str
    tokens: int | None = None


@dataclass(slots=True)
class Verdict:
    """``rows``: one for each row of the message, in its order; empty where ``error`` is set.

    ``finished_transfers``: those of every rank, one list after the other: a transfer has ended when each rank's has.

    ``durations``: seconds of the step's parts ("prepare", "propose", "forward", "sample", "observe"), by the worker's
    clock.
    ``counts``: what happened in the step, by name ("graph_replays", "dropped_proposals" …); observers add them
    up.

    ``error`` means that the whole step failed: each of its requests ends with it, the engine goes on.
    """

    step_id: int
    rows: list[RowVerdict] = field(default_factory=list)
    suspended: list[Suspended] = field(default_factory=list)
    finished_transfers: list[EndedTransfer] = field(default_factory=list)
    durations: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    error: str | None = None
