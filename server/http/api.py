"""What all routes share: the front of the engine, the settings, and the first steps of every request."""

import asyncio
import hashlib
import uuid
from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from hotswap.core.config.schema import ServerSection
from hotswap.core.errors import RequestError
from hotswap.core.request import SamplingParams
from hotswap.server.bridge import Bridge, Call
from hotswap.server.frontend import Caller, Frontend, Prompt, check_count
from hotswap.server.http.body import UnknownFields, read_body, validate
from hotswap.server.http.errors import ApiError
from hotswap.server.http.middleware import Keys
from hotswap.server.protocol.chat import ChatPrompt
from hotswap.server.protocol.common import Body, GenerationBody
from hotswap.server.protocol.completions import CompletionBody
from hotswap.server.served import Served
from hotswap.server.text.tokens import TokenTexts

LONG_TEXT = 20_000
"""Characters of a call beyond which encoding would hold up the event loop for milliseconds: a thread does it then."""

B = TypeVar("B", bound=Body)
T = TypeVar("T")


class Api:
    """One per application. ``draining``: no new request is taken."""

    def __init__(self, served: Served, settings: ServerSection) -> None:
        self.served, self.settings = served, settings
        self.frontend = Frontend(served)
        self.texts = TokenTexts(served.tokenizer)
        self.keys = Keys(settings.api_keys)
        self.admin_keys = Keys({} if settings.admin_key is None else {settings.admin_key: "admin"})
        self.draining = False
        self.started_at = int(served.clock.wall())
        self._unknown = UnknownFields(settings.strict_fields)
        self._separate_tenants = len(set(settings.api_keys.values())) > 1
        self._bridge: Bridge | None = None

    @property
    def bridge(self) -> Bridge:
        """Made in the event loop that serves the first request."""
        if self._bridge is None:
            self._bridge = Bridge(asyncio.get_running_loop())
        return self._bridge

    @property
    def model_name(self) -> str:
        return self.served.name

    def created(self) -> int:
        return int(self.served.clock.wall())

    async def body(self, request: Request, model: type[B]) -> tuple[B, dict[str, str]]:
        """The request's body, and headers for the answer (a warning about unknown fields)."""
        return self.checked(
            await read_body(request, self.settings.max_body_bytes, lambda data: validate(model, data)))

    def checked(self, body: B) -> tuple[B, dict[str, str]]:
        body.refuse_unsupported()
        headers = self._unknown.check(body.unknown_fields(), body.known_fields())
        if body.model is not None and body.model != self.model_name:
            raise ApiError(
                404, f"There is no model {body.model[:100]!r} here; this server has {self.model_name!r}.", "model",
                "model_not_found")
        return body, headers

    async def completion_prompts(self, body: CompletionBody, n: int) -> list[Prompt]:
        given = body.prompt if isinstance(body.prompt, list) else [body.prompt]
        if isinstance(given[0], int):
            given = [given]
        check_count(len(given), n)  # before the work of encoding them

        def encode() -> list[Prompt]:
            tokens, special = self.frontend.encode, body.add_special_tokens
            return [Prompt(tokens(item, special), item) if isinstance(item, str) else Prompt(item) for item in given]

        return await _run(encode, sum(len(item) for item in given if isinstance(item, str)) > LONG_TEXT)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await _run(lambda: self.frontend.encode(text, add_special_tokens), len(text) > LONG_TEXT)

    async def chat_prompt(self, body: ChatPrompt) -> Prompt:
        if body.chat_template is not None and not self.settings.allow_request_chat_template:
            raise ApiError(
                400, "chat_template in requests is switched off; see server.allow_request_chat_template",
                "chat_template", "unsupported_field")
        messages = body.plain_messages()

        def encode() -> list[int]:
            return self.frontend.encode_chat(
                messages, add_generation_prompt=body.opens_turn, continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs, template=body.chat_template)

        long = body.chat_template is not None or sum(len(m["content"]) for m in messages) > LONG_TEXT
        return Prompt(await _run(encode, long))

    def call(
        self, request: Request, body: GenerationBody, call_id: str, prompts: list[Prompt], sampling: SamplingParams,
    ) -> Call:
        """The engine's requests for a body; not started yet. RequestError where they can never fit into it together."""
        count, capacity = len(prompts) * sampling.n, self.served.capacity
        if capacity is not None and count > capacity:
            raise RequestError(
                f"{len(prompts)} prompts with n {sampling.n} make {count} sequences, but at most {capacity} can run "
                "and wait here at a time (scheduler.max_running and server.max_queue); ask for them in several calls",
                "prompt" if len(prompts) > capacity else "n")
        caller = Caller(
            request.state.tenant, self._salt(request.state.tenant, body.cache_salt or ""), body.priority,
            {"request_id": request.state.request_id})
        return Call(self.served.engine, self.bridge, self.frontend.requests(call_id, prompts, sampling, caller))

    def _salt(self, tenant: str, salt: str) -> str:
        """With several tenants, none can find out by timing what another has sent."""
        if not self._separate_tenants:
            return salt
        return hashlib.sha256(f"{tenant}\0{salt}".encode()).hexdigest()


async def _run(work: Callable[[], T], long: bool) -> T:
    """Long work in a thread, so that the event loop goes on."""
    return await asyncio.to_thread(work) if long else work()


def new_id(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex}"
