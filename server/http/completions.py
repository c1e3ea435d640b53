"""``POST /v1/completions``."""

from typing import Any

from fastapi import Request
from starlette.responses import Response

from hotswap.core.request import RequestOutput, TokenLogprob
from hotswap.server.http.answer import Answer
from hotswap.server.http.api import Api, new_id
from hotswap.server.http.logprobs import CompletionLogprobs, by_token
from hotswap.server.protocol.completions import CompletionBody, completion
from hotswap.server.results import Choice


async def create_completion(api: Api, request: Request) -> Response:
    body, headers = await api.body(request, CompletionBody)
    body.check_stream()
    sampling = api.frontend.sampling(body.sampling_given())
    prompts = await api.completion_prompts(body, sampling.n)
    call_id = new_id("cmpl")
    call = api.call(request, body, call_id, prompts, sampling)
    answer = CompletionAnswer(api, body, call, prompts, call_id, request.state.request_id)
    return await answer.respond(request, headers)


class CompletionAnswer(Answer):
    def __init__(self, api: Api, body: CompletionBody, *args: Any) -> None:
        super().__init__(api, body, *args)
        self.body = body
        self._logprobs = [CompletionLogprobs(api.texts) for _ in self.choices]

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return completion(self.id, self.created, self.api.model_name, choices)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            shown = self._shown(index, choice.text, choice.token_ids, choice.logprobs, choice.prompt_logprobs, True)
            choices.append({**shown, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
                            **self._prompt_logprobs(choice)})
        return completion(self.id, self.created, self.api.model_name, choices, self.usage())

    def chunks(self, index: int, output: RequestOutput, first: bool) -> list[dict[str, Any]]:
        chunks = []
        if output.text or output.token_ids or (first and self.body.echo):
            chunks.append(self._shown(
                index, output.text, output.token_ids, output.logprobs or [], output.prompt_logprobs, first))
        if output.finish_reason is not None:
            chunks.append({"index": index, "text": "", "logprobs": None, "finish_reason": output.finish_reason,
                           "stop_reason": output.stop_reason})
        return chunks

    def completion_tokens(self) -> int:
        return 0 if self.body.only_prompt else super().completion_tokens()

    def _shown(
        self, index: int, text: str, token_ids: list[int], logprobs: list[TokenLogprob],
        prompt_logprobs: list[TokenLogprob | None] | None, first: bool,
    ) -> dict[str, Any]:
        """A choice, or a chunk of one, without its end. ``first``: ``echo`` puts the prompt before it."""
        prompt = self.prompt_of(index)
        entries: list[TokenLogprob | None] = [*logprobs]
        if self.body.only_prompt:
            text, token_ids, entries = "", [], []
        ids = token_ids
        if self.body.echo and first:
            shown_prompt = prompt.text
            if shown_prompt is None:
                shown_prompt = self.api.served.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            text = shown_prompt + text
            ids, entries = [*prompt.token_ids, *ids], [*(prompt_logprobs or []), *entries]
        asked = self.sampling.logprobs is not None
        choice = {"index": index, "text": text, "finish_reason": None,
                  "logprobs": self._logprobs[index].lists(entries, ids) if asked else None}
        if self.body.return_token_ids:
            choice["token_ids"] = token_ids
            if first:
                choice["prompt_token_ids"] = prompt.token_ids
        return choice

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        if self.body.sampling_fields().get("prompt_logprobs") is None:
            return {}
        return {"prompt_logprobs": by_token(choice.prompt_logprobs, self.api.texts)}
