"""Chat messages to prompt tokens, by the model's own template.

Control tokens count only where the template writes them. One that is spelled out in a message is broken up by a mark
before rendering; if the output has the mark, it is cut at the template's control tokens, and the texts between, marks
removed, are encoded as plain text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from hotswap.core.errors import ConfigError, RequestError
from hotswap.core.modeling.tokenizer import Tokenizer
from hotswap.server.templates.sandbox import Sandbox

_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode's noncharacters: reserved for a program's own use, so no text that is exchanged has them."""


class ChatTemplate:
    """``source``: Jinja, with transformers' conventions. ConfigError where it cannot be compiled.

    All methods may be called from any thread.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, now: Callable[[], datetime] = datetime.now,
        path: str = "chat_template",
    ) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        try:
            self._render = Sandbox(now).compiled(source)
        except (TemplateError, RecursionError, ValueError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}", path) from error

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True,
        continue_final_message: bool = False, variables: Mapping[str, Any] | None = None,
        check_length: Callable[[str], None] | None = None,
    ) -> list[int]:
        """The prompt's tokens, BOS once if the model has the habit. RequestError with the template's own message.

        ``continue_final_message``: the last message is left open, for the model to go on with it. ``check_length``:
        called with the text before it is encoded, to refuse it.
        """
        mark = self._control.free_mark([messages, variables])
        text = self._rendered(
            self._control.guard(messages, mark), add_generation_prompt, continue_final_message,
            self._control.guard(dict(variables or {}), mark))
        if check_length is not None:
            check_length(text)
        return self._control.with_one_bos(self._control.encode(text, mark))

    def _rendered(
        self, messages: list[dict[str, Any]], generation_prompt: bool, continue_last: bool, variables: dict[str, Any],
    ) -> str:
        if not continue_last:
            return self._run(messages, generation_prompt, variables)
        if generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
                "continue_final_message",
            )
        content = messages[-1].get("content")
        if not isinstance(content, str):
            raise RequestError("continue_final_message needs a text in the last message", "continue_final_message")
        end = _MARKS[-1]
        text = self._run([*messages[:-1], {**messages[-1], "content": content + end}], False, variables)
        cut = text.rfind(end)
        if cut < 0:
            raise RequestError(
                "the chat template does not keep the last message, so it cannot be continued", "continue_final_message")
        return text[:cut].replace(end, "")

    def _run(self, messages: list[dict[str, Any]], generation_prompt: bool, variables: dict[str, Any]) -> str:
        given = {
            "bos_token": self._tokenizer.bos_token or "", "eos_token": self._tokenizer.eos_token or "", **variables,
            "messages": messages, "add_generation_prompt": generation_prompt,
        }
        try:
            return self._render(given)
        except RequestError:
            raise
        except RecursionError as error:
            raise RequestError("the chat template nests too deeply for these messages", "messages") from error
        except Exception as error:  # a template can make any operation fail: indexing, arithmetic, attributes
            raise RequestError(f"the chat template refuses these messages: {error}", "messages") from error


class ControlTokens:
    """Where a text's control tokens may come from, and how often BOS stands at its beginning."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _pattern(self) -> re.Pattern[str] | None:
        spelled = [self._tokenizer.id_to_token(id) for id in self._tokenizer.special_ids]
        longest_first = sorted((token for token in spelled if token), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @cached_property
    def adds_bos(self) -> bool:
        """Whether this tokenizer begins each text with BOS."""
        bos = self._tokenizer.bos_id
        return bos is not None and self._tokenizer.encode("", add_special_tokens=True)[:1] == [bos]

    def with_one_bos(self, ids: list[int]) -> list[int]:
        """A template that writes BOS, and a tokenizer that adds it, must not do so both, nor neither."""
        if not self.adds_bos:
            return ids
        begin = 0
        while begin < len(ids) and ids[begin] == self._tokenizer.bos_id:
            begin += 1
        return [self._tokenizer.bos_id, *ids[begin:]] if self._tokenizer.bos_id is not None else ids

    def free_mark(self, value: Any) -> str:
        """A character that occurs nowhere in ``value``."""
        used = {character for text in _texts(value) for character in _MARKS if character in text}
        for mark in _MARKS[:-1]:
            if mark not in used:
                return mark
        raise RequestError("the messages use all of Unicode's noncharacters U+FDD0 to U+FDEE; remove them", "messages")

    def guard(self, value: Any, mark: str) -> Any:
        """``value`` with each control token spelled out in its texts broken up by ``mark``."""
        if isinstance(value, str):
            if self._pattern is None:
                return value
            return self._pattern.sub(lambda found: f"{found[0][0]}{mark}{found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self.guard(key, mark): self.guard(inner, mark) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.guard(inner, mark) for inner in value]
        return value

    def encode(self, text: str, mark: str) -> list[int]:
        """Tokens of a rendered template. Without ``mark`` in it, all control tokens in it are the template's."""
        if self._pattern is None or mark not in text:
            return self._tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = []
        position = 0
        for found in self._pattern.finditer(text):
            ids += self._plain(text[position : found.start()], mark)
            ids += self._tokenizer.encode(found[0], add_special_tokens=False)
            position = found.end()
        return ids + self._plain(text[position:], mark)

    def _plain(self, text: str, mark: str) -> list[int]:
        return self._tokenizer.encode_without_special_parsing(text.replace(mark, "")) if text else []


def _texts(value: Any) -> list[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for key, inner in value.items() for text in (*_texts(key), *_texts(inner))]
    if isinstance(value, (list, tuple)):
        return [text for inner in value for text in _texts(inner)]
    return []
