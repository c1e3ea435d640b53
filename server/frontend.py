"""From what a client asks to what the engine runs: prompts to tokens, choices to requests."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from hotswap.core.errors import ConfigError, ContextLengthError, RequestError
from hotswap.core.request import Request, SamplingParams
from hotswap.core.validation import validate_params, validate_prompt
from hotswap.server.problems import first_problem
from hotswap.server.served import Served
from hotswap.server.templates.chat import ChatTemplate, ControlTokens
from hotswap.server.text.detokenizer import StreamDetokenizer

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 8192
"""Of all stop strings together: each costs memory for as long as the request lives."""
MAX_BAD_WORDS = 1024
MAX_BAD_CHARACTERS = 65536
"""Of all bad words together: each is tokenised twice before the request is taken."""
MAX_SEQUENCES = 1024
"""Prompts times ``n`` of one call."""
MAX_LISTED_IDS = 1 << 20
"""Ids in ``logit_bias``, ``allowed_token_ids`` and ``stop_token_ids`` together, times the sequences of a call: the
worker keeps them for each."""


class Prompt(NamedTuple):
    """``text`` is None where the client sent token ids."""

    token_ids: list[int]
    text: str | None = None


class Caller(NamedTuple):
    """Who asks. ``salt`` separates cached prefixes: requests of different salts share none."""

    tenant: str = ""
    salt: str = ""
    priority: int = 0
    attrs: Mapping[str, Any] = {}


NOBODY = Caller()


class Frontend:
    """Stateless but for a counter, so it may be called from any thread."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self._control = ControlTokens(served.tokenizer)
        self._template = ChatTemplate(served.chat_template, served.tokenizer) if served.chat_template else None
        self._unseeded = itertools.count()

    def sampling(self, given: Mapping[str, Any]) -> SamplingParams:
        """The model's defaults under what was ``given``; None means the default. RequestError names the field."""
        return sampling_of(given, self.served.sampling_defaults)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A raw prompt: control tokens in it count, and BOS stands before it where the model is used to it.

        ContextLengthError, before it is encoded, where it is too long for any tokens to fit."""
        self.check_length(text)
        ids = self.served.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return self._control.with_one_bos(ids) if add_special_tokens else ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, variables: Mapping[str, Any] | None = None, template: str | None = None,
    ) -> list[int]:
        """``template``: instead of the model's."""
        chosen = self._template if template is None else self._given(template)
        if chosen is None:
            raise RequestError(
                f"the model {self.served.name!r} has no chat template; set server.chat_template to a Jinja file, or "
                "use /v1/completions", "messages",
            )
        return chosen.encode(
            messages, add_generation_prompt=add_generation_prompt, continue_final_message=continue_final_message,
            variables=variables, check_length=self.check_length,
        )

    def check_length(self, text: str) -> None:
        """ContextLengthError for a text that cannot fit, however it is encoded. Takes no time."""
        least, most = self.served.tokenizer.least_tokens(text), self.served.max_model_len - 1
        if least > most:
            raise ContextLengthError(
                f"the prompt's {len(text)} characters are at least {least} tokens, but the context of "
                f"{self.served.max_model_len} holds at most {most} of a prompt; shorten the prompt")

    def _given(self, template: str) -> ChatTemplate:
        try:
            return ChatTemplate(template, self.served.tokenizer)
        except ConfigError as error:
            raise RequestError(error.message, "chat_template") from error

    def requests(
        self, call_id: str, prompts: Sequence[Prompt], sampling: SamplingParams, caller: Caller = NOBODY,
    ) -> list[Request]:
        """One request a choice: ``n`` for the first prompt, then ``n`` for the second, and so on.

        RequestError where one of them cannot be served.
        """
        check_count(len(prompts), sampling.n)
        _check_texts("stop", sampling.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        if not all(sampling.stop):
            raise RequestError("stop holds an empty string, which would end every text at once; remove it", "stop")
        _check_texts("bad_words", sampling.bad_words or [], MAX_BAD_WORDS, MAX_BAD_CHARACTERS)
        bad_words = self._bad_words(sampling.bad_words or [])
        _check_lists(sampling, len(prompts) * sampling.n)
        validate_params(
            sampling, vocab_size=self.served.vocab_size, bad_words_token_ids=bad_words,
            request_options=self.served.request_options, honoured=self.served.honoured)
        seed = sampling.seed if sampling.seed is not None else f"{self.served.seed}/{next(self._unseeded)}"
        requests = []
        for position, prompt in enumerate(prompts):
            resolved = validate_prompt(
                prompt.token_ids, sampling, vocab_size=self.served.vocab_size, max_model_len=self.served.max_model_len)
            first = f"{call_id}-{position * sampling.n}"
            for choice in range(sampling.n):
                requests.append(Request(
                    id=f"{call_id}-{position * sampling.n + choice}", prompt_token_ids=prompt.token_ids,
                    sampling=resolved, seed=derived_seed(seed, choice), eos_token_ids=self.served.eos_token_ids,
                    bad_words_token_ids=bad_words, priority=caller.priority, tenant=caller.tenant, attrs=caller.attrs,
                    cache_key=replace(self.served.cache_key, salt=caller.salt), detokenizer=self._detokenizer(resolved),
                    fork_of=first if choice else None,
                ))
        return requests

    def _detokenizer(self, sampling: SamplingParams) -> StreamDetokenizer:
        return StreamDetokenizer(
            self.served.tokenizer, sampling.stop, include_stop=sampling.include_stop_str_in_output,
            skip_special_tokens=sampling.skip_special_tokens,
        )

    def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """A word is other tokens at the beginning of a text than behind a space; both are banned."""
        encode = self.served.tokenizer.encode_without_special_parsing
        spelled = [tuple(encode(prefix + word)) for word in words for prefix in ("", " ")]
        return tuple(dict.fromkeys(spelled))


def sampling_of(given: Mapping[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})) -> SamplingParams:
    """``given`` over ``defaults``; None means the default. RequestError names the field."""
    try:
        return SamplingParams.model_validate({**defaults, **{k: v for k, v in given.items() if v is not None}})
    except ValidationError as error:
        raise first_problem(error) from error


def derived_seed(seed: int | str, choice: int) -> int:
    """The key of one choice's random numbers: the same for the same seed, whatever else runs; 63 bits."""
    digest = hashlib.blake2b(f"{seed}#{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def check_count(num_prompts: int, n: int) -> None:
    """RequestError where a call asks for too many sequences."""
    count = num_prompts * n
    if count > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts with n {n} make {count} sequences, the limit is {MAX_SEQUENCES}",
            "prompt" if num_prompts > MAX_SEQUENCES else "n")


def _check_lists(sampling: SamplingParams, sequences: int) -> None:
    sizes = {name: len(getattr(sampling, name) or ()) for name in ("logit_bias", "allowed_token_ids", "stop_token_ids")}
    if sum(sizes.values()) * sequences > MAX_LISTED_IDS:
        longest = max(sizes, key=lambda name: sizes[name])
        raise RequestError(
            f"{' and '.join(sizes)} hold {sum(sizes.values())} ids for each of {sequences} sequences; the limit is "
            f"{MAX_LISTED_IDS} together", longest)


def _check_texts(param: str, texts: Sequence[str], most: int, most_characters: int) -> None:
    characters = sum(map(len, texts))
    if len(texts) > most or characters > most_characters:
        raise RequestError(
            f"{param} holds {len(texts)} strings of {characters} characters, "
            f"the limits are {most} and {most_characters}", param)
