"""Cross-origin requests (CORS): pages that browsers allow to use the server."""

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp

from toolkit.api.http.body_fields import IGNORED
from toolkit.api.http.error_bodies import error_body
from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Wrap `app` if other origins are allowed. Preflights are answered here: they have no key."""
    if not config.allowed_origins:
        return app
    return _CORS(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=["X-Request-Id", "Retry-After", IGNORED],
    )


class _CORS(CORSMiddleware):
    """Refuses preflights with the usual error body."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        error = InvalidRequestError(f"{bytes(response.body).decode()}.", code="cors")
        vary = {"Vary": response.headers["Vary"]}
        return Response(error_body(error), error.status, vary, "application/json")
