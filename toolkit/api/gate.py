"""What every request passes first: identity, the key, the size limit, draining; and what is counted of it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.api.errors import error_response
from toolkit.api.streaming import SERVER_SEND
from toolkit.errors import InvalidRequestError, ServerUnavailableError, ToolkitError
from toolkit.metrics import HTTPMetrics

logger = logging.getLogger(__name__)

MAX_BODY = 32 * 2**20
"""Bytes of one request's body."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class UnauthorizedError(ToolkitError):
    """The key is missing or wrong."""

    status = 401
    type = "authentication_error"


class BodyTooLargeError(ToolkitError):
    """The body is larger than any request needs."""

    status = 413
    type = "invalid_request_error"


class Gate:
    """Outermost ASGI layer. While `draining`, new work is refused and probes and metrics are still answered."""

    def __init__(self, app: ASGIApp, api_key: str | None, metrics: HTTPMetrics) -> None:
        self._app = app
        self._key = api_key.encode() if api_key else None
        self._metrics = metrics
        self.draining = False
        self.num_active = 0
        """Requests for work that are not answered in full."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path: str = scope["path"]
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        scope[SERVER_SEND] = send
        started = time.perf_counter()
        status = 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
            await send(message)

        is_work = path.startswith("/v1/") and scope["method"] == "POST"
        self.num_active += is_work
        try:
            self._check(path, headers, is_work)
            await self._app(scope, _limited(receive), reply)
        except ToolkitError as error:
            if status:
                raise
            await error_response(error)(scope, receive, reply)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("request %s to %s failed", request_id, path)
            if not status:
                await error_response(error)(scope, receive, reply)
        finally:
            self.num_active -= is_work
            self._metrics.observe(scope.get("route"), scope["method"], status, time.perf_counter() - started)

    def _check(self, path: str, headers: dict[bytes, bytes], is_work: bool) -> None:
        if self._key is not None and path.startswith("/v1/"):
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise UnauthorizedError(
                    "This server wants its API key: send 'Authorization: Bearer KEY'.", code="invalid_api_key"
                )
        if is_work and self.draining:
            raise ServerUnavailableError("The server is shutting down and takes no new requests.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise InvalidRequestError("Content-Length is not a number.")
        if int(length) > MAX_BODY:
            raise _too_large()


def _limited(receive: Receive) -> Receive:
    """Counts a body's bytes, for bodies that do not tell their length."""
    size = 0

    async def counted() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > MAX_BODY:
            raise _too_large()
        return message

    return counted


def _too_large() -> BodyTooLargeError:
    return BodyTooLargeError(f"The body is larger than {MAX_BODY // 2**20} MiB.")
