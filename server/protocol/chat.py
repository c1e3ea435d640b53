"""``/v1/chat/completions``: the request's fields, and the shapes of the answer."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hotswap.core.errors import RequestError
from hotswap.core.request import MAX_LOGPROBS
from hotswap.server.problems import first_problem
from hotswap.server.protocol.common import Body, GenerationBody

MAX_MESSAGES = 16384
"""Each costs time before its tokens can be counted."""


class Message(BaseModel):
    """Other fields are the template's business."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _text_or_parts(cls, given: Any) -> Any:
        parts = isinstance(given, list) and all(isinstance(part, dict) for part in given)
        if not (given is None or isinstance(given, str) or parts):
            raise ValueError("should be a text or a list of parts of type 'text'")
        return given

    def plain(self, index: int) -> dict[str, Any]:
        """As templates take it, with one text as content. RequestError names what is no text."""
        where = f"messages.{index}"
        for field in ("tool_calls", "function_call", "tool_call_id", "audio"):
            if (self.model_extra or {}).get(field):
                raise RequestError(f"{where}.{field} is not supported by this server", f"{where}.{field}",
                                   "unsupported_field")
        return {**(self.model_extra or {}), "role": self.role, "content": self._text(where)}

    def _text(self, where: str) -> str:
        if self.content is None:
            raise RequestError(f"{where}.content is missing; expected a text", f"{where}.content")
        if isinstance(self.content, str):
            return self.content
        texts = []
        for place, part in enumerate(self.content):
            field = f"{where}.content.{place}"
            if part.get("type") != "text":
                raise RequestError(
                    f"{field} is of type {str(part.get('type'))[:40]!r}; this model takes parts of type 'text' alone",
                    f"{field}.type", "unsupported_content")
            if not isinstance(part.get("text"), str):
                raise RequestError(f"{field}.text should be a text", f"{field}.text")
            texts.append(part["text"])
        return "\n".join(texts)


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages that come from elsewhere than a body, checked alike. RequestError names what is wrong."""
    if not messages:
        raise RequestError("messages: should hold at least one message", "messages")
    plain = []
    for index, message in enumerate(messages):
        try:
            plain.append(Message.model_validate(message).plain(index))
        except ValidationError as error:
            raise first_problem(error, f"messages.{index}") from error
    return plain


class ChatPrompt(Body):
    """What makes a prompt of messages; shared with ``/tokenize``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    add_generation_prompt: bool | None = None
    """Open the assistant's turn. By default so, unless ``continue_final_message``."""
    continue_final_message: bool = False
    """Go on with the last message instead of opening a new turn; the answer does not repeat it."""
    chat_template: str | None = None
    """A Jinja template instead of the model's, where the server allows it."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the template."""

    def plain_messages(self) -> list[dict[str, Any]]:
        return [message.plain(index) for index, message in enumerate(self.messages)]

    @property
    def opens_turn(self) -> bool:
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt


class ChatBody(ChatPrompt, GenerationBody):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """By default as many as fit into the context."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of ``max_tokens``; where both are given they must agree."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling_given(self) -> dict[str, Any]:
        """Sampling fields as ``SamplingParams`` takes them."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} disagree; "
                "give one of them", "max_completion_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        given = self.sampling_fields()
        given["max_tokens"] = self.max_tokens or self.max_completion_tokens
        given["logprobs"] = (self.top_logprobs or 0) if self.logprobs else None
        return given


def chat_completion(
    id: str, created: int, model: str, choices: list[dict[str, Any]], usage: Any = None,
    kind: Literal["chat.completion", "chat.completion.chunk"] = "chat.completion",
) -> dict[str, Any]:
    answer = {"id": id, "object": kind, "created": created, "model": model, "choices": choices}
    return answer if usage is None else {**answer, "usage": usage}
