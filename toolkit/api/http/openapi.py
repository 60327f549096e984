"""The OpenAPI document behind /docs. Response schemas come from the structs of the responses."""

from typing import Any

import msgspec
from fastapi import FastAPI

from toolkit.api.http.error_bodies import ErrorBody

_REF = "#/components/schemas/{name}"
_described: list[type[msgspec.Struct]] = [ErrorBody]

DOCS_FILES = "/docs-files"
"""Path of the scripts of /docs and /redoc, so that the pages work without internet access."""

Responses = dict[int | str, dict[str, Any]]


def answers(kind: type[msgspec.Struct] | str, *, stream: bool = False) -> Responses:
    """Return a route's `responses`: a struct, or an object that a text describes.

    `stream`: the response may also be server-sent events."""
    if isinstance(kind, str):
        schema: dict[str, Any] = {"type": "object", "description": kind}
    else:
        _described.append(kind)
        schema = {"$ref": _REF.format(name=kind.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
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


def _complete(document: dict[str, Any]) -> None:
    _, schemas = msgspec.json.schema_components(_described, ref_template=_REF)
    components = document.setdefault("components", {})
    components.setdefault("schemas", {}).update(schemas)
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    error = {"application/json": {"schema": {"$ref": _REF.format(name=ErrorBody.__name__)}}}
    for methods in document["paths"].values():
        for route in methods.values():
            route["responses"].pop("422", None)  # ours are 400
            content = route["responses"]["200"].get("content", {})
            if content.get("application/json") == {"schema": {}}:  # FastAPI's default
                del content["application/json"]
            route["responses"]["default"] = {"description": "An error", "content": error}
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
