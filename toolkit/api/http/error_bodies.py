"""Error responses, in the format of OpenAI's, Anthropic's or Ollama's interface."""

import re
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from toolkit.api.http.wrong_values import describe
from toolkit.errors import ContextLengthError, InvalidRequestError, ToolkitError

_NAME = re.compile(r"[\w-]{1,256}", re.ASCII)
OLLAMA_PATHS = "/api/"  # how the paths of Ollama's interface begin


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class OllamaErrorBody(msgspec.Struct):
    error: str


def error_detail(error: Exception) -> ErrorDetail:
    """Return the public fields of an error. The text of a bug stays in the log."""
    if isinstance(error, ToolkitError):
        return ErrorDetail(error.message, error.type, error.param, error.code)
    return ErrorDetail("Internal error. See the server's log for details.", "internal_error")


def error_body(error: Exception) -> bytes:
    """Return the JSON of an error."""
    return msgspec.json.encode(ErrorBody(error_detail(error)))


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, ToolkitError) else 500


def speaks_anthropic(scope: Scope) -> bool:
    """Return True for requests to Anthropic's interface."""
    return _path_of(scope).startswith("/v1/messages")


def speaks_ollama(scope: Scope) -> bool:
    """Return True for requests to Ollama's interface."""
    return _path_of(scope).startswith(OLLAMA_PATHS)


def _path_of(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def ollama_error(error: Exception) -> bytes:
    """Return the JSON of an error for Ollama's clients."""
    return msgspec.json.encode(OllamaErrorBody(error_detail(error).message))


def anthropic_error(error: Exception, request_id: str) -> dict[str, Any]:
    """Return the body of an error for Anthropic's clients.

    It has the fields of all errors, and one of Anthropic's types."""
    detail, status = error_detail(error), status_of(error)
    detail.type = _ANTHROPIC_TYPES.get(
        status, "invalid_request_error" if status < 500 else "api_error"
    )
    if isinstance(error, ContextLengthError):
        detail.message = error.anthropic_message
    fields = msgspec.structs.asdict(detail)
    if detail.code is not None:
        fields["details"] = {"error_code": detail.code}
    return {"type": "error", "error": fields, "request_id": request_id}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_response(error: Exception, scope: Scope) -> Response:
    """Return the response for an error, in the format of the interface that was called.

    Parameters have that interface's names."""
    if isinstance(error, InvalidRequestError) and "param_names" in scope.get("state", {}):
        error = error.renamed(scope["state"]["param_names"])
    if speaks_anthropic(scope):
        body = msgspec.json.encode(anthropic_error(error, scope["state"]["request_id"]))
    elif speaks_ollama(scope):
        body = ollama_error(error)
    else:
        body = error_body(error)
    headers = {}
    if (retry_after := getattr(error, "retry_after", None)) is not None:
        headers["Retry-After"] = str(retry_after)
    if (status := status_of(error)) == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body, status, headers, "application/json")


def unreadable(error: BaseException | None) -> InvalidRequestError | None:
    """Convert an error in decoding a body. Returns None for other errors.

    Such a body has bytes that are not in its encoding, or too long a number."""
    if isinstance(error, UnicodeDecodeError):
        wrong, place = error.object[error.start], error.start + 1
        return InvalidRequestError(
            f"The body is not valid {error.encoding.upper()}: 0x{wrong:02x} at byte {place}."
        )
    if isinstance(error, ValueError):
        return InvalidRequestError(
            f"The body has a number of more than {sys.get_int_max_str_digits():,} digits."
        )
    return None


def join(path: str, part: str | int) -> str:
    """Return the path of a field or of an item of a list, such as `messages[1].content`."""
    if isinstance(part, int):
        return f"{path}[{part}]"
    return f"{path}.{part}" if path else part


def validation_error(errors: Sequence[Any]) -> InvalidRequestError:
    """Convert pydantic's errors into one message, about the first."""
    first = errors[0]
    kind = first["type"]
    message = describe(first)
    location = [part for part in first.get("loc") or () if not str(part).startswith("(")]
    name = ""
    for part in location[1:] if location[:1] == ["body"] else location:
        if isinstance(part, int) or _NAME.fullmatch(part):  # others are branches of unions
            name = join(name, part)
    if kind == "json_invalid":
        problem = str(first.get("ctx", {}).get("error", message)).removesuffix(" at")
        return InvalidRequestError(
            f"The body is not valid JSON: {problem} at character {location[-1] + 1}."
        )
    if kind == "extra_forbidden":
        return InvalidRequestError(f"{name!r} is not a supported parameter.", param=name)
    if kind == "model_attributes_type" and not name:
        return InvalidRequestError(
            "The body is not a JSON object, or its type is not declared: send 'Content-Type: "
            "application/json'."
        )
    if kind == "missing":
        return InvalidRequestError(f"{name or 'The body'} is missing.", param=name or None)
    if message.startswith("must "):
        return InvalidRequestError(f"{name or 'The body'} {message}.", param=name or None)
    return InvalidRequestError(f"{name}: {message}." if name else f"{message}.", param=name or None)
