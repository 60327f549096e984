"""Errors shown to users, each as one paragraph: what happened, the evidence, what to do.

Any other exception is a bug and keeps its traceback."""

import difflib
from collections.abc import Iterable


class ToolkitError(Exception):
    """An error that the user can fix.

    `status` is the HTTP status; `type`, `code` and `param` are OpenAI's error fields."""

    status = 500
    type = "internal_error"
    retry_after: int | None = None  # seconds after which the same request may succeed

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(ToolkitError, ValueError):
    """Invalid request."""

    status = 400
    type = "invalid_request_error"


class InvalidParamError(InvalidRequestError):
    """Invalid value of one parameter. The message is `param`, then `problem`."""

    def __init__(self, param: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(f"{param} {problem}", param=param, code=code)
        self.problem = problem


class ConfigError(ToolkitError, ValueError):
    """Unknown setting, value out of range, or conflict between two settings."""

    status = 400
    type = "config_error"


class ModelNotFoundError(ToolkitError):
    """The model is in no folder, not in the cache and not on the hub."""

    status = 404
    type = "not_found_error"


class CheckpointError(ToolkitError):
    """A model folder with missing, truncated, corrupt or unsupported files."""

    type = "checkpoint_error"


class OutOfMemoryError(ToolkitError):
    """Not enough memory to load the model or to run a step."""

    status = 503
    type = "out_of_memory_error"


class ServerUnavailableError(ToolkitError):
    """The server is draining or its engine is down; the request was not run."""

    status = 503
    retry_after = 5
    type = "service_unavailable_error"


class EngineError(ToolkitError):
    """The engine accepted a request and could not finish it."""

    type = "engine_error"


class WorkersLostError(Exception):
    """A process of the engine ended or does not answer, so no further step can run."""


class EngineDeadError(EngineError):
    """The engine core's process ended; the message has the root cause."""

    status = 503
    retry_after = 5


class RequestTimeoutError(EngineError):
    """The request took longer than the server's limit."""

    status = 504
    type = "timeout_error"


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Return the known names most similar to `name`, best first; empty if none is similar."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean a or b?' for an error message, or an empty string."""
    names = nearest(name, known)
    return f" Did you mean {' or '.join(names)}?" if names else ""


def error_of_kind(kind: str, message: str) -> ToolkitError | None:
    """Make the error of another process from its class name; None if that is a bug."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, ToolkitError):
        return found(message)
    return None
