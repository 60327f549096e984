"""Routes for operators: live requests, load, settings, the prefix cache."""

import dataclasses
import re
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from toolkit.api.http.body_fields import FAIL_FAST, RequestBody, Text, check_fields
from toolkit.api.http.openapi import answers, nothing
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import server_of
from toolkit.engine.messages import RequestInfo
from toolkit.errors import ToolkitError
from toolkit.version import __version__

router = APIRouter(tags=["operation"])

MAX_ABORTED = 1024  # requests that one call ends

_SECRET = ("api_key", "admin_key")  # settings redacted from /server_info

_USERINFO = re.compile(r"^(\w+://)[^/?#]*@")


class NoSuchRequestError(ToolkitError):
    """No live request has this id."""

    status = 404
    type = "not_found_error"


class AbortRequest(RequestBody):
    """POST /abort_requests."""

    model_config = ConfigDict(
        extra="allow", json_schema_extra={"example": {"request_ids": ["chatcmpl-1"]}}
    )

    request_ids: Annotated[list[Text], FAIL_FAST] = Field(max_length=MAX_ABORTED)


class Requests(msgspec.Struct):
    requests: list[RequestInfo]
    object: str = "list"


class Ended(msgspec.Struct):
    id: str
    num_requests: int
    deleted: bool = True


class Load(msgspec.Struct):
    server_load: int  # requests in the engine
    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float


class ModelInfo(msgspec.Struct):
    model: str
    engine: dict[str, Any]
    device: dict[str, Any]


class ServerInfo(msgspec.Struct):
    version: str
    server: dict[str, Any]
    models: list[ModelInfo]


@router.get("/ping", response_model=None, responses=nothing("The engine is healthy"))
@router.post("/ping", response_model=None, responses=nothing("The engine is healthy"))
@access(Access.OPEN)
async def ping(request: Request) -> Response:
    """Report the server's health like /health, for platforms that probe this path."""
    await server_of(request).check()
    return Response()


@router.get("/load", response_model=None, responses=answers(Load))
async def load(request: Request) -> Response:
    """Return the load of the engine, for load balancers. Covers all API workers."""
    found = await server_of(request).live_requests()
    running = sum(one.state == "running" for one in found.requests)
    total = len(found.requests)
    return _json(Load(total, running, total - running, found.kv_cache_usage))


@router.get("/tk/requests", response_model=None, responses=answers(Requests))
@access(Access.ADMIN)
async def live_requests(request: Request) -> Response:
    """List live requests with state, age, tokens, speed, blocks, preemptions and origin."""
    return _json(Requests((await server_of(request).live_requests()).requests))


@router.delete("/tk/requests/{id:path}", response_model=None, responses=answers(Ended))
@access(Access.ADMIN)
async def end_request(id: str, request: Request) -> Response:
    """End a live request, by the id of its response or its id in /tk/requests.

    Its client gets the response so far, with the finish reason "abort"."""
    ended = (await server_of(request).end_requests(id)).requests
    if not ended:
        raise NoSuchRequestError(
            f"No live request has the id {id[:128]!r}.", code="request_not_found"
        )
    return _json(Ended(id, len(ended)))


@router.post("/abort_requests", response_model=None, responses=nothing("The requests have ended"))
@access(Access.ADMIN)
async def abort_requests(body: AbortRequest, request: Request) -> Response:
    """End live requests by the ids of their responses. Unknown ones have ended already."""
    server = server_of(request)
    check_fields(request, body, strict=server.config.strict)
    for id in dict.fromkeys(body.request_ids):
        await server.end_requests(id)
    return Response()


@router.post("/reset_prefix_cache", response_model=None, responses=nothing("The cache was cleared"))
@access(Access.ADMIN)
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache."""
    for model in server_of(request).models:
        model.engine.reset_prefix_cache()
    return Response()


@router.get("/server_info", response_model=None, responses=answers(ServerInfo))
@access(Access.ADMIN)
async def server_info(request: Request) -> Response:
    """Return the current settings, without keys, and the device of each model."""
    server = server_of(request)
    models = [
        ModelInfo(
            model.name,
            _redacted(dataclasses.asdict(model.engine.config)),
            msgspec.to_builtins(model.engine.info),
        )
        for model in server.models
    ]
    return _json(ServerInfo(__version__, _redacted(dataclasses.asdict(server.config)), models))


def _redacted(settings: dict[str, Any]) -> dict[str, Any]:
    """Redact secret values and the passwords in URLs."""

    def one(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _redacted(value)
        if name in _SECRET and value:
            return "***"
        return _USERINFO.sub(r"\1", value) if isinstance(value, str) else value

    return {name: one(name, value) for name, value in settings.items()}


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
