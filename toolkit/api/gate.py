"""What every request passes first: identity, the key, limits, draining; and what is counted and told of it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.api.docs import DOCS_FILES
from toolkit.api.errors import error_response
from toolkit.api.limits import Admission, BodyTimeoutError, check_length, read_body
from toolkit.api.request_log import log_request
from toolkit.api.security import SECURITY_HEADERS, STRICT_TRANSPORT, Keys, Role, wants_key
from toolkit.api.service import Service
from toolkit.api.streaming import SERVER_SEND, ClientDisconnectedError
from toolkit.api.tracing import Tracer
from toolkit.engine.record import RequestRecord, current_record
from toolkit.errors import InvalidRequestError, ServerUnavailableError, ToolkitError
from toolkit.metrics import HTTPMetrics

logger = logging.getLogger(__name__)

OPEN = frozenset(
    ("/livez", "/readyz", "/health", "/ping", "/version", "/metrics", "/docs", "/redoc", "/openapi.json")
)
"""Paths that need no key."""
CLIENT_GONE = 499

_WORK = ("/v1/", "/tokenize", "/detokenize")
"""How the paths begin that limits and draining are about."""

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """Outermost ASGI layer. While `draining`, new work is refused and probes and metrics are still answered."""

    def __init__(self, app: ASGIApp, service: Service, tracer: Tracer | None) -> None:
        config = service.config
        self._app = app
        self._service = service
        self._keys = Keys(config.api_key, config.admin_key)
        self._admission = Admission(config, service.engine)
        self._metrics = HTTPMetrics(service.engine.metrics.registry)
        self._tracer = tracer
        self._logs_requests = not config.disable_log_requests
        self._root = config.root_path
        self._headers = SECURITY_HEADERS + (STRICT_TRANSPORT if config.ssl_certfile else [])
        self.draining = False
        self.num_active = 0
        """Requests for work that are not answered in full."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        path: str = scope["path"].removeprefix(self._root)
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        scope[SERVER_SEND] = send
        address = scope.get("client")
        record = RequestRecord(time.monotonic(), address[0] if address else "")
        current_record.set(record)
        status = 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (b"x-request-id", request_id.encode())
                message["headers"] = [*message.get("headers", ()), own, *self._headers]
            await send(message)

        is_work = path.startswith(_WORK) and scope["method"] == "POST"
        self.num_active += is_work
        try:
            with self._let_in(scope, path, headers, is_work):
                await self._app(scope, await _received(headers, receive), reply)
        except ClientDisconnectedError:
            status = status or CLIENT_GONE
        except ToolkitError as error:
            if status:
                raise
            response = error_response(error)
            if isinstance(error, BodyTimeoutError):
                response.headers["Connection"] = "close"  # what still comes of the body is no request
            await response(scope, receive, reply)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            logger.exception("request %s to %s failed", request_id, path)
            if not status:
                await error_response(error)(scope, receive, reply)
        finally:
            self.num_active -= is_work
            seconds = time.monotonic() - record.started
            self._metrics.observe(scope.get("route"), scope["method"], status, seconds)
            if status >= 400:
                self._service.engine.metrics.failed(status)
            if is_work and self._logs_requests:
                log_request(record, request_id, self._service.model_name, path, status, seconds)
            if is_work and self._tracer is not None:
                self._tracer.export(record, headers, request_id, path, status, seconds)

    def _let_in(
        self, scope: Scope, path: str, headers: dict[bytes, bytes], is_work: bool
    ) -> AbstractContextManager[None]:
        """Raises a ToolkitError for whom it is not let in."""
        role, key = self._keys.find(headers)
        scope["state"]["role"] = role
        if role is Role.NOBODY and path not in OPEN and not path.startswith(DOCS_FILES):
            raise wants_key()
        if not is_work:
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
