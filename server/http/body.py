"""Request bodies: read with a limit, parsed with a limit, validated into a model; nothing is ignored silently."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from hotswap.core.explain import nearest
from hotswap.server.http.errors import ApiError, ClientGone
from hotswap.server.problems import first_problem

logger = logging.getLogger(__name__)

MAX_DEPTH = 100
_LARGE = 256 * 1024
"""Bytes beyond which parsing and validation would hold up the event loop for milliseconds."""
_LOGGED_NAMES = 1000

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


async def read_body(request: Request, limit: int, model: Callable[[dict[str, Any]], T]) -> T:
    """The JSON object in a request's body as ``model`` makes something of it. ApiError 400, 413 or 415."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The body should be JSON, sent with 'Content-Type: application/json', not {kind!r}.")
    raw = await _read(request, limit)

    def made() -> T:
        value = _parse(raw)
        if not isinstance(value, dict):
            raise ApiError(400, f"The body should be a JSON object, not {_name(value)}.")
        return model(value)

    return await asyncio.to_thread(made) if len(raw) > _LARGE else made()


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = ApiError(
        413, f"The body is larger than the {limit} bytes that this server takes.", code="body_too_large")
    if declared.isdigit() and int(declared) > limit:
        raise too_large  # it may never come; where it does, the HTTP server throws it away
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= limit:
                chunks.append(chunk)
            elif size > 4 * limit:  # read on until then, so that the client is listening when the answer comes
                break
    except ClientDisconnect:
        raise ClientGone from None
    if size > limit:
        raise too_large
    return b"".join(chunks)


def _parse(raw: bytes) -> Any:
    try:
        text = raw.decode()
        value = json.loads(text, parse_constant=_refuse_constant)
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
            _check_depth(value)
        if "\\ud" in text.lower():  # half of a surrogate pair has no UTF-8, so no tokenizer takes it
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ApiError(400, f"The body is nested more than {MAX_DEPTH} levels deep.") from None
    except UnicodeError:
        raise ApiError(400, "The body holds text that is not valid Unicode.") from None
    except json.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}.") from None
    except ValueError:  # the only one left: Python bounds the digits of whole numbers
        raise ApiError(400, "The body holds a number with too many digits.") from None
    return value


def _refuse_constant(name: str) -> None:
    raise ApiError(400, f"The body is not valid JSON: {name} is no JSON number.")


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [item for item in level if isinstance(item, (dict, list))]:
        depth += 1
        if depth > MAX_DEPTH:
            raise RecursionError
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]


def _name(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")


def validate(model: type[Model], data: Mapping[str, Any]) -> Model:
    """``data`` as ``model``; ApiError 400 that names the first field that is wrong."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = first_problem(error)
        raise ApiError(400, str(problem), problem.param) from error


class UnknownFields:
    """Fields that no route knows: refused in strict mode, else named in a header and logged once each."""

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def check(self, unknown: Iterable[str], known: Iterable[str]) -> dict[str, str]:
        """Headers for the response."""
        names = list(unknown)
        if not names:
            return {}
        if self._strict:
            near = nearest(names[0], known)
            hint = f"; did you mean {near!r}?" if near else ""
            raise ApiError(400, f"unknown field {_shown(names[0])}{hint}", names[0], "unknown_field")
        for name in names[:10]:
            if name not in self._logged and len(self._logged) < _LOGGED_NAMES:
                self._logged.add(name)
                logger.warning("clients send the field %s, which this server does not know and ignores", _shown(name))
        return {"X-Hotswap-Warning": "unknown fields ignored: " + ", ".join(_shown(name) for name in names[:10])}


def _shown(name: str) -> str:
    """Fit for a header and a log line."""
    return ascii(name[:64])
