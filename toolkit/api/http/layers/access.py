"""Access control: keys, draining, the queue, limits per client, and limits of the body."""

from contextlib import AbstractContextManager, nullcontext

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.api.http.error_bodies import error_response
from toolkit.api.http.layers.limits import (
    Admission,
    BodyMemory,
    BodyTimeoutError,
    IncomingBody,
    check_length,
)
from toolkit.api.http.layers.security import (
    Keys,
    Role,
    Sites,
    check_admin,
    check_headers,
    missing_key,
)
from toolkit.api.http.routes import Access, Body
from toolkit.api.http.server import Server
from toolkit.errors import InvalidRequestError, ServerUnavailableError, ToolkitError


class AccessControl:
    """ASGI layer in front of the routes. Refuses a request before its body is read.

    `scope["state"]` has `access`, which the request needs, and `body_kind`. A route of forms finds
    there its `body`, an IncomingBody."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        config = server.config
        self.app = app
        self._sites = Sites(config)
        self._keys = Keys(config.api_key, config.admin_key)
        self._admission = Admission(server)
        self._memory = BodyMemory()
        self.is_draining = False  # model work is refused. Probes and metrics are still answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        has_started = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                body.free()  # the routes have handled it
            await send(message)

        try:
            with self._admit(scope, headers), self._memory.body() as body:
                scope["state"]["body"] = body
                if scope["state"]["body_kind"] is Body.JSON:
                    receive = await _read(headers, receive, body)
                # A body that no route reads is discarded after the answer.
                await self.app(scope, receive, send_and_note)
        except ToolkitError as error:
            if has_started:
                raise
            response = error_response(error, scope)
            if isinstance(error, BodyTimeoutError):
                # The rest of the body may still come, and is not a request.
                response.headers["Connection"] = "close"
            await response(scope, receive, send)

    def _admit(self, scope: Scope, headers: dict[bytes, bytes]) -> AbstractContextManager[None]:
        """Return a context for the time of the request. Raises ToolkitError if it is refused."""
        check_headers(scope["headers"])
        self._sites.check(scope["method"], headers)
        needed = scope["state"]["access"]
        role, key = self._keys.find(headers)
        address = scope["client"][0] if scope.get("client") else None
        scope["state"]["key"], scope["state"]["client"] = key, key if key >= 0 else address
        if role is Role.NONE and needed is not Access.OPEN:
            raise missing_key()
        if needed is Access.ADMIN:
            check_admin(role, headers, scope["path"])
        if needed is not Access.MODEL_WORK:
            return nullcontext()
        if self.is_draining:
            raise ServerUnavailableError("The server is shutting down and takes no new requests.")
        return self._admission.admitted(scope["state"]["client"])


async def _read(headers: dict[bytes, bytes], receive: Receive, incoming: IncomingBody) -> Receive:
    """Read the body and check its limits. Return a `receive` that yields it in one message."""
    length = headers.get(b"content-length")
    if length is None and b"transfer-encoding" not in headers:
        return receive
    if length is not None:
        if not length.isdigit():
            raise InvalidRequestError("Content-Length is not a number.")
        check_length(int(length[:20]))
    body: bytes | None = await incoming.read(receive)

    async def receive_body() -> Message:
        nonlocal body
        if body is None:
            return await receive()
        message: Message = {"type": "http.request", "body": body, "more_body": False}
        body = None
        return message

    return receive_body
