"""Who is let in with what, before anything is made of it: keys, draining, the queue, shares, and the body's limits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.api.http.error_bodies import error_response
from toolkit.api.http.limits import Admission, BodyTimeoutError, check_length, read_body
from toolkit.api.http.openapi import DOCS_FILES
from toolkit.api.http.security import Keys, Role, wants_key
from toolkit.api.http.service import Service
from toolkit.errors import InvalidRequestError, ServerUnavailableError, ToolkitError

OPEN = frozenset(
    (
        "/livez",
        "/readyz",
        "/health",
        "/ping",
        "/version",
        "/metrics",
        "/docs",
        "/redoc",
        "/openapi.json",
    )
)
"""Paths that need no key."""

_WORK = ("/v1/", "/tokenize", "/detokenize")
"""How the paths begin that limits and draining are about."""


class Door:
    """ASGI layer in front of the routes. While `draining`, new work is refused and probes and metrics are still answered."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        config = service.config
        self.app = app
        self._keys = Keys(config.api_key, config.admin_key)
        self._admission = Admission(config, service.engine)
        self._root = config.root_path
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            with self._let_in(scope, headers):
                await self.app(scope, await _received(headers, receive), watched)
        except ToolkitError as error:
            if begun:
                raise
            response = error_response(error, scope)
            if isinstance(error, BodyTimeoutError):
                response.headers["Connection"] = (
                    "close"  # what still comes of the body is no request
                )
            await response(scope, receive, send)

    def is_work(self, scope: Scope) -> bool:
        """Whether a request is for the engine, so that limits hold for it and draining waits for it."""
        return scope["method"] == "POST" and self.path(scope).startswith(_WORK)

    def path(self, scope: Scope) -> str:
        """A request's path, without what a proxy in front has before it."""
        path: str = scope["path"]
        return path.removeprefix(self._root)

    def _let_in(self, scope: Scope, headers: dict[bytes, bytes]) -> AbstractContextManager[None]:
        """Raises a ToolkitError for whom it is not let in."""
        path = self.path(scope)
        role, key = self._keys.find(headers)
        scope["state"]["role"] = role
        if role is Role.NOBODY and path not in OPEN and not path.startswith(DOCS_FILES):
            raise wants_key()
        if not self.is_work(scope):
            return nullcontext()
        if self.draining:
            raise ServerUnavailableError("The server is shutting down and takes no new requests.")
        address = scope["client"][0] if scope.get("client") else None
        return self._admission.admitted(key if key >= 0 else address)


async def _received(headers: dict[bytes, bytes], receive: Receive) -> Receive:
    """A `receive` that gives the body in one piece, which has passed all limits."""
    length = headers.get(b"content-length")
    if length is None and b"transfer-encoding" not in headers:
        return receive
    if length is not None:
        if not length.isdigit():
            raise InvalidRequestError("Content-Length is not a number.")
        check_length(int(length[:20]))
    body: bytes | None = await read_body(receive)

    async def once() -> Message:
        nonlocal body
        if body is None:
            return await receive()
        message: Message = {"type": "http.request", "body": body, "more_body": False}
        body = None
        return message

    return once
