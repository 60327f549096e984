"""Limits of a request's body, of the queue, and per client."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from starlette.types import Receive

from toolkit.api.http.server import ServedModel, Server, Target
from toolkit.api.http.streaming import ClientDisconnectedError
from toolkit.errors import InvalidRequestError, ToolkitError
from toolkit.metrics import Metrics

MAX_BODY = 32 * 2**20  # bytes
BODY_TIMEOUT = 120.0  # seconds to receive a body
MAX_BODIES = 256 * 2**20  # bytes of all bodies of a process, without FREE_BODY of each
FREE_BODY = 64 * 2**10
SLOW_BODY = 5.0  # seconds after which a body that still arrives may give way to others
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


class BodiesTooLargeError(ToolkitError):
    """The memory for bodies is in use."""

    status = 503
    type = "service_unavailable_error"
    retry_after = 1


class TooManyRequestsError(ToolkitError):
    """The queue is full, or the client has reached a limit."""

    status = 429
    type = "rate_limit_error"


class BodyMemory:
    """Memory of the bodies of a process: at most MAX_BODIES. Small ones always fit.

    Nothing waits for it. A body that does not fit ends the one that has been arriving longest, if
    that is longer than SLOW_BODY, else itself."""

    def __init__(self) -> None:
        self._used = 0
        self._arriving: dict[IncomingBody, float] = {}  # since when, oldest first

    @contextmanager
    def body(self) -> Iterator[IncomingBody]:
        """Read a body within the block. Frees its memory at the end, if it is not freed before."""
        incoming = IncomingBody(self)
        try:
            yield incoming
        finally:
            incoming.free()

    def add(self, body: IncomingBody) -> None:
        """Note that a body starts to arrive."""
        self._arriving[body] = time.monotonic()

    def remove(self, body: IncomingBody) -> None:
        """Note that a body is complete, or not read further."""
        self._arriving.pop(body, None)

    def use(self, size: int) -> None:
        """Use memory, or free it if `size` is negative. Raises BodiesTooLargeError."""
        self._used += size
        while size > 0 and self._used > MAX_BODIES:
            slowest = next(iter(self._arriving), None)
            if slowest is None or time.monotonic() - self._arriving[slowest] < SLOW_BODY:
                self._used -= size
                raise BodiesTooLargeError(_NO_MEMORY)
            slowest.end()


class IncomingBody:
    """A request's body, in a BodyMemory."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._used = 0
        self._timeout: asyncio.Timeout | None = None
        self._is_ended = False  # it gave way to others

    async def read(self, receive: Receive) -> bytes:
        """Receive the complete body.

        Raises the errors of `arriving`, BodyTooLargeError, ClientDisconnectedError, and
        InvalidRequestError for JSON with too many or too deeply nested values."""
        chunks, size, more = [], 0, True
        async with self.arriving(BODY_TIMEOUT):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                chunks.append(message.get("body", b""))
                size += len(chunks[-1])
                more = message.get("more_body", False)
                check_length(size)
                self.hold(size)
        body = b"".join(chunks)
        check_shape(body)
        return body

    @asynccontextmanager
    async def arriving(self, seconds: float) -> AsyncIterator[None]:
        """Receive the body within the block, in limited time.

        Raises BodyTimeoutError, and BodiesTooLargeError if it has to give way to others."""
        self._memory.add(self)
        try:
            async with asyncio.timeout(seconds) as self._timeout:
                yield
        except TimeoutError:
            if self._is_ended:
                raise BodiesTooLargeError(_NO_MEMORY) from None
            raise BodyTimeoutError(f"The body did not arrive within {seconds:g} s.") from None
        finally:
            self._memory.remove(self)

    def hold(self, size: int) -> None:
        """Use memory for the `size` bytes of the body that are stored now.

        Raises BodiesTooLargeError."""
        needed = max(0, size - FREE_BODY) - self._used
        self._memory.use(needed)
        self._used += needed

    def end(self) -> None:
        """Let `arriving` raise BodiesTooLargeError, and free the memory."""
        assert self._timeout is not None
        self._is_ended = True
        with suppress(RuntimeError):  # its time is over now, too
            self._timeout.reschedule(0.0)
        self._memory.remove(self)
        self.free()

    def free(self) -> None:
        """Free the memory: the body is no longer stored."""
        self._memory.use(-self._used)
        self._used = 0


