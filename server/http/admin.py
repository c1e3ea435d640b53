"""``POST /admin/components``: exchange parts of the engine while it serves. Off unless ``server.admin_key`` is set."""

import asyncio
from typing import Annotated

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.responses import Response

from hotswap.core.errors import ConfigError, ExchangeError, ExchangeUnderWayError
from hotswap.server.http.api import Api
from hotswap.server.http.body import read_body, validate
from hotswap.server.http.errors import ApiError


def _assignment(text: str) -> str:
    key, equals, _ = text.partition("=")
    if not key.strip() or not equals:
        raise ValueError("should be KEY=VALUE, such as 'scheduler=continuous'")
    return text


Assignment = Annotated[str, Field(max_length=65536), AfterValidator(_assignment)]


class ComponentsBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    set: Annotated[list[Assignment], Field(min_length=1, max_length=100)]
    """``KEY=VALUE``, as ``--set`` takes it, such as ``scheduler=continuous`` or ``scheduler.policy=fair_share``."""
    replica: str | None = None
    """One engine of a deployment; by default all, one after the other."""


SCHEMA = {"requestBody": {
    "required": True, "content": {"application/json": {"schema": ComponentsBody.model_json_schema()}}}}


async def exchange_components(api: Api, request: Request) -> Response:
    """400: refused, and nothing has changed; 409: another exchange is under way, or a new part has failed, and the old
    one serves on."""
    body = await read_body(request, api.settings.max_body_bytes, lambda data: validate(ComponentsBody, data))
    try:
        reports = await asyncio.to_thread(api.served.exchange, body.set, body.replica)
    except ConfigError as error:
        raise ApiError(400, str(error), error.path or None, "exchange_refused") from error
    except ExchangeUnderWayError as error:
        raise ApiError(409, str(error), None, "exchange_under_way") from error
    except ExchangeError as error:
        done = "".join(f" Engine {report.replica!r} has exchanged its parts before." for report in error.reports)
        raise ApiError(409, f"{error}{done}", None, "exchange_failed") from error
    return JSONResponse({"object": "exchange", "engines": [report.plain() for report in reports]})
