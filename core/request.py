"""What a client asks for and what it gets: sampling parameters, requests, outputs, finish reasons."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, field_validator

from hotswap.core.interfaces.kvcache import CacheKey

GREEDY_EPSILON = 1e-5
"""A temperature below this is greedy: dividing by it would overflow float32 logits."""

MAX_LOGPROBS = 20
"""Most alternatives a token's logprobs may list; OpenAI's limit. Bounds the size of any answer."""


PROCESSED_FIELDS = frozenset({
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "min_tokens",
})
"""Sampling fields that logits processors carry out; the others are core's own."""


TokenId = Annotated[int, Field(strict=False)]
"""As the key of a JSON object it is spelled as a text."""


class SamplingParams(BaseModel):
    """How to choose tokens and when to stop. Field names are those of vLLM and OpenAI.

    Logprobs are of the raw model distribution, before temperature, penalties, bias and filters. Types are strict: no
    number for a boolean, no text for a number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """None: as many as fit into the context."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Below it no EOS or stop id is sampled and no stop string is looked for."""
    temperature: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    """0 and -1: off."""
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    typical_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Locally typical sampling (Meister et al., 2023); 1: off."""
    presence_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10.0)] = 1.0
    """Over prompt and output (Keskar et al., 2019); presence and frequency count the output only. Bounded below, since
    logits are divided by it."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    bad_words: list[str] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives listed beside each output token's own logprob; 0: the token's own only."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    extra: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Per component: its part of the request, validated by that component's ``RequestOptions``."""

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, given: Any) -> Any:
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("should be a text or a list of texts")
        return texts

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON


class FinishReason(StrEnum):
    """At every engine a request ends in exactly one of these."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    HANDOFF = "handoff"
    """This engine's part is done and another goes on: no client sees it."""


class TokenLogprob(NamedTuple):
    """``rank`` 1 is the most probable. ``top``: the most probable (token, logprob) pairs, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class TextDelta(NamedTuple):
    """What a detokeniser made of some tokens. ``stop``: the stop string or the reason that ended the text, if any;
    ``consumed``: how many of the pushed tokens belong to the output (those after a stop string do not)."""

    text: str
    stopped: str | None = None
    consumed: int = 0


class Detokenizer(Protocol):
    """Turns one request's output tokens into text, incrementally, and looks for its stop strings."""

    def push(self, token_ids: list[int], search_stops_after: int = 0) -> TextDelta:
        """Append tokens. Text that could still turn out to be part of a stop string, or half a character, is held
        back. Stop strings are looked for only once more than ``search_stops_after`` tokens have been pushed."""

    def finish(self) -> str:
        """The text held back; nothing follows."""


@dataclass(frozen=True)
class Handoff:
    """What one engine has done of a request that another goes on with. ``tokens``: the output so far, which the client
    has, logprobs included. ``pages``: where its KV transfer keeps the keys and values of all tokens but the last, a
    plain value; None: nowhere, they are computed again.

    The detokeniser goes along in the request, and the sampler's position is the number of tokens.
    """

    tokens: tuple[int, ...]
    pages: Any = None


@dataclass(frozen=True)
class Request:
    """One sequence to generate. ``n > 1`` is several of these, made by the front; the first is the others' parent.

    ``fork_of``: a request with the same prompt and cache key that was added before. Where it lives in the same engine,
    this one waits until it has computed the prompt, and shares its pages.

    ``hands_over``: the engine's part is done with the first token of the output, unless that is the last one anyway.
    ``continued``: what another engine has done already; who sampled a token emits it.
    """

    id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int = 0
    """The key of the request's random numbers; with the position it determines each draw."""
    eos_token_ids: frozenset[int] = frozenset()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    cache_key: CacheKey = field(default_factory=CacheKey)
    detokenizer: Detokenizer | None = None
    hands_over: bool = False
    continued: Handoff | None = None
    fork_of: str | None = None


@dataclass(slots=True)
class RequestOutput:
    """What one step added to a request. ``token_ids`` and ``logprobs`` run in parallel. The last one has a finish
    reason; ``error`` goes with FinishReason.ERROR; ``stop_reason`` is the stop string or id that ended it; ``handoff``
    says where a peer finds the request's keys and values, if a KV transfer keeps them."""

    request_id: str
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    cached_tokens: int = 0
    handoff: Any = None


OutputSink = Callable[[RequestOutput], None]
"""Called from the engine's loop thread; must not block and must not raise."""
