"""How much a client may send and ask for, before anything is made of it."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Receive

from toolkit.api.streaming import ClientDisconnectedError
from toolkit.config import ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.errors import InvalidRequestError, ToolkitError

MAX_BODY = 32 * 2**20
"""Bytes of one request's body."""
BODY_TIMEOUT = 120.0
"""Seconds that a body gets to come in."""
MAX_VALUES = 2**21
"""Values of one body: more tokens than any context holds."""
MAX_DEPTH = 64
"""Lists and objects inside each other."""
MAX_KNOWN_CLIENTS = 10_000
"""Clients whose rate is known; the one heard of least lately is forgotten."""


class BodyTooLargeError(ToolkitError):
    """The body is larger than any request needs."""

    status = 413
    type = "invalid_request_error"


class BodyTimeoutError(ToolkitError):
    """The body did not come in time."""

    status = 408
    type = "timeout_error"


class TooManyRequestsError(ToolkitError):
    """Not now: the queue is full, or this client has its share."""

    status = 429
    type = "rate_limit_error"


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises BodyTooLargeError, BodyTimeoutError, ClientDisconnectedError, and InvalidRequestError for
    one that would make too many or too deeply nested objects.
    """
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
        raise BodyTimeoutError(f"The body did not come within {BODY_TIMEOUT:g} s.") from None
    body = b"".join(chunks)
    check_shape(body)
    return body


def check_length(size: int) -> None:
    """Raises BodyTooLargeError."""
    if size > MAX_BODY:
        raise BodyTooLargeError(f"The body is larger than {MAX_BODY // 2**20} MiB.")


def check_shape(body: bytes) -> None:
    """Raises InvalidRequestError for JSON that has too many values or is nested too deeply, without reading it."""
    if body.count(b",") > MAX_VALUES:
        raise InvalidRequestError(f"The body has more than {MAX_VALUES:,} values.")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        left = _NOT_BRACKETS.sub(b"", _STRING.sub(b"", body)).translate(_ALIKE)
        for _ in range(MAX_DEPTH):
            left = left.replace(b"[]", b"")  # the innermost
            if not left:
                return
        raise InvalidRequestError(
            f"The body is nested more than {MAX_DEPTH} deep, or its brackets do not close."
        )


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_NOT_BRACKETS = re.compile(rb"[^\[\]{}]++")
_ALIKE = bytes.maketrans(b"{}", b"[]")


class Admission:
    """Whose work is let in: not more than may wait, and of each client not more than its share."""

    def __init__(self, config: ServerConfig, engine: AsyncLLM) -> None:
        """Each of several API workers has its part of the queue."""
        self._max_queue = math.ceil(config.max_queue / config.api_workers)
        self._max_tokens = config.max_queue_tokens and math.ceil(config.max_queue_tokens / config.api_workers)
        self._max_open, self._rate = config.max_requests_per_key, config.requests_per_minute
        self._engine = engine
        self._open: dict[object, int] = {}
        self._budgets: OrderedDict[object, tuple[float, float]] = OrderedDict()
        """For each client: how many requests it may make, as of when. It gains the rate each minute, up to the rate."""

    @contextmanager
    def admitted(self, client: object) -> Iterator[None]:
        """While a request of this client runs. Raises TooManyRequestsError."""
        self.check_queue()
        if self._max_open is not None and self._open.get(client, 0) >= self._max_open:
            raise self._refuse("key", f"{self._max_open} of your requests are open, which is the most.", 1.0)
        if self._rate is not None:
            self._spend(client, self._rate)
        self._open[client] = self._open.get(client, 0) + 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def check_queue(self) -> None:
        """Raises TooManyRequestsError when as much waits as may."""
        waiting, tokens = self._engine.num_waiting, self._engine.num_waiting_tokens
        if waiting >= self._max_queue:
            raise self._refuse("queue", f"{waiting} requests wait to run, which is the most.", 1.0)
        if self._max_tokens is not None and tokens >= self._max_tokens:
            raise self._refuse("queue", f"Requests of {tokens} tokens wait to run, which is the most.", 1.0)

    def _spend(self, client: object, rate: int) -> None:
        now = time.monotonic()
        budget, at = self._budgets.pop(client, (float(rate), now))
        budget = min(rate, budget + (now - at) * rate / 60)
        self._budgets[client] = (budget - (budget >= 1), now)
        if len(self._budgets) > MAX_KNOWN_CLIENTS:
            self._budgets.popitem(last=False)
        if budget < 1:
            raise self._refuse("rate", f"More than {rate} requests in a minute.", (1 - budget) * 60 / rate)

    def _refuse(self, reason: str, message: str, seconds: float) -> TooManyRequestsError:
        self._engine.metrics.rejected(reason)
        error = TooManyRequestsError(f"{message} Try again later.", code="rate_limit_exceeded")
        error.retry_after = math.ceil(seconds)
        return error
