"""The outermost layer: gives every request an id, counts it and logs it, whatever its outcome."""

import logging
import re
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from toolkit.api.http.error_bodies import error_response, speaks_anthropic, status_of
from toolkit.api.http.layers.access import AccessControl
from toolkit.api.http.layers.cors import with_cors
from toolkit.api.http.layers.request_log import log_request
from toolkit.api.http.layers.security import SECURITY_HEADERS, STRICT_TRANSPORT
from toolkit.api.http.layers.tracing import Tracer
from toolkit.api.http.routes import Access, RouteTable
from toolkit.api.http.server import Server
from toolkit.api.http.streaming import SERVER_SEND, ClientDisconnectedError
from toolkit.engine.front.request_stats import RequestStats, current_stats
from toolkit.metrics import HTTPMetrics

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)


class Gate:
    """Outermost ASGI layer. Inside it are CORS, access control, middleware of plug-ins, routes."""

    def __init__(
        self, app: ASGIApp, routes: RouteTable, server: Server, tracer: Tracer | None
    ) -> None:
        config = server.config
        self.access_control = AccessControl(app, server)
        self._app = with_cors(self.access_control, config)
        self._routes = routes
        self._root_path = config.root_path
        self._server = server
        self._metrics = HTTPMetrics(server.metrics.registry)
        self._tracer = tracer
        self._logs_requests = not config.disable_log_requests
        self._headers = SECURITY_HEADERS + (STRICT_TRANSPORT if config.ssl_certfile else [])
        self.num_active = 0  # requests for model work whose response is not complete
        self.last_used = time.monotonic()  # end of the last request, without open endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        method = scope["method"]
        if method == "HEAD":  # GET's route answers it; the server leaves the body out
            scope = {**scope, "method": "GET"}
        path = scope["path"].removeprefix(self._root_path)  # uvicorn puts it in front
        is_below = self._root_path and path.startswith(f"{self._root_path}/")
        if is_below and not self._routes.has(path):  # the proxy has not stripped it
            scope, path = {**scope, "path": path}, path.removeprefix(self._root_path)
        state["access"] = self._routes.find(scope["method"], path)
        state["body_kind"] = self._routes.body(method, path)
        scope[SERVER_SEND] = send
        address = scope.get("client")
        record = RequestStats(time.monotonic(), address[0] if address else "")
        current_stats.set(record)
        names = (b"x-request-id", b"request-id") if speaks_anthropic(scope) else (b"x-request-id",)
        status = 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [(name, request_id.encode()) for name in names]
                message["headers"] = [*message.get("headers", ()), *own, *self._headers]
            await send(message)

        is_work = state["access"] is Access.MODEL_WORK
        self.num_active += is_work
        try:
            await self._app(scope, receive, reply)
        except ClientDisconnectedError:
            status = status or CLIENT_CLOSED_REQUEST
        except Exception as error:
            logger.exception("request %s to %s failed", request_id, scope["path"])
            if not status:
                await error_response(error, scope)(scope, receive, reply)
        finally:
            self.num_active -= is_work
            if state["access"] is not Access.OPEN:
                self.last_used = time.monotonic()
            del scope[SERVER_SEND]  # refers to the server's request, which refers to the scope
            seconds = time.monotonic() - record.started
            self._metrics.observe(scope.get("route"), method, status, seconds)
            failed = status if record.error is None else status_of(record.error)
            if failed >= 400:
                self._server.metrics.count_error(failed)
            if not record.model and len(self._server.models) == 1:
                record.model = self._server.models[0].name
            if is_work and self._logs_requests:
                log_request(record, request_id, path, status, seconds)
            if is_work and self._tracer is not None:
                self._tracer.export(record, headers, request_id, path, status, seconds)
