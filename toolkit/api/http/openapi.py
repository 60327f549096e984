"""The OpenAPI document behind /docs: what the routes answer is described by the same structs that make the answers."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI

from toolkit.api.http.error_bodies import ErrorBody

_REF = "#/components/schemas/{name}"
_described: list[type[msgspec.Struct]] = [ErrorBody]

DOCS_FILES = "/docs-files/"
"""Where the scripts of /docs and /redoc are: they come from here, and not from a host that a closed network lacks."""

Responses = dict[int | str, dict[str, Any]]


def answers(kind: type[msgspec.Struct] | str, *, stream: bool = False) -> Responses:
    """For a route's `responses`: that it answers with such a struct, or with what a text says. `stream`: or with
    server-sent events.
    """
    if isinstance(kind, str):
        schema: dict[str, Any] = {"type": "object", "description": kind}
    else:
        _described.append(kind)
        schema = {"$ref": _REF.format(name=kind.__name__)}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {200: {"description": "The answer", "content": content}}


def nothing(description: str) -> Responses:
    """For a route whose answer is its status."""
    return {200: {"description": description}}


def describe(app: FastAPI) -> None:
    """Gives an application's document the schemas of the answers, the error that every route can answer with, and the
    key.
    """
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(made())
        return made()

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way


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
            if content.get("application/json") == {
                "schema": {}
            }:  # FastAPI's, where nothing was said
                del content["application/json"]
            route["responses"]["default"] = {"description": "An error", "content": error}
    for name in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(name, None)
