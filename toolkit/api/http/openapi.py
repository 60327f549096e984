"""The OpenAPI document behind /docs. Response schemas come from the structs of the responses."""

import asyncio
import mimetypes
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route, request_response
from starlette.types import Scope

from toolkit.api.http.error_bodies import OLLAMA_PATHS, ErrorBody, OllamaErrorBody

EVENTS = "text/event-stream"
_REF = "#/components/schemas/{name}"
_described: list[type[msgspec.Struct]] = [ErrorBody, OllamaErrorBody]

DOCS_FILES = "/docs-files"
"""Path of the scripts of /docs and /redoc, so that the pages work without internet access."""

Endpoint = Callable[[Request], Awaitable[Response]]
Responses = dict[int | str, dict[str, Any]]


def answers(
    kind: type[msgspec.Struct] | str | dict[str, Any],
    *,
    stream: bool = False,
    stream_type: str = EVENTS,
) -> Responses:
    """Return a route's `responses`: a struct, an object that a text describes, or a schema.

    `stream`: the response may also be a stream, of the media type `stream_type`."""
    if isinstance(kind, str):
        schema: dict[str, Any] = {"type": "object", "description": kind}
    elif isinstance(kind, dict):
        schema = kind
    else:
        _described.append(kind)
        schema = {"$ref": _REF.format(name=kind.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content[stream_type] = {"schema": {"type": "string"}}
    return {200: {"description": "The response", "content": content}}


def nothing(description: str) -> Responses:
    """Return the `responses` of a route that returns only a status."""
    return {200: {"description": description}}


def describe(app: FastAPI) -> None:
    """Add response schemas, the error response and the key to an application's document."""
    make_document = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(make_document())
        return make_document()

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


class DocsFiles(StaticFiles):
    """Files served from memory: each download would take a thread and an open file."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        if scope["method"] != "GET":
            raise HTTPException(405)
        assert self.directory is not None
        content = _files(Path(self.directory)).get(path)
        if content is None:
            raise HTTPException(404)
        length = {"Content-Length": str(len(content))}
        kind = mimetypes.guess_type(path)[0]
        return StreamingResponse(_pieces(content), headers=length, media_type=kind)


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    """Yield a file in parts, between which other connections have their turn."""
    for start in range(0, len(content), 2**16):
        yield content[start : start + 2**16]
        await asyncio.sleep(0)


@cache
def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def serve_docs_from_memory(app: FastAPI) -> None:
    """Keep the document and the files of /docs: they need no key, so they have to be cheap."""
    for route in app.routes:
        if isinstance(route, Mount) and isinstance(route.app, StaticFiles):
            assert route.app.directory is not None
            route.app = DocsFiles(directory=route.app.directory)
        elif isinstance(route, Route) and route.path == app.openapi_url:
            route.app = request_response(_kept(route.endpoint))


def _kept(endpoint: Endpoint) -> Endpoint:
    """Return an endpoint that always gives the first response of another."""
    response: Response | None = None

    async def kept(request: Request) -> Response:
        nonlocal response
        if response is None:
            response = await endpoint(request)
        return response

    return kept


def _complete(document: dict[str, Any]) -> None:
    _, schemas = msgspec.json.schema_components(_described, ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    for path, methods in document["paths"].items():
        body = OllamaErrorBody if path.startswith(OLLAMA_PATHS) else ErrorBody
        error = {"application/json": {"schema": {"$ref": _REF.format(name=body.__name__)}}}
        for route in methods.values():
            route["responses"].pop("422", None)  # ours are 400
            content = route["responses"]["200"].get("content", {})
            if content.get("application/json") == {"schema": {}}:  # FastAPI's default
                del content["application/json"]
            route["responses"]["default"] = {"description": "An error", "content": error}
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
