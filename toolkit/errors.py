"""Errors shown to users, each as one paragraph: what happened, the evidence, what to do.

Any other exception is a bug and keeps its traceback."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Self

MAX_WORD = 600  # characters of a word in a message, such as a path or a name


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

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the error of an interface whose parameters have other `names`."""
        param = self.param and names.get(self.param, self.param)
        return type(self)(self.message, param=param, code=self.code)


class InvalidParamError(InvalidRequestError):
    """Invalid value of one parameter. The message is `param`, then `problem`."""

    def __init__(self, param: str, problem: str, *, code: str | None = None) -> None:
        super().__init__(f"{param} {problem}", param=param, code=code)
        self.problem = problem

    def renamed(self, names: Mapping[str, str]) -> Self:
        param = self.param or ""
        return type(self)(names.get(param, param), self.problem, code=self.code)


class ContextLengthError(InvalidRequestError):
    """A prompt that, with the tokens to generate, is longer than the model's context.

    Clients recognize the wording: OpenAI's in the message, Anthropic's in `anthropic_message`.
    `source`: parameter that holds the prompt, perhaps with an index. `size`: its tokens, or
    characters if they are too many to be tokenized. `max_tokens`: set if the prompt alone fits."""

    def __init__(
        self,
        limit: int,
        source: str,
        size: int,
        unit: str = "tokens",
        *,
        max_tokens: int | None = None,
        max_tokens_name: str = "max_tokens",
    ) -> None:
        self._limit, self._source, self._size, self._unit = limit, source, size, unit
        self._max_tokens, self._max_tokens_name = max_tokens, max_tokens_name
        problem = f"your {source} resulted in {size} {unit}"
        advice = f"Please reduce the length of the {source}"
        param = source.partition("[")[0]
        if max_tokens is not None:
            problem = (
                f"you requested {size + max_tokens} tokens ({size} in the {source}, {max_tokens} "
                "in the completion)"
            )
            if room := limit - size:
                advice += f", or set {max_tokens_name} to at most {room}"
                param = max_tokens_name
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, {problem}. {advice}.",
            param=param,
            code="context_length_exceeded",
        )

    @property
    def anthropic_message(self) -> str:
        limit, size = self._limit, self._size
        if self._max_tokens is None:
            bound = f"{limit}" if self._unit == "tokens" else f"{limit} tokens"
            return f"prompt is too long: {size} {self._unit} > {bound} maximum"
        return (
            f"input length and `max_tokens` exceed context limit: {size} + {self._max_tokens} > "
            f"{limit}, decrease input length or `max_tokens` and try again"
        )

    def renamed(self, names: Mapping[str, str]) -> Self:
        return type(self)(
            self._limit,
            names.get(self._source, self._source),
            self._size,
            self._unit,
            max_tokens=self._max_tokens,
            max_tokens_name=names.get(self._max_tokens_name, self._max_tokens_name),
        )


class ConfigError(ToolkitError, ValueError):
    """Unknown setting, value out of range, or conflict between two settings."""

    status = 400
    type = "config_error"


class PluginError(ToolkitError):
    """A plug-in that cannot be loaded or used."""

    type = "plugin_error"


class ModelNotFoundError(ToolkitError):
    """The model is in no folder, not in the cache and not on the hub."""

    status = 404
    type = "not_found_error"


class CheckpointError(ToolkitError):
    """A model folder with missing, truncated, corrupt or unsupported files.

    The message is one line: names in files may have anything, and any length."""

    type = "checkpoint_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        from toolkit.logs import escape_line  # whose dependency this module does not need

        super().__init__(_shortened(escape_line(message)), param=param, code=code)


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
    """Return the known names similar to `name`, best first, else the few that begin with it."""
    if len(name) > MAX_WORD:
        return []
    names = list(known)
    longer = [one for one in names if one.startswith(name)]
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.75)
    return close or (longer if len(longer) <= count else [])


def _shortened(message: str) -> str:
    """Return the message with words of at most MAX_WORD characters."""
    return re.sub(
        rf"\S{{{MAX_WORD},}}",
        lambda found: f"{found[0][: MAX_WORD - 50]}...{found[0][-40:]}",
        message,
    )


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean a or b?' for an error message, or an empty string."""
    names = nearest(name, known)
    return f" Did you mean {' or '.join(names)}?" if names else ""


@contextmanager
def errors_about(subject: str) -> Iterator[None]:
    """Begin the messages of errors with their subject."""
    try:
        yield
    except ToolkitError as error:
        raise type(error)(f"{subject}: {error.message}") from None


def error_of_kind(kind: str, message: str) -> ToolkitError | None:
    """Make the error of another process from its class name; None if that is a bug."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, ToolkitError):
        return found(message)
    return None
