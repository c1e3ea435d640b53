"""What happens to the tokens that a step kept: stop rules, text, and what goes to the client."""

from typing import NamedTuple

from hotswap.core.engine.pool import RequestState
from hotswap.core.interfaces.messages import RowVerdict
from hotswap.core.request import Detokenizer, FinishReason, RequestOutput


class Ending(NamedTuple):
    reason: FinishReason
    stop_reason: str | int | None = None


def cut_at_end(state: RequestState, kept: list[int]) -> tuple[list[int], Ending | None]:
    """The part of ``kept`` that belongs to the output, and how the request ends in it, if it does.

    A stop id counts as output; what a speculative step accepted after it does not.
    """
    room = state.max_new - state.output_length
    stop_ids = state.stop_ids
    for index, token in enumerate(kept):
        if token in stop_ids:
            eos = token in state.request.eos_token_ids and not state.request.sampling.ignore_eos
            return kept[: index + 1], Ending(FinishReason.STOP, None if eos else token)
        if index + 1 >= room:
            return kept[: index + 1], Ending(FinishReason.HANDOFF if state.hands_over else FinishReason.LENGTH)
    return kept, None


def to_text(
    detokenizer: Detokenizer, state: RequestState, kept: list[int], ending: Ending | None,
) -> tuple[str, list[int], Ending | None]:
    """Push kept tokens through the request's detokeniser; a stop string cuts them and ends the request.

    The token that ended the request by its id gives no text, unless the client asked to see what stopped it.
    """
    visible = kept
    if ending is not None and ending.reason is FinishReason.STOP:
        visible = kept if state.request.sampling.include_stop_str_in_output else kept[:-1]
    text, stopped, consumed = detokenizer.push(visible, state.min_tokens)
    if stopped is not None:
        return text, kept[:consumed], Ending(FinishReason.STOP, stopped)
    over = ending is not None and ending.reason is not FinishReason.HANDOFF
    return (text + detokenizer.finish() if over else text), kept, ending


def absorb(state: RequestState, row: RowVerdict, now: float) -> tuple[RequestOutput, Ending | None]:
    """Apply one row's kept tokens (at least one) to the request; returns what the client gets, and how the request
    ends, if it does. Whatever its detokeniser raises comes through, and the request is as it was."""
    kept, ending, text = row.kept, None, ""
    tokens = state.tokens
    if len(kept) > 1 or kept[0] in state.stop_ids or len(tokens) + 1 >= state.end:
        kept, ending = cut_at_end(state, kept)
    if state.detokenizer is not None:
        text, kept, ending = to_text(state.detokenizer, state, kept, ending)
    tokens += kept
    output = RequestOutput(state.id, kept, text, cached_tokens=state.cached_tokens or 0)
    if row.logprobs:
        output.logprobs = row.logprobs[: len(kept)]
    if state.first_token_at is None:
        state.first_token_at = now
        output.prompt_logprobs = state.prompt_logprobs
    if ending is not None:
        output.finish_reason, output.stop_reason = ending
    return output, ending


def keep_prompt_logprobs(state: RequestState, row: RowVerdict) -> None:
    """Prompt logprobs are kept by position, so that a chunk computed again after a suspension just overwrites."""
    if state.prompt_logprobs is not None and row.prompt_logprobs:
        begin = row.prompt_logprobs_from
        state.prompt_logprobs[begin : begin + len(row.prompt_logprobs)] = row.prompt_logprobs


def last_words(state: RequestState, reason: FinishReason, error: str | None) -> RequestOutput:
    """The final output of a request that does not end by its own tokens."""
    detokenizer = state.detokenizer
    text = detokenizer.finish() if detokenizer is not None and reason is not FinishReason.ERROR else ""
    return RequestOutput(
        state.id, [], text, finish_reason=reason, error=error, cached_tokens=state.cached_tokens or 0,
    )
