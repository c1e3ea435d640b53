"""What happens to each HTTP request before its route: an id, the key check, the drain check."""

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hotswap.server.http.errors import ApiError, stopped

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes carry no key."""
ADMIN_PREFIX = "/admin/"
"""Paths that need the admin key, and no other, where there is one; else there are no such paths."""


class RequestId:
    """Takes the client's ``X-Request-Id`` where it is a short printable word, else makes one; sends it back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        return await self._app(scope, receive, named)


class HeadAsGet:
    """A HEAD request is answered as a GET would be; the HTTP server leaves out the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app({**scope, "method": "GET"} if scope.get("method") == "HEAD" else scope, receive, send)


class Keys:
    """Bearer keys and their tenants. Keys are kept as digests; a check compares with all of them in constant time."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._tenants = {hashlib.sha256(key.encode()).digest(): tenant for key, tenant in tenants.items()}

    def __len__(self) -> int:
        return len(self._tenants)

    def tenant(self, key: str) -> str | None:
        """The tenant of a key, None for a key that nobody has."""
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for known, tenant in self._tenants.items():
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


class Gate:
    """Lets in who has a key, while the server takes requests. Sets ``state.tenant``."""

    def __init__(self, app: ASGIApp, keys: Keys, draining: Callable[[], bool], admin_keys: Keys | None = None) -> None:
        self._app, self._keys, self._draining = app, keys, draining
        self._admin_keys = admin_keys or Keys({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await refusal.response()(scope, receive, send)
        return await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        scope["state"]["tenant"] = ""
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        if len(self._admin_keys) and scope["path"].startswith(ADMIN_PREFIX):
            if scheme.lower() != "bearer" or self._admin_keys.tenant(key.strip()) is None:
                return ApiError(
                    403, "The server's admin key is needed: send it as 'Authorization: Bearer KEY'.",
                    code="invalid_admin_key")
        elif len(self._keys):
            tenant = self._keys.tenant(key.strip()) if scheme.lower() == "bearer" else None
            if tenant is None:
                return ApiError(
                    401, "A valid API key is needed: send it as 'Authorization: Bearer KEY'.", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
            scope["state"]["tenant"] = tenant
        return stopped() if self._draining() and scope["method"] == "POST" else None
