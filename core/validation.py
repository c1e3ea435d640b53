"""Checks a request against the model and the components that will serve it, before it is queued.

What one field alone can get wrong, :class:`SamplingParams` refuses. What needs the model (ids, lengths) or the loaded
components (``extra``) is refused here, so that nothing out of range ever reaches the device.
"""

from collections.abc import Iterable, Mapping, Sequence

from pydantic import ValidationError

from hotswap.core.errors import ContextLengthError, RequestError
from hotswap.core.explain import explain, nearest
from hotswap.core.interfaces.component import RequestOptions
from hotswap.core.request import PROCESSED_FIELDS, SamplingParams


def validate_params(
    params: SamplingParams,
    *,
    vocab_size: int,
    bad_words_token_ids: Sequence[Sequence[int]] = (),
    request_options: Mapping[str, type[RequestOptions]] | None = None,
    honoured: frozenset[str] = PROCESSED_FIELDS,
) -> None:
    """What does not depend on the prompt, once a call. RequestError names the field.

    ``vocab_size`` is the width of the logits, not the tokenizer's size. ``bad_words_token_ids`` are the tokenised bad
    words; ids beyond the logits among them are harmless (such a word cannot be generated). ``request_options`` maps
    each component that reads a part of ``extra`` to the model of that part. ``honoured``: the fields that the
    configured logits processors carry out.
    """
    _check_honoured(params, honoured)
    _check_ids("logit_bias", params.logit_bias or (), vocab_size)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_candidates(params, vocab_size, bad_words_token_ids)
    _check_extra(params, request_options or {})


def validate_prompt(
    prompt_token_ids: Sequence[int], params: SamplingParams, *, vocab_size: int, max_model_len: int,
) -> SamplingParams:
    """``params`` with ``max_tokens`` resolved for this prompt, or a RequestError that names the field."""
    max_tokens = _resolve_max_tokens(len(prompt_token_ids), params.max_tokens, max_model_len)
    _check_ids("prompt", prompt_token_ids, vocab_size)
    if params.min_tokens > max_tokens:
        given = f"max_tokens {params.max_tokens}" if params.max_tokens else f"the {max_tokens} that the context leaves"
        raise RequestError(f"min_tokens {params.min_tokens} exceeds {given}; lower min_tokens", "min_tokens")
    return params.model_copy(update={"max_tokens": max_tokens})


def _check_honoured(params: SamplingParams, honoured: frozenset[str]) -> None:
    for name in sorted(PROCESSED_FIELDS - honoured):
        if getattr(params, name) not in (None, SamplingParams.model_fields[name].default):
            raise RequestError(
                f"{name} is not carried out by any of the configured logits_processors; leave it out, or have the one "
                "that does added to the config", name)


def _check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param} holds token id {token}, but the model's ids go from 0 to {vocab_size - 1}; remove it", param
            )


def _resolve_max_tokens(prompt_length: int, max_tokens: int | None, max_model_len: int) -> int:
    """An explicit ``max_tokens`` that cannot be reached is refused, not shortened: its sender counts on it."""
    if not prompt_length:
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    room = max_model_len - prompt_length
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {prompt_length} tokens, but the context of {max_model_len} holds at most "
            f"{max_model_len - 1} of a prompt and one of output; shorten the prompt"
        )
    if max_tokens is not None and max_tokens > room:
        raise ContextLengthError(
            f"a prompt of {prompt_length} tokens and max_tokens {max_tokens} make {prompt_length + max_tokens}, more "
            f"than the context of {max_model_len}; lower max_tokens to {room} or shorten the prompt",
            "max_tokens",
        )
    return room if max_tokens is None else max_tokens


def _check_candidates(params: SamplingParams, vocab_size: int, bad_words: Sequence[Sequence[int]]) -> None:
    """Refuses a request whose hard bans leave no token to choose. What depends on the text shows while decoding."""
    if any(not word for word in bad_words):
        raise RequestError("bad_words holds a word of no tokens; remove it", "bad_words")
    banned = {word[0] for word in bad_words if len(word) == 1 and 0 <= word[0] < vocab_size}
    if params.min_tokens:
        banned.update(params.stop_token_ids)
    if params.allowed_token_ids is not None:
        if banned.issuperset(params.allowed_token_ids):
            raise RequestError(
                f"no token is left: all {len(set(params.allowed_token_ids))} of allowed_token_ids are banned by "
                "bad_words, or by stop_token_ids below min_tokens; allow another token",
                "allowed_token_ids",
            )
    elif len(banned) >= vocab_size:
        raise RequestError("no token is left: bad_words and stop_token_ids ban all of the vocabulary", "bad_words")


def _check_extra(params: SamplingParams, request_options: Mapping[str, type[RequestOptions]]) -> None:
    for component, values in params.extra.items():
        options = request_options.get(component)
        if options is None:
            raise RequestError(_unknown_component(component, request_options), f"extra.{component}")
        try:
            options.model_validate(values)
        except ValidationError as error:
            problem = explain(error, options, f"extra.{component}")[0]
            raise RequestError(str(problem), problem.path) from error


def _unknown_component(name: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = nearest(name, known)
    hint = f"did you mean {near!r}?" if near else f"it is read by: {', '.join(known) or 'none'}"
    return f"extra names {name!r}, but no loaded component of that name takes request options; {hint}"
