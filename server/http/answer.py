"""An answer in the making: whole or as a stream, for completions and chat alike."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hotswap.core.request import RequestOutput
from hotswap.server.bridge import Call
from hotswap.server.frontend import Prompt
from hotswap.server.http.api import Api
from hotswap.server.http.errors import api_error, as_event, ended_badly
from hotswap.server.http.sse import DONE, HOLE, EventStream, TextEvent, event, unless_gone
from hotswap.server.protocol.common import GenerationBody
from hotswap.server.results import Choice


class Answer(ABC):
    """``prompts[i]`` has the choices ``i * n … i * n + n - 1``."""

    def __init__(
        self, api: Api, body: GenerationBody, call: Call, prompts: Sequence[Prompt], call_id: str, request_id: str,
    ) -> None:
        self.api, self.prompts, self.id, self.created = api, prompts, call_id, api.created()
        self._body, self._call, self._request_id = body, call, request_id
        self.choices = [Choice(request) for request in call.requests]
        self.sampling = call.requests[0].sampling
        self._only_text = self.sampling.logprobs is None and not body.return_token_ids
        self._text_events: dict[int, TextEvent] = {}  # by choice

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The body of the answer, when all choices have ended."""

    @abstractmethod
    def chunks(self, index: int, output: RequestOutput, first: bool) -> list[dict[str, Any]]:
        """What one output adds to choice ``index``; text and finish reason never in the same chunk. Neither ``first``
        nor last, without logprobs and token ids: one chunk, in which nothing changes but the text."""

    @abstractmethod
    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A chunk with ``choices``."""

    async def respond(self, request: Request, headers: dict[str, str]) -> Response:
        """Start the engine's work; errors up to here are ordinary answers, streaming or not."""
        self._call.start()
        if self._body.stream:
            return EventStream(self._events(), headers, self._call.close)
        try:
            return JSONResponse(await unless_gone(request, self._gathered()), headers=headers)
        finally:  # out here, since a task that is cancelled early never runs
            self._call.close()

    async def _gathered(self) -> dict[str, Any]:
        for index, output in await self._call.all():
            if error := ended_badly(output, self._request_id):
                raise error
            self.choices[index].add(output)
        return self.whole()

    async def _events(self) -> AsyncGenerator[bytes, None]:
        try:
            async for batch in self._call.batches():
                parts: list[bytes] = []
                try:
                    for index, output in batch:
                        parts.append(self._encoded(index, output))
                finally:
                    if written := b"".join(parts):
                        yield written
            if self._body.include_usage:
                yield event({**self.envelope([]), "usage": self.usage()})
            yield DONE
        except Exception as error:
            yield as_event(api_error(error, self._request_id))
        finally:
            self._call.close()

    def _encoded(self, index: int, output: RequestOutput) -> bytes:
        """The events of one output. Most are one text between others, for which nothing but the text is encoded."""
        if error := ended_badly(output, self._request_id):
            raise error
        choice = self.choices[index]
        first = not choice.begun
        choice.count(output)
        if self._only_text and output.text and not first and output.finish_reason is None:
            return self._text_event(index)(output.text)
        return b"".join(event(self.envelope([chunk])) for chunk in self.chunks(index, output, first))

    def _text_event(self, index: int) -> TextEvent:
        made = self._text_events.get(index)
        if made is None:
            [chunk] = self.chunks(index, RequestOutput("", [], HOLE), False)
            made = self._text_events[index] = TextEvent(self.envelope([chunk]))
        return made

    def prompt_of(self, index: int) -> Prompt:
        return self.prompts[index // self.sampling.n]

    def completion_tokens(self) -> int:
        return sum(choice.n_tokens for choice in self.choices)

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.sampling.n])
        completion = self.completion_tokens()
        return {
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
