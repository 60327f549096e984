"""The ASGI application."""

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import Response

from toolkit.api import invocations
from toolkit.api.admin import adapters, health, metrics, operation
from toolkit.api.anthropic import messages
from toolkit.api.http.error_bodies import error_response, unreadable, validation_error
from toolkit.api.http.layers.gate import CLIENT_CLOSED_REQUEST, Gate
from toolkit.api.http.layers.tracing import Tracer
from toolkit.api.http.openapi import DOCS_FILES, describe, serve_docs_from_memory
from toolkit.api.http.routes import RouteTable
from toolkit.api.http.server import Server
from toolkit.api.http.streaming import ClientDisconnectedError
from toolkit.api.llama_cpp import completion as llama_completion
from toolkit.api.llama_cpp import properties as llama_properties
from toolkit.api.ollama import chat as ollama_chat
from toolkit.api.ollama import embed as ollama_embed
from toolkit.api.ollama import models as ollama_models
from toolkit.api.openai import (
    chat,
    completions,
    models,
    responses,
    tokenize,
    transcriptions,
)
from toolkit.api.pooling import embeddings, pooling, score
from toolkit.api.web import page
from toolkit.errors import ToolkitError
from toolkit.version import __version__

ROUTERS = [
    module.router
    for module in (
        completions, chat, responses, transcriptions, messages, embeddings, score, pooling,
        tokenize, models, llama_completion, llama_properties, ollama_chat, ollama_embed,
        ollama_models, page, invocations, metrics, health, operation, adapters,
    )
]  # fmt: skip
OPEN_DOCS = ("/docs", "/redoc", "/openapi.json", DOCS_FILES)


class RouteError(ToolkitError):
    """No route has this path, or none with this method."""

    type = "invalid_request_error"


def make_app(server: Server, tracer: Tracer | None = None) -> Gate:
    """Return the server's application: the gate around middleware and routes.

    Raises PluginError for middleware that cannot be used."""
    app = FastAPIOffline(
        title="tk",
        version=__version__,
        summary="An OpenAI-compatible server with its own engine.",
        static_url=DOCS_FILES,
        redirect_slashes=False,
    )
    app.state.server = server
    serve_docs_from_memory(app)
    routes = RouteTable()
    routes.add(app.routes, open_paths=OPEN_DOCS)
    for router in ROUTERS:
        app.include_router(router)
        routes.add(router.routes)
    describe(app)

    @app.exception_handler(ToolkitError)
    async def toolkit_error(request: Request, error: ToolkitError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(list(error.errors())), request.scope)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        cause = error.__cause__  # FastAPI's error while it read the body
        if (known := cause if isinstance(cause, ToolkitError) else unreadable(cause)) is not None:
            return error_response(known, request.scope)
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # the gate turns HEAD into GET
        route_error = RouteError(f"{error.detail}: {request.method} {request.url.path}")
        route_error.status = error.status_code
        response = error_response(route_error, request.scope)
        response.headers.update(headers)
        return response

    @app.exception_handler(ClientDisconnectedError)
    async def disconnected(request: Request, error: ClientDisconnectedError) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        # Starlette raises the error again, and the gate logs it.
        return error_response(error, request.scope)

    gate = app.state.gate = Gate(server.plugins.wrap(app), routes, server, tracer)
    return gate
