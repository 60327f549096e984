"""Limits of a request's body, of the queue, and per client."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from toolkit.api.http.streaming import ClientDisconnectedError
from toolkit.config import ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.errors import InvalidRequestError, ToolkitError

MAX_BODY = 32 * 2**20  # bytes
BODY_TIMEOUT = 120.0  # seconds to receive a body
MAX_VALUES = 2**21  # in a body; more than the tokens of any context
MAX_NESTS = 2**16  # lists and objects in a body
MAX_DEPTH = 64  # nesting of lists and objects
MAX_KNOWN_CLIENTS = 10_000  # whose rates are stored; the least recent one is dropped


class BodyTooLargeError(ToolkitError):
    """The body is larger than any request needs."""

    status = 413
    type = "invalid_request_error"


class BodyTimeoutError(ToolkitError):
    """The body did not arrive in time."""

    status = 408
    type = "timeout_error"


class TooManyRequestsError(ToolkitError):
    """The queue is full, or the client has reached a limit."""

    status = 429
    type = "rate_limit_error"


async def read_body(receive: Receive) -> bytes:
    """Receive a complete body.

    Raises BodyTooLargeError, BodyTimeoutError, ClientDisconnectedError, and InvalidRequestError for
    JSON with too many or too deeply nested values."""
    chunks, size, more = [], 0, True
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                more = message.get("more_body", False)
                check_length(size)
    except TimeoutError:
        raise BodyTimeoutError(f"The body did not arrive within {BODY_TIMEOUT:g} s.") from None
    body = b"".join(chunks)
    check_shape(body)
    return body


def check_length(size: int) -> None:
    """Raise BodyTooLargeError for too many bytes."""
    if size > MAX_BODY:
        raise BodyTooLargeError(f"The body is larger than {MAX_BODY // 2**20} MiB.")


def check_shape(body: bytes) -> None:
    """Raise InvalidRequestError for JSON with too many or too deeply nested values.

    Counts characters, without parsing."""
    if body.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"The body has more than {MAX_VALUES:,} values.")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        parts = body.replace(rb"\\", b"").replace(rb"\"", b"")
        if parts.count(b'"') > 2 * MAX_VALUES:
            raise InvalidRequestError(f"The body has more than {MAX_VALUES:,} strings.")
        outside_strings = b"".join(parts.split(b'"')[::2])
        left = outside_strings.translate(_SQUARE, _NOT_BRACKETS)
        if len(left) > 2 * MAX_NESTS:
            raise InvalidRequestError(f"The body has more than {MAX_NESTS:,} lists and objects.")
        for _ in range(MAX_DEPTH):
            left = left.replace(b"[]", b"")  # the innermost pairs
            if not left:
                return
        raise InvalidRequestError(
            f"The body is nested more than {MAX_DEPTH} levels deep, or a bracket is not closed."
        )


_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_SQUARE = bytes.maketrans(b"{}", b"[]")


class Admission:
    """Admits work within the limits of the queue and of each client."""

    def __init__(self, config: ServerConfig, engine: AsyncLLM) -> None:
        self._config = config
        self._max_open, self._rate = config.max_requests_per_key, config.requests_per_minute
        self._engine = engine
        self._open: dict[object, int] = {}
        self._budgets: OrderedDict[object, tuple[float, float]] = OrderedDict()
        """(requests left, as of when) per client: a bucket of one minute's requests."""

    @contextmanager
    def admitted(self, client: object) -> Iterator[None]:
        """Count a client's request as open within the block. Raises TooManyRequestsError."""
        check_queue(self._engine, self._config)
        if self._max_open is not None and self._open.get(client, 0) >= self._max_open:
            raise _refused(
                self._engine,
                "key",
                f"You have {self._max_open} open requests, the maximum.",
                1.0,
            )
        if self._rate is not None:
            self._spend(client, self._rate)
        self._open[client] = self._open.get(client, 0) + 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def _spend(self, client: object, rate: int) -> None:
        now = time.monotonic()
        budget, at = self._budgets.pop(client, (float(rate), now))
        budget = min(rate, budget + (now - at) * rate / 60)
        self._budgets[client] = (budget - (budget >= 1), now)
        if len(self._budgets) > MAX_KNOWN_CLIENTS:
            self._budgets.popitem(last=False)
        if budget < 1:
            message = f"You have sent more than {rate} requests in a minute."
            raise _refused(self._engine, "rate", message, (1 - budget) * 60 / rate)


def check_queue(
    engine: AsyncLLM, config: ServerConfig, num_answers: int = 1, num_tokens: int = 0
) -> None:
    """Raise TooManyRequestsError if the queue cannot take more answers or prompt tokens.

    Each of several API workers has an equal part of the queue. Answers that can run at once do not
    count."""
    waiting, tokens = engine.num_waiting, engine.num_waiting_tokens
    most = math.ceil(config.max_queue / config.api_workers)
    if waiting >= most:
        raise _refused(engine, "queue", f"{waiting} requests wait to run, the maximum.", 1.0)
    free = max(0, engine.max_num_running - engine.stats.num_running)
    if waiting + num_answers - free > most:
        message = (
            f"{waiting} requests wait to run, of at most {most}, so {num_answers} more answers are "
            "too many."
        )
        raise _refused(engine, "queue", message, 1.0)
    if config.max_queue_tokens is None:
        return
    most = math.ceil(config.max_queue_tokens / config.api_workers)
    if tokens and tokens + max(num_tokens, 1) > most:  # a single request may be larger
        message = (
            f"Requests of {tokens} tokens wait to run, of at most {most}, so {num_tokens or 'any'} "
            "more are too many."
        )
        raise _refused(engine, "queue", message, 1.0)


def _refused(engine: AsyncLLM, reason: str, message: str, seconds: float) -> TooManyRequestsError:
    engine.metrics.count_rejection(reason)
    error = TooManyRequestsError(f"{message} Try again later.", code="rate_limit_exceeded")
    error.retry_after = math.ceil(seconds)
    return error
