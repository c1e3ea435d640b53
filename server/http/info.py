"""Routes that tell about the server: health, models, versions, components; tokens to and from text."""

import asyncio
import re
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from hotswap import __version__
from hotswap.core.interfaces.deployment import Loads
from hotswap.server.http.api import Api
from hotswap.server.http.body import read_body, validate
from hotswap.server.http.errors import ApiError
from hotswap.server.protocol.tokens import DetokenizeBody, TokenizeChat, TokenizeText

_PATH = re.compile(r"(?:/[\w.@+-]+){2,}/?")


def health(api: Api) -> Response:
    """200 while work gets done; 503 with the reason otherwise."""
    problem = api.served.engine.health()
    if problem is not None:
        raise ApiError(503, _without_paths(problem), code="unhealthy")
    return JSONResponse({"status": "ok"})


def ready(api: Api) -> Response:
    """200 when a request would be taken."""
    if api.draining:
        raise ApiError(503, "The server is shutting down.", code="draining")
    return health(api)


def models(api: Api) -> dict[str, Any]:
    return {"object": "list", "data": [_model(api)]}


def model(api: Api, name: str) -> dict[str, Any]:
    if name != api.model_name:
        raise ApiError(404, f"There is no model {name[:100]!r} here.", "model", "model_not_found")
    return _model(api)


def _model(api: Api) -> dict[str, Any]:
    return {
        "id": api.model_name, "object": "model", "created": api.started_at, "owned_by": "hotswap",
        "max_model_len": api.served.max_model_len,
    }


def version() -> dict[str, Any]:
    return {"version": __version__}


def server_info(api: Api) -> dict[str, Any]:
    """Which components serve, from which packages, with which options; and what holds where a request says nothing."""
    engine = api.served.engine
    engines = [
        {"name": one.name, "role": one.role, "problem": one.problem and _without_paths(one.problem),
         **_loads(one.loads)}
        for one in engine.engines()
    ]
    return {
        "version": __version__, "model": _model(api),
        "sampling_defaults": api.frontend.sampling({}).model_dump(mode="json"),
        "loads": _loads(engine.loads()), **({"engines": engines} if engines else {}),
        **api.served.describe(),
    }


def _loads(loads: Loads) -> dict[str, Any]:
    return {"running": loads.running, "waiting": loads.waiting, "kv_usage": loads.kv_usage, **loads.extra}


def _without_paths(problem: str) -> str:
    """What a client may read of a problem: its first line, without the paths of this machine."""
    return _PATH.sub("<path>", problem.splitlines()[0])


def _text_or_chat(data: dict[str, Any]) -> TokenizeText | TokenizeChat:
    return validate(TokenizeChat, data) if "messages" in data else validate(TokenizeText, data)


async def tokenize(api: Api, request: Request) -> Response:
    body, headers = api.checked(await read_body(request, api.settings.max_body_bytes, _text_or_chat))
    if isinstance(body, TokenizeChat):
        ids = (await api.chat_prompt(body)).token_ids
    else:
        ids = await api.encode(body.prompt, body.add_special_tokens)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": api.served.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [api.texts.name(token_id) for token_id in ids]
    return JSONResponse(answer, headers=headers)


async def detokenize(api: Api, request: Request) -> Response:
    body, headers = await api.body(request, DetokenizeBody)
    size, most = api.served.tokenizer.vocab_size, api.served.max_model_len
    if len(body.tokens) > most:
        raise ApiError(
            400, f"tokens holds {len(body.tokens)} ids, more than the context of {most}; send fewer", "tokens")
    if wrong := [token_id for token_id in body.tokens if token_id >= size]:
        raise ApiError(400, f"tokens holds {wrong[0]}, but the tokenizer's ids go from 0 to {size - 1}", "tokens")
    text = await asyncio.to_thread(api.served.tokenizer.decode, body.tokens, False)
    return JSONResponse({"prompt": text}, headers=headers)


async def reset_prefix_cache(api: Api, request: Request) -> dict[str, Any]:
    """Has no body, so that a browser would send it for any web page: what a page sends is refused by its Origin."""
    origin = request.headers.get("origin")
    if origin is not None and origin not in api.settings.cors_origins:
        raise ApiError(403, "Web pages may not reset the cache; an origin is allowed with server.cors_origins.")
    return {"pages_dropped": await asyncio.to_thread(api.served.engine.reset)}
