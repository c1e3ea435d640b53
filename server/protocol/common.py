"""What the request bodies have in common. Sampling fields are those of ``SamplingParams``, under the same names.

A field that this server knows but cannot honour is refused by name, unless its value asks for nothing. Fields that only
label a request, for the provider's books, are accepted.
"""

from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from hotswap.core.errors import RequestError
from hotswap.core.request import SamplingParams

SAMPLING_FIELDS = frozenset(SamplingParams.model_fields)

LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields of OpenAI's API that change nothing about the answer."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "function_call": ("none",), "functions": ([],), "guided_choice": (), "guided_grammar": (),
    "guided_json": (), "guided_regex": (), "kv_transfer_params": (), "length_penalty": (1.0,), "logits_processors": ([],),
    "modalities": (["text"],), "mm_processor_kwargs": ({},), "prediction": (), "prompt_embeds": (),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,), "store": (False,), "structured_outputs": (), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "truncate_prompt_tokens": (), "use_beam_search": (False,),
    "verbosity": ("medium",), "web_search_options": (), "documents": ([],),
}
"""Known fields that are not honoured yet -> values that ask for nothing, besides null."""

INDIFFERENT = frozenset({"parallel_tool_calls"})
"""Says something only about tools, which are refused by themselves."""

Id = Annotated[int, Field(ge=0)]


class Body(BaseModel):
    """Fields that it does not declare are kept, to be sorted by :meth:`sort`."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    OTHERWISE_READ: ClassVar[Set[str]] = frozenset()
    """Sampling fields that this body declares itself, with another meaning."""

    def sampling_fields(self) -> dict[str, Any]:
        return {k: v for k, v in self._others.items() if k in SAMPLING_FIELDS - self.OTHERWISE_READ}

    def unknown_fields(self) -> list[str]:
        passive = SAMPLING_FIELDS | LABELS | INDIFFERENT | UNSUPPORTED.keys()
        return [name for name in self._others if name not in passive]

    def known_fields(self) -> Set[str]:
        return SAMPLING_FIELDS | LABELS | UNSUPPORTED.keys() | type(self).model_fields.keys()

    def refuse_unsupported(self) -> None:
        """RequestError for the first field that asks for something that this server does not do."""
        for name, value in self._others.items():
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                raise RequestError(f"{name} is not supported by this server; leave it out", name, "unsupported_field")

    @property
    def _others(self) -> Mapping[str, Any]:
        return self.model_extra or {}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    """One more chunk, with the usage and no choices, before the end."""
    include_obfuscation: bool = False
    """Accepted for OpenAI's client; nothing is obfuscated."""


class GenerationBody(Body):
    """Common to completions and chat completions."""

    model: str | None = None
    """By default the model that is served."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Smaller is sooner, as in vLLM; the queue policy decides what it means."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests share cached prefixes only with requests of the same salt (and API key, where there are several)."""
    return_token_ids: bool = False
    """Put ``token_ids`` beside each choice's text, and ``prompt_token_ids`` into the answer."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer's own BOS goes before the prompt; by default so for completions, and not for chat, where the
    template decides."""

    def check_stream_options(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


B = TypeVar("B", bound=Body)


def schema_of(model: type[Body]) -> dict[str, Any]:
    """The body's JSON schema, sampling fields included, for the API's own description."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    sampling = SamplingParams.model_json_schema()["properties"]
    schema["properties"] = {**{k: v for k, v in sampling.items() if k not in model.OTHERWISE_READ},
                            **schema["properties"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
