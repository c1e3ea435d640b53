"""``POST /v1/chat/completions``."""

from typing import Any

from fastapi import Request
from starlette.responses import Response

from hotswap.core.request import RequestOutput
from hotswap.server.http.answer import Answer
from hotswap.server.http.api import Api, new_id
from hotswap.server.http.logprobs import by_token, for_chat
from hotswap.server.protocol.chat import ChatBody, chat_completion


async def create_chat_completion(api: Api, request: Request) -> Response:
    body, headers = await api.body(request, ChatBody)
    body.check_stream()
    sampling = api.frontend.sampling(body.sampling_given())
    prompts = [await api.chat_prompt(body)]
    call_id = new_id("chatcmpl")
    call = api.call(request, body, call_id, prompts, sampling)
    answer = ChatAnswer(api, body, call, prompts, call_id, request.state.request_id)
    return await answer.respond(request, headers)


class ChatAnswer(Answer):
    def __init__(self, api: Api, body: ChatBody, *args: Any) -> None:
        super().__init__(api, body, *args)
        self.body = body

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return chat_completion(self.id, self.created, self.api.model_name, choices, kind="chat.completion.chunk")

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            shown = {
                "index": index, "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": for_chat(choice.logprobs, self.api.texts) if self.body.logprobs else None,
                "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason,
            }
            if self.body.return_token_ids:
                shown["token_ids"] = choice.token_ids
            choices.append(shown)
        answer = chat_completion(self.id, self.created, self.api.model_name, choices, self.usage())
        if self.sampling.prompt_logprobs is not None:
            answer["prompt_logprobs"] = by_token(self.choices[0].prompt_logprobs, self.api.texts)
        if self.body.return_token_ids:
            answer["prompt_token_ids"] = self.prompts[0].token_ids
        return answer

    def chunks(self, index: int, output: RequestOutput, first: bool) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if first:
            role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                    "finish_reason": None}
            if self.body.return_token_ids:
                role["prompt_token_ids"] = self.prompts[0].token_ids
            chunks.append(role)
        if output.text or (output.token_ids and (self.body.logprobs or self.body.return_token_ids)):
            content: dict[str, Any] = {
                "index": index, "delta": {"content": output.text}, "finish_reason": None,
                "logprobs": for_chat(output.logprobs or [], self.api.texts) if self.body.logprobs else None,
            }
            if self.body.return_token_ids:
                content["token_ids"] = output.token_ids
            chunks.append(content)
        if output.finish_reason is not None:
            chunks.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": output.finish_reason,
                           "stop_reason": output.stop_reason})
        return chunks
