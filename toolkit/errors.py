"""The user's mistakes, each as one readable paragraph: what is wrong, the evidence, what to do.

Anything that is not a `ToolkitError` is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ToolkitError(Exception):
    """Something the user can mend. `status` is its HTTP status; `code` and `param` are OpenAI's error fields."""

    status = 500
    type = "internal_error"
    retry_after: int | None = None
    """Seconds after which the same request may succeed."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class InvalidRequestError(ToolkitError, ValueError):
    """A request that cannot be carried out as it stands."""

    status = 400
    type = "invalid_request_error"


class ConfigError(ToolkitError, ValueError):
    """A setting that cannot be used: unknown, out of range, or at odds with another."""

    status = 400
    type = "config_error"


class ModelNotFoundError(ToolkitError):
    """No such model, in a folder, in the cache or on the hub."""

    status = 404
    type = "not_found_error"


class CheckpointError(ToolkitError):
    """A model folder whose files are missing, truncated, corrupt or of an unsupported kind."""

    type = "checkpoint_error"


class OutOfMemoryError(ToolkitError):
    """Not enough memory to load the model or to run a step."""

    status = 503
    type = "out_of_memory_error"


class ServerUnavailableError(ToolkitError):
    """The server is draining or its engine does not work; the request was not carried out."""

    status = 503
    retry_after = 5
    type = "service_unavailable_error"


class EngineError(ToolkitError):
    """A request that the engine accepted and could not finish."""

    type = "engine_error"


class WorkersLostError(Exception):
    """A process of the engine has ended, or does not answer: no further step can be run. Nobody's mistake, and no bug of its own."""


class EngineDeadError(EngineError):
    """The engine core's process ended; the message carries the root cause."""

    status = 503
    retry_after = 5


class RequestTimeoutError(EngineError):
    """The request took longer than the server lets any."""

    status = 504
    type = "timeout_error"


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names most like `name`, best first; empty when none is near."""
    return difflib.get_close_matches(name, list(known), n=count, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A sentence for an error message: ' Did you mean a or b?', or nothing."""
    names = nearest(name, known)
    return f" Did you mean {' or '.join(names)}?" if names else ""
