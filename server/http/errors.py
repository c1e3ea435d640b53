"""Every answer that is not a success has OpenAI's error body, wherever it comes from."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotswap.core.errors import EngineStoppedError, LoopTimeoutError, QueueFullError, RequestError
from hotswap.core.request import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

RETRY_AFTER_DRAIN_S = 5

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer other than success. ``param`` names the request's field, ``code`` is OpenAI's where it has one."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class ClientGone(Exception):
    """The client hung up; whatever is answered, nobody reads it."""


def internal(request_id: str) -> ApiError:
    """Details go to the log alone: they may hold paths, prompts or other requests' data."""
    return ApiError(
        500, f"The server failed to answer this request. Its log has the details under request id {request_id}.",
        code="internal_error",
    )


def api_error(error: Exception, request_id: str) -> ApiError:
    """The answer for an exception; what nobody foresaw is logged and answered in general words."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            wait = {"Retry-After": str(max(1, round(error.retry_after_s)))}
            return ApiError(429, str(error), code="queue_full", headers=wait)
        case RequestError():
            return ApiError(400, str(error), error.param, error.code)
        case EngineStoppedError() | LoopTimeoutError():
            logger.warning("request %s was refused: %s", request_id, error)
            return stopped()
        case ClientGone():
            return ApiError(499, "The client hung up.")
        case HTTPException():
            return _of_http(error)
        case RequestValidationError():
            problem = error.errors()[0]
            field = ".".join(str(part) for part in problem["loc"][1:])
            return ApiError(400, f"{field}: {problem['msg']}", field or None)
    logger.error("request %s failed", request_id, exc_info=error)
    return internal(request_id)


def stopped() -> ApiError:
    return ApiError(
        503, "The server takes no requests at the moment; try again or ask another replica.", code="unavailable",
        headers={"Retry-After": str(RETRY_AFTER_DRAIN_S)},
    )


def ended_badly(output: RequestOutput, request_id: str) -> ApiError | None:
    """The error for a request that did not end by itself, or None for one that did."""
    if output.finish_reason is FinishReason.ERROR:
        logger.error("request %s failed: %s", request_id, output.error)
        return internal(request_id)
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(503, "The request was ended before its answer was complete.", code="aborted",
                        headers={"Retry-After": str(RETRY_AFTER_DRAIN_S)})
    return None


def _of_http(error: HTTPException) -> ApiError:
    words = {
        404: "There is no such route; GET /openapi.json lists all.",
        405: "This route does not take that method.",
    }
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(
        error.status_code, words.get(error.status_code, str(error.detail)), code=code, headers=error.headers)


def install(app: FastAPI) -> None:
    """Answer what the routes raise. What passes these handlers is caught by :class:`LastResort`."""
    for kind in (
            ApiError, ClientGone, RequestError, EngineStoppedError, LoopTimeoutError, HTTPException,
            RequestValidationError):
        app.add_exception_handler(kind, _handle)


async def _handle(request: Request, error: Exception) -> JSONResponse:
    return api_error(error, request.state.request_id).response()


class LastResort:
    """Turns an exception that nobody handled into a 500, or ends a response that has begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if scope["type"] != "http":
                raise
            answer = api_error(error, scope["state"]["request_id"])
            if not begun:
                await answer.response()(scope, receive, send)


def as_event(error: ApiError) -> bytes:
    """An error inside a stream: the last event, with no ``[DONE]`` behind it."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"