_NO_MEMORY = (
    f"The memory for bodies ({MAX_BODIES // 2**20} MiB) is in use. Try again later, with a body of "
    f"at most {FREE_BODY // 2**10} KiB if possible."
)


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

    def __init__(self, server: Server) -> None:
        config = server.config
        self._max_open, self._rate = config.max_requests_per_key, config.requests_per_minute
        self._server = server
        self._open: dict[object, int] = {}
        self._budgets: OrderedDict[object, tuple[float, float]] = OrderedDict()
        """(requests left, as of when) per client: a bucket of one minute's requests."""

    @contextmanager
    def admitted(self, client: object) -> Iterator[None]:
        """Count a client's request as open within the block. Raises TooManyRequestsError."""
        problems = [_queue_problem(self._server, model) for model in self._server.models]
        if all(problems):  # else the model's is checked when it is known
            raise _refused(self._server.metrics, "queue", str(problems[0]))
        open_now = self._open.get(client, 0) + self._server.background.count(client)
        if self._max_open is not None and open_now >= self._max_open:
            message = f"You have {self._max_open} open requests, the maximum."
            raise _refused(self._server.metrics, "key", message)
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
            raise _refused(self._server.metrics, "rate", message, (1 - budget) * 60 / rate)


def check_queue(target: Target, num_answers: int = 1, num_tokens: int = 0) -> None:
    """Raise TooManyRequestsError if the queue cannot take more answers or prompt tokens.

    Each of several API workers has an equal part of the queue. Answers that can run at once do not
    count."""
    if problem := _queue_problem(target.server, target.model, num_answers, num_tokens):
        raise _refused(target.engine.metrics, "queue", problem)


def room_for_answers(target: Target, most: int) -> int:
    """Return how many of `most` answers to start at once: fewer if the queue is short, at least 1.

    Raises TooManyRequestsError if the queue cannot take one."""
    count = most
    while count > 1 and _queue_problem(target.server, target.model, count):
        count //= 2
    check_queue(target, count)
    return count


def _queue_problem(
    server: Server, model: ServedModel, num_answers: int = 1, num_tokens: int = 0
) -> str | None:
    """Return why the queue of a model, or that of all models together, takes no more."""
    all_engines = [one.engine for one in server.models]
    for engines, limits in (([model.engine], model.limits), (all_engines, server.limits)):
        if limits is None:
            continue
        waiting = sum(engine.num_waiting for engine in engines)
        most = math.ceil(limits.requests / server.config.api_workers)
        if waiting >= most:
            return f"{waiting} requests wait to run, the maximum."
        free = sum(max(0, one.max_num_running - one.stats.num_running) for one in engines)
        if waiting + num_answers - free > most:
            return (
                f"{waiting} requests wait to run, of at most {most}, so {num_answers} more answers "
                "are too many."
            )
        if limits.tokens is None:
            continue
        tokens = sum(engine.num_waiting_tokens for engine in engines)
        most = math.ceil(limits.tokens / server.config.api_workers)
        if tokens and tokens + max(num_tokens, 1) > most:  # a single request may be larger
            return (
                f"Requests of {tokens} tokens wait to run, of at most {most}, so "
                f"{num_tokens or 'any'} more are too many."
            )
    return None


def _refused(
    metrics: Metrics, reason: str, message: str, seconds: float = 1.0
) -> TooManyRequestsError:
    metrics.count_rejection(reason)
    error = TooManyRequestsError(f"{message} Try again later.", code="rate_limit_exceeded")
    error.retry_after = math.ceil(seconds)
    return error
