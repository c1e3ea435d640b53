"""The HTTP application: routes, and the layers around them."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from hotswap import __version__
from hotswap.core.config.schema import ServerSection
from hotswap.server.http import errors, info
from hotswap.server.http.admin import SCHEMA as ADMIN_SCHEMA
from hotswap.server.http.admin import exchange_components
from hotswap.server.http.api import Api
from hotswap.server.http.chat import create_chat_completion
from hotswap.server.http.completions import create_completion
from hotswap.server.http.middleware import Gate, HeadAsGet, RequestId
from hotswap.server.protocol.chat import ChatBody
from hotswap.server.protocol.common import schema_of
from hotswap.server.protocol.completions import CompletionBody
from hotswap.server.protocol.tokens import DetokenizeBody, TokenizeText
from hotswap.server.served import Served


def create_app(served: Served, settings: ServerSection) -> FastAPI:
    """The application for one engine; ``app.state.api`` is its :class:`Api`."""
    app = FastAPI(title="hotswap", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    api = app.state.api = Api(served, settings)
    errors.install(app)
    _add_openai_routes(app, api)
    _add_own_routes(app, api)
    if settings.admin_key is not None:
        _add_admin_routes(app, api)
    served.install_routes(app)
    # Added from the innermost to the outermost.
    app.add_middleware(HeadAsGet)
    app.add_middleware(Gate, keys=api.keys, admin_keys=api.admin_keys, draining=lambda: api.draining)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "x-request-id"], expose_headers=["x-request-id"])
    app.add_middleware(errors.LastResort)
    app.add_middleware(RequestId)
    return app


def _add_openai_routes(app: FastAPI, api: Api) -> None:
    @app.post("/v1/completions", openapi_extra=schema_of(CompletionBody))
    async def completions(request: Request) -> Response:
        return await create_completion(api, request)

    @app.post("/v1/chat/completions", openapi_extra=schema_of(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return await create_chat_completion(api, request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return info.models(api)

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return info.model(api, name)


def _add_own_routes(app: FastAPI, api: Api) -> None:
    @app.get("/health")
    async def health() -> Response:
        return info.health(api)

    @app.get("/ready")
    async def ready() -> Response:
        return info.ready(api)

    @app.get("/version")
    async def version() -> dict[str, Any]:
        return info.version()

    @app.get("/server_info")
    def server_info() -> dict[str, Any]:  # beside the event loop: it waits for the ranks
        return info.server_info(api)

    @app.post("/tokenize", openapi_extra=schema_of(TokenizeText))
    async def tokenize(request: Request) -> Response:
        return await info.tokenize(api, request)

    @app.post("/detokenize", openapi_extra=schema_of(DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        return await info.detokenize(api, request)

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, Any]:
        return await info.reset_prefix_cache(api, request)


def _add_admin_routes(app: FastAPI, api: Api) -> None:
    @app.post("/admin/components", openapi_extra=ADMIN_SCHEMA)
    async def components(request: Request) -> Response:
        return await exchange_components(api, request)
