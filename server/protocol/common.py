"""What the request bodies have in common. Sampling fields are those of ``SamplingParams``, under the same names.

A field that this server knows but cannot honour is refused by name, unless its value asks for nothing. Fields that only
label a request, for the provider's books, are accepted.
"""

from collections.abc import Mapping, Set
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hotswap.core.errors import RequestError
from hotswap.core.request import SamplingParams
from hotswap.server.problems import shown

SAMPLING_FIELDS = frozenset(SamplingParams.model_fields)

LABELS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields of OpenAI's API that change nothing about the answer. All are texts but ``metadata``, which is an object."""

INDIFFERENT = frozenset({"parallel_tool_calls"})
"""Says something only about tools, which are refused by themselves."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (), "function_call": ("none",), "functions": ([],), "guided_choice": (), "guided_grammar": (),
    "guided_json": (), "guided_regex": (), "kv_transfer_params": (), "length_penalty": (1.0,),
    "logits_processors": ([],), "modalities": (["text"],), "mm_processor_kwargs": ({},), "prediction": (),
    "prompt_embeds": (),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,), "store": (False,), "structured_outputs": (), "suffix": ("",),
    "tool_choice": ("none", "auto"), "tools": ([],), "truncate_prompt_tokens": (), "use_beam_search": (False,),
    "verbosity": ("medium",), "web_search_options": (), "documents": ([],)
}
"""Known fields that are not honoured yet -> values that ask for nothing, besides null."""

Id = Annotated[int, Field(ge=0)]


class Nullable(BaseModel):
    """Takes null in a field that need not be given as "not given", as OpenAI's API does."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}


class Body(Nullable):
    """Fields that it does not declare are kept: they are sampling's, or labels, or unsupported, or unknown."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True, strict=True)

    ELSEWHERE: ClassVar[Set[str]] = frozenset()
    """Fields that are honoured though they are not declared."""

    model: str | None = None
    """By default the model that is served."""

    def unknown_fields(self) -> list[str]:
        """Nothing reads them."""
        return [name for name in self.others if name not in self.ELSEWHERE | LABELS | INDIFFERENT | UNSUPPORTED.keys()]

    def known_fields(self) -> Set[str]:
        return self.ELSEWHERE | type(self).model_fields.keys()

    def refuse_unsupported(self) -> None:
        """RequestError for the first field that asks for something that this server does not do, or is a label of the
        wrong type."""
        for name, value in self.others.items():
            if name in UNSUPPORTED and value is not None and value not in UNSUPPORTED[name]:
                raise RequestError(f"{name} is not supported by this server; leave it out", name, "unsupported_field")
            wanted, kind = (dict, "an object") if name == "metadata" else (str, "a text")
            if name in LABELS and value is not None and not isinstance(value, wanted):
                raise RequestError(f"{name}: should be {kind}, got {shown(value)}", name)

    @property
    def others(self) -> Mapping[str, Any]:
        """What was sent and is not declared."""
        return self.model_extra or {}


class StreamOptions(Nullable):
    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool = False
    """One more chunk, with the usage and no choices, before the end."""
    include_obfuscation: bool = False
    """Accepted for OpenAI's client; nothing is obfuscated."""


class GenerationBody(Body):
    """Common to completions and chat completions."""

    ELSEWHERE: ClassVar[Set[str]] = SAMPLING_FIELDS

    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Smaller is sooner, as in vLLM; the queue policy decides what it means."""
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    """Requests share cached prefixes only with requests of the same salt (and API key, where there are several)."""
    return_token_ids: bool = False
    """Put ``token_ids`` beside each choice's text, and ``prompt_token_ids`` into the answer."""

    def sampling_fields(self) -> dict[str, Any]:
        """Those that ``SamplingParams`` declares and this body does not."""
        return {name: value for name, value in self.others.items() if name in SAMPLING_FIELDS}

    def unknown_fields(self) -> list[str]:
        nested = (self.stream_options.model_extra or {}) if self.stream_options else {}
        return [*super().unknown_fields(), *(f"stream_options.{name}" for name in nested)]

    def check_stream(self) -> None:
        """RequestError for what a stream, or a whole answer, has no place for."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        if self.stream and self.others.get("prompt_logprobs") is not None:
            raise RequestError("prompt_logprobs and stream exclude each other", "prompt_logprobs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def schema_of(model: type[Body]) -> dict[str, Any]:
    """The body's JSON schema, sampling fields included, for the API's own description."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    schema.pop("$defs", None)
    if model.ELSEWHERE:
        schema["properties"] = {**SamplingParams.model_json_schema()["properties"], **schema["properties"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
