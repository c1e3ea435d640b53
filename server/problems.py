"""What is wrong with what a client sent, told in JSON's words."""

import json
from typing import Any

from pydantic import ValidationError

from hotswap.core.errors import RequestError
from hotswap.core.explain import nearest
from hotswap.core.request import SamplingParams

_SHOWN_CHARACTERS = 60
_KEY = "[key]"
"""Ends pydantic's location of a key that is wrong; the key itself stands before it."""


def first_problem(error: ValidationError, where: str = "") -> RequestError:
    """What is wrong with a request, in one sentence that names the field. ``where``: what holds the field."""
    problem = error.errors(include_url=False, include_context=False)[0]
    location = (*([where] if where else []), *problem["loc"])
    if location[-1:] == (_KEY,):
        field = ".".join(map(str, location[:-2]))
        return RequestError(f"{field}: the key {shown(problem['input'])} is wrong: {problem['msg']}", field)
    field = ".".join(map(str, location))
    if problem["type"] == "extra_forbidden":
        near = nearest(field, SamplingParams.model_fields)
        return RequestError(f"unknown field {field!r}" + (f"; did you mean {near!r}?" if near else ""), field)
    if problem["type"] == "missing":
        return RequestError(f"{field}: is missing", field)
    message = problem["msg"].removeprefix("Value error, ")
    return RequestError(f"{field}: {message}, got {shown(problem['input'])}" if field else message, field or None)


def shown(value: Any) -> str:
    """A value as JSON, or, where that would be long, what it is."""
    match value:
        case str() if len(value) > _SHOWN_CHARACTERS:
            return f"{json.dumps(value[:_SHOWN_CHARACTERS], ensure_ascii=False)}…"
        case list() | tuple() if len(value) > 8:
            return f"a list of {len(value)}"
        case dict() if value:
            return "an object"
    try:
        text = json.dumps(value, ensure_ascii=False, default=lambda other: type(other).__name__)
    except ValueError:  # Python bounds the digits that it writes
        return "a number of thousands of digits"
    return text if len(text) <= 2 * _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
