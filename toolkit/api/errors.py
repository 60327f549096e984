"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from toolkit.errors import InvalidRequestError, ToolkitError


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


def error_detail(error: Exception) -> ErrorDetail:
    """What a client is told of an error. A bug's text stays in the log."""
    if isinstance(error, ToolkitError):
        return ErrorDetail(error.message, error.type, error.param, error.code)
    return ErrorDetail("The server met an error of its own; its log has the details.", "internal_error")


def error_body(error: Exception) -> bytes:
    """The JSON of an error."""
    return msgspec.json.encode(ErrorBody(error_detail(error)))


def error_response(error: Exception) -> Response:
    status = error.status if isinstance(error, ToolkitError) else 500
    retry_after = getattr(error, "retry_after", None)
    headers = {"Retry-After": str(retry_after)} if retry_after is not None else None
    return Response(error_body(error), status, headers, "application/json")


def validation_error(errors: Sequence[Any]) -> InvalidRequestError:
    """One readable sentence from pydantic's findings; of a union's several, the first."""
    first = errors[0]
    location = [part for part in first.get("loc") or () if not str(part).startswith("(")]
    # A union's branch stands in the location too: the parameter's name is what comes first, with its index.
    path = [str(part) for part in location if part != "body"][:1] + [
        str(p) for p in location[2:] if isinstance(p, int)
    ]
    kind, message = first.get("type"), str(first.get("msg")).removeprefix("Value error, ")
    if kind in ("extra_forbidden", "missing"):
        path = [str(part) for part in location if part != "body"]
    name = ".".join(path)
    if kind == "json_invalid":
        return InvalidRequestError(
            f"The body is not valid JSON: {first.get('ctx', {}).get('error', message)}."
        )
    if kind == "extra_forbidden":
        return InvalidRequestError(f"There is no parameter {name!r}, or it is not supported.", param=name)
    if kind == "model_attributes_type" and not name:
        return InvalidRequestError(
            "The body is not a JSON object, or not said to be one: send 'Content-Type: application/json'."
        )
    if kind == "missing":
        return InvalidRequestError(f"{name or 'The body'} is missing.", param=name or None)
    return InvalidRequestError(f"{name}: {message}." if name else f"{message}.", param=name or None)
