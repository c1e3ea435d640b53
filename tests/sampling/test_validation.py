"""What the server may queue: every id, count and length is checked against the model first."""

from typing import Any

import pytest
from pydantic import Field, ValidationError

from hotswap.core.errors import ContextLengthError, RequestError
from hotswap.core.interfaces.component import RequestOptions
from hotswap.core.registry import Registry
from hotswap.core.request import PROCESSED_FIELDS, SamplingParams
from hotswap.core.validation import validate_params, validate_prompt

HEAD = 300
"""The logits' width in these tests; think of a tokenizer with 320 ids."""


class GrammarOptions(RequestOptions):
    depth: int = Field(default=1, ge=1)


def check(prompt: list[int] | None = None, bad_words: Any = (), **fields: Any) -> SamplingParams:
    params = SamplingParams(**fields)
    validate_params(
        params, vocab_size=HEAD, bad_words_token_ids=bad_words, request_options={"grammar": GrammarOptions})
    return validate_prompt([1, 2, 3] if prompt is None else prompt, params, vocab_size=HEAD, max_model_len=16)


@pytest.mark.parametrize("token", [305, 999_999_999, -1])
@pytest.mark.parametrize("param", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_an_id_beyond_the_logits_is_refused_by_name(param: str, token: int) -> None:
    with pytest.raises(RequestError, match=rf"{param}.*{token}.*299") as caught:
        check(**{param: {token: 1.0} if param == "logit_bias" else [5, token]})
    assert caught.value.param == param


@pytest.mark.parametrize("token", [300, -1])
def test_a_prompt_id_beyond_the_logits_is_refused(token: int) -> None:
    with pytest.raises(RequestError, match=str(token)) as caught:
        check([1, token])
    assert caught.value.param == "prompt"


def test_the_last_id_of_the_logits_is_valid_everywhere() -> None:
    check([299], logit_bias={299: 1.0}, allowed_token_ids=[299], stop_token_ids=[299])


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert check([1] * 10).max_tokens == 6
    assert check([1] * 15).max_tokens == 1
    assert check([1] * 10, max_tokens=6).max_tokens == 6
    assert check([1] * 10, max_tokens=2).max_tokens == 2


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"16 tokens.*context of 16"):
        check([1] * 16)


def test_max_tokens_beyond_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(ContextLengthError, match=r"10 tokens.*max_tokens 7.*17.*16.*to 6") as caught:
        check([1] * 10, max_tokens=7)
    assert caught.value.param == "max_tokens"
    assert caught.value.code == "context_length_exceeded"


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="empty"):
        check([])


@pytest.mark.parametrize(("minimum", "maximum"), [(5, 4), (14, None)])
def test_a_minimum_beyond_the_maximum_is_refused(minimum: int, maximum: int | None) -> None:
    with pytest.raises(RequestError) as caught:
        check(min_tokens=minimum, max_tokens=maximum)
    assert caught.value.param == "min_tokens"


def test_bans_that_leave_no_allowed_token_are_refused() -> None:
    with pytest.raises(RequestError, match="no token is left") as caught:
        check(allowed_token_ids=[5], bad_words=[(5,)])
    assert caught.value.param == "allowed_token_ids"
    check(allowed_token_ids=[5], bad_words=[(5, 6)])
    check(allowed_token_ids=[5, 6], bad_words=[(5,)])


def test_a_stop_id_that_may_not_come_yet_counts_as_banned() -> None:
    check(allowed_token_ids=[5], stop_token_ids=[5])
    with pytest.raises(RequestError, match="no token is left"):
        check(allowed_token_ids=[5], stop_token_ids=[5], min_tokens=1)


def test_banning_the_whole_vocabulary_is_refused() -> None:
    with pytest.raises(RequestError, match="all of the vocabulary"):
        check(bad_words=[(token,) for token in range(HEAD + 20)])


def test_a_bad_word_beyond_the_logits_is_harmless_and_one_of_no_tokens_is_not() -> None:
    check(bad_words=[(310,)])
    with pytest.raises(RequestError, match="no tokens"):
        check(bad_words=[()])


def test_options_for_a_component_are_checked_by_that_component() -> None:
    assert check(extra={"grammar": {"depth": 3}}).extra == {"grammar": {"depth": 3}}
    with pytest.raises(RequestError, match="did you mean 'grammar'") as unknown:
        check(extra={"gramar": {}})
    assert unknown.value.param == "extra.gramar"
    with pytest.raises(RequestError, match="read by: grammar"):
        check(extra={"zzz": {}})
    with pytest.raises(RequestError, match="should be greater than or equal to 1, not 0") as invalid:
        check(extra={"grammar": {"depth": 0}})
    assert invalid.value.param == "extra.grammar.depth"
    with pytest.raises(RequestError, match="extra.grammar.wide: unknown key. Valid here: depth"):
        check(extra={"grammar": {"wide": 1}})


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")},
        {"top_p": 0.0}, {"top_p": 1.01}, {"top_p": -0.1}, {"top_p": float("nan")},
        {"min_p": -0.1}, {"min_p": 1.1}, {"top_k": -2}, {"typical_p": 0.0},
        {"allowed_token_ids": []}, {"logit_bias": {3: float("nan")}}, {"logit_bias": {3: 101.0}},
        {"repetition_penalty": 0.0}, {"presence_penalty": 2.1}, {"unknown": 1}, {"logprobs": 21},
    ],
)  # fmt: skip
def test_values_out_of_range_never_become_parameters(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    "fields", [{"top_p": 1.0}, {"min_p": 1.0}, {"min_p": 0.0}, {"top_k": -1}, {"top_k": 0}, {"temperature": 0.0}]
)
def test_inclusive_bounds_are_valid(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(("field", "value"), [
    ("presence_penalty", 1.0), ("frequency_penalty", 1.0), ("repetition_penalty", 1.5), ("logit_bias", {1: 5.0}),
    ("allowed_token_ids", [1]), ("bad_words", ["no"]), ("min_tokens", 2),
])
def test_a_field_that_no_configured_processor_carries_out_is_refused_by_name(field, value):
    params = SamplingParams(**{field: value})
    validate_params(params, vocab_size=10)
    with pytest.raises(RequestError, match=f"{field} is not carried out") as caught:
        validate_params(params, vocab_size=10, honoured=PROCESSED_FIELDS - {field})
    assert caught.value.param == field


def test_every_field_that_needs_a_processor_has_one_in_the_box():
    registry = Registry()
    honoured = set()
    for name in registry.names("logits_processor"):
        honoured |= registry.load("logits_processor", name).honours
    assert honoured == PROCESSED_FIELDS
