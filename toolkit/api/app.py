"""The ASGI application."""

from __future__ import annotations

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.responses import Response

from toolkit.api.admin import health, metrics, operation
from toolkit.api.anthropic import messages
from toolkit.api.http.error_bodies import error_response, unreadable, validation_error
from toolkit.api.http.gate import Gate
from toolkit.api.http.openapi import DOCS_FILES, describe
from toolkit.api.http.service import Service
from toolkit.api.http.streaming import ClientDisconnectedError
from toolkit.api.http.tracing import Tracer
from toolkit.api.openai import chat, completions, models, responses, tokenize
from toolkit.api.pooling import embeddings, score
from toolkit.errors import ToolkitError
from toolkit.version import __version__


class RouteError(ToolkitError):
    """No such route, or not with that method."""

    type = "invalid_request_error"


def make_app(service: Service, tracer: Tracer | None = None) -> Gate:
    """The server's application: the routes behind the gate."""
    app = FastAPIOffline(
        title="tk",
        version=__version__,
        summary="An OpenAI-compatible server over tk's own engine.",
        static_url=DOCS_FILES.rstrip("/"),
        redirect_slashes=False,
    )
    app.state.service = service
    for module in (
        completions, chat, responses, messages, embeddings, score, tokenize, models, metrics, health,
        operation,
    ):  # fmt: skip
        app.include_router(module.router)
    describe(app)

    @app.exception_handler(ToolkitError)
    async def mistake(request: Request, error: ToolkitError) -> Response:
        return error_response(error, request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(list(error.errors())), request.scope)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        cause = error.__cause__  # what FastAPI met as it read the body
        if (known := cause if isinstance(cause, ToolkitError) else unreadable(cause)) is not None:
            return error_response(known, request.scope)
        headers = dict(error.headers or {})
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"  # the gate's
        told = RouteError(f"{error.detail}: {request.method} {request.url.path}")
        told.status = error.status_code
        response = error_response(told, request.scope)
        response.headers.update(headers)
        return response

    @app.exception_handler(ClientDisconnectedError)
    async def gone(request: Request, error: ClientDisconnectedError) -> Response:
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        return error_response(
            error, request.scope
        )  # and Starlette raises it again, for the gate to log

    gate = app.state.gate = Gate(app, service, tracer)
    return gate
