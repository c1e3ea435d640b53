"""``/v1/completions``: the request's fields, and the shapes of the answer."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from hotswap.core.errors import RequestError
from hotswap.server.protocol.common import GenerationBody

Prompts = str | list[int] | list[str] | list[list[int]]


class CompletionBody(GenerationBody):
    prompt: Prompts
    """A text, token ids, or a list of either; one answer has the choices of all, in order."""

    @field_validator("prompt", mode="plain", json_schema_input_type=Prompts)
    @classmethod
    def _one_of_four(cls, value: Any) -> Any:
        several = isinstance(value, list) and value and isinstance(value[0], list)
        if isinstance(value, str) or _all(str, value) or all(map(_ids, value if several else [value])):
            return value
        raise ValueError("should be a text, token ids, or a list of either, and not empty")

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """By default as many as fit into the context. 0 with ``echo``: only the prompt and its logprobs."""
    echo: bool = False
    """Put the prompt before the completion, in text and logprobs."""
    add_special_tokens: bool = True
    """Put BOS before a text where the model is used to it."""
    best_of: int | None = None
    """Only as many as ``n``."""

    def sampling_given(self) -> dict[str, Any]:
        """Sampling fields as ``SamplingParams`` takes them."""
        given = self.sampling_fields()
        if self.best_of is not None and self.best_of != (given.get("n") or 1):
            raise RequestError("best_of is not supported by this server unless it equals n", "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens 0 makes sense with echo only; give at least 1", "max_tokens")
        given["max_tokens"] = 1 if self.max_tokens == 0 else self.max_tokens
        if self.echo and given.get("logprobs") is not None and given.get("prompt_logprobs") is None:
            given["prompt_logprobs"] = given["logprobs"]
        return given

    @property
    def only_prompt(self) -> bool:
        """The one token that has to be generated is not shown."""
        return self.max_tokens == 0


def _all(kind: type, value: Any) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {kind}


def _ids(value: Any) -> bool:
    return _all(int, value) and min(value) >= 0


def completion(id: str, created: int, model: str, choices: list[dict[str, Any]], usage: Any = None) -> dict[str, Any]:
    """A whole answer, or a chunk of one: they have the same shape."""
    answer = {"id": id, "object": "text_completion", "created": created, "model": model, "choices": choices}
    return answer if usage is None else {**answer, "usage": usage}
