"""What comes back: the outputs of a call's requests, put together again. Shaped as vLLM's users know it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hotswap.core.request import FinishReason, Request, RequestOutput, TokenLogprob
from hotswap.server.frontend import Prompt

NEGATIVE_INFINITY = -9999.0
"""JSON has no infinity."""


class Logprob(NamedTuple):
    """``rank`` 1 is the most probable; None for an alternative whose rank follows from its place."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass
class CompletionOutput:
    """One choice. ``logprobs``: per token, its own and the alternatives', by token id."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestResult:
    """One prompt and its choices. In a stream, each result holds all that there is so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


class Choice:
    """Gathers one request's outputs."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.cached_tokens = self.n_tokens = 0
        self.begun = False
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    def count(self, output: RequestOutput) -> None:
        """What usage needs; enough for a stream, whose text is gone already."""
        self.begun = True
        self.n_tokens += len(output.token_ids)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)

    def add(self, output: RequestOutput) -> None:
        self.count(output)
        self.token_ids += output.token_ids
        if output.text:
            self._texts.append(output.text)
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason, self.error = output.finish_reason, output.stop_reason, output.error


def result_of(
    request_id: str, prompt: Prompt, choices: Sequence[Choice], decode_token: Callable[[int], str],
) -> RequestResult:
    """A snapshot of one prompt's choices."""
    return RequestResult(
        request_id, prompt.text, prompt.token_ids,
        [_completion(index, choice, decode_token) for index, choice in enumerate(choices)],
        prompt_logprobs=_listed(choices[0].prompt_logprobs, decode_token),
        finished=all(choice.finish_reason for choice in choices),
        num_cached_tokens=choices[0].cached_tokens,
    )


def _completion(index: int, choice: Choice, decode_token: Callable[[int], str]) -> CompletionOutput:
    asked = choice.request.sampling.logprobs is not None
    return CompletionOutput(
        index, choice.text, list(choice.token_ids),
        logprobs=[alternatives(entry, decode_token) for entry in choice.logprobs] if asked else None,
        cumulative_logprob=sum(entry.logprob for entry in choice.logprobs) if asked else None,
        finish_reason=choice.finish_reason.value if choice.finish_reason else None, stop_reason=choice.stop_reason,
    )


def _listed(
    entries: Sequence[TokenLogprob | None] | None, decode_token: Callable[[int], str],
) -> list[dict[int, Logprob] | None] | None:
    if entries is None:
        return None
    return [None if entry is None else alternatives(entry, decode_token) for entry in entries]


def alternatives(entry: TokenLogprob, decode_token: Callable[[int], str]) -> dict[int, Logprob]:
    """The chosen token first, then the most probable ones, best first."""
    listed = {entry.token_id: Logprob(entry.logprob, entry.rank, decode_token(entry.token_id))}
    for place, (token, logprob) in enumerate(entry.top, start=1):
        listed.setdefault(token, Logprob(logprob, place, decode_token(token)))
    return listed


def finite(logprob: float) -> float:
    return max(logprob, NEGATIVE_INFINITY)
