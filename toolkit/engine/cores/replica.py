"""State of one engine core in a front end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from toolkit.engine.cores.core_client import CoreLink
from toolkit.engine.cores.pool import Core
from toolkit.engine.front.observation import observe_gauges
from toolkit.engine.messages import (
    EndRequests,
    EngineOutputs,
    ListRequests,
    Operate,
    OperationResult,
    RequestList,
    StepProbe,
    StepReport,
    ToCore,
)
from toolkit.errors import EngineDeadError, InvalidRequestError, ServerUnavailableError
from toolkit.metrics import Metrics
from toolkit.scheduler.stats import EngineStats
from toolkit.worker.operations import Operation

STEP_MAX_AGE = 1.0  # seconds for which a completed step proves that the core is healthy
PROBE_TIMEOUT = 5.0  # seconds within which a healthy core runs a requested step
MAX_FAILURES = 3  # consecutive failed requests after which a core is avoided
QUERY_TIMEOUT = 10.0  # seconds to answer a query; the core reads queries between steps
OPERATION_TIMEOUT = 120.0  # seconds for an operation, which may read a large file

Query = Callable[[int, int], ListRequests | EndRequests]
"""Builds the query from the client and the ticket that the answer will carry."""


class Replica:
    """State of a core and its replacements in a front end. Requests go to it while it is ready.

    It checks the core's health by its steps, and asks it queries."""

    def __init__(self, core: Core, metrics: Metrics) -> None:
        self.core = core
        self.metrics = metrics  # labelled with the engine's index
        self.stats = EngineStats()
        self._stepped_at = 0.0  # time of the latest successful step
        self._probed_at = 0.0  # time of the unanswered StepProbe; 0: none
        self._step_reported = asyncio.Event()
        self._step_error: str | None = None
        self._num_failures, self._failed_at = 0, 0.0
        """Consecutive failed requests, time of the latest."""
        self._num_queries = 0
        self._queries: dict[int, asyncio.Future[Any]] = {}  # pending queries by ticket

    @property
    def index(self) -> int:
        return self.core.index

    @property
    def name(self) -> str:
        return self.core.name

    @property
    def is_running(self) -> bool:
        return self.core.is_ready

    @property
    def link(self) -> CoreLink:
        """Connection to the current core, or to the previous one."""
        assert self.core.link is not None
        return self.core.link

    @property
    def fatal_error(self) -> EngineDeadError | None:
        """Error of a core that will not be replaced."""
        return None if self.core.error is None else lost_core_error(self.core.error)

    def connect(self) -> None:
        """Switch to a core that has just become ready."""
        self._probed_at, self._step_error = 0.0, None
        self._num_failures = 0

    def disconnect(self) -> None:
        """Stop using the core, which has died or must be replaced."""
        self.stats = EngineStats(adapters={})
        observe_gauges(self.metrics, self.stats)
        self._step_reported.set()
        for asking in self._queries.values():
            if not asking.done():
                asking.set_exception(_restarting_error(self.name))

    def send(self, message: ToCore) -> None:
        """Send a message if the core is running."""
        if self.is_running:
            self.link.send(message)

    def handle(self, message: object) -> None:
        """Handle a message other than EngineOutputs."""
        if isinstance(message, RequestList | OperationResult):
            asking = self._queries.pop(message.ticket, None)
            if asking is not None and not asking.done():
                asking.set_result(message)
        elif isinstance(message, StepReport):
            self._probed_at, self._step_error = 0.0, message.error
            self._stepped_at = time.monotonic()
            self._step_reported.set()

    def record_step(self, message: EngineOutputs, now: float) -> None:
        """Record what a step shows about the core's health."""
        if _shows_a_step(message):
            self._stepped_at, self._step_error = now, None
        if message.stats is not None:
            self.stats = message.stats

    def record_end(self, reason: str, now: float) -> None:
        """Record the end of one of the core's requests."""
        if reason == "error":
            self._num_failures, self._failed_at = self._num_failures + 1, now
        else:
            self._num_failures = 0

    @property
    def is_trusted(self) -> bool:
        """True if the core neither hangs nor fails its requests repeatedly.

        A core that fails requests quickly looks idle, so the router avoids it. After a while it is
        tried again."""
        now = time.monotonic()
        hangs = self._probed_at and now - self._probed_at > PROBE_TIMEOUT
        return not hangs and (
            self._num_failures < MAX_FAILURES or now - self._failed_at > PROBE_TIMEOUT
        )

    def probe(self, now: float) -> bool:
        """Return True if no recent step proves health. Requests a step in that case."""
        if not self.is_running or now - self._stepped_at <= STEP_MAX_AGE:
            return False
        if not self._probed_at:
            self._probed_at = now
            self._step_reported.clear()
            self.link.send(StepProbe(self.link.client))
        return True

    async def query(self, query: Query) -> RequestList:
        """Send a query and return the answer. Raises ServerUnavailableError after QUERY_TIMEOUT."""
        answer: RequestList = await self._ask(query, QUERY_TIMEOUT)
        return answer

    async def operate(self, operation: Operation) -> None:
        """Have an operation done, and wait for it.

        Raises InvalidRequestError if it fails, ServerUnavailableError after OPERATION_TIMEOUT."""
        answer: OperationResult = await self._ask(
            lambda client, ticket: Operate(operation, client, ticket), OPERATION_TIMEOUT
        )
        if answer.error:
            raise InvalidRequestError(answer.error)

    async def _ask(self, ask: Callable[[int, int], ToCore], timeout: float) -> Any:
        self._num_queries += 1
        ticket = self._num_queries
        answer = self._queries[ticket] = asyncio.get_running_loop().create_future()
        self.link.send(ask(self.link.client, ticket))
        try:
            return await asyncio.wait_for(answer, timeout)
        except TimeoutError:
            raise ServerUnavailableError(
                f"{self.name.capitalize()} has not answered for {timeout:g} s."
            ) from None
        finally:
            self._queries.pop(ticket, None)

    async def check(self) -> None:
        """Return if the core has made a step lately, or makes one now.

        Raises ServerUnavailableError if it is restarting or does not answer in time,
        EngineDeadError if it is permanently lost."""
        now = time.monotonic()
        if self.probe(now):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    self._step_reported.wait(), max(0.0, self._probed_at + PROBE_TIMEOUT - now)
                )
            if not self._step_reported.is_set():
                seconds = time.monotonic() - self._probed_at
                raise ServerUnavailableError(
                    f"{self.name.capitalize()} has made no step for {seconds:.0f} s."
                )
        if (error := self.fatal_error) is not None:
            raise error
        if not self.is_running:
            raise _restarting_error(self.name)
        if self._step_error is not None:
            raise ServerUnavailableError(
                f"{self.name.capitalize()}'s steps fail: {self._step_error}"
            )


def lost_core_error(error: EngineDeadError) -> EngineDeadError:
    """Extend the error of a core that will not be replaced."""
    return EngineDeadError(
        f"{error.message} The server continues without it until the server is restarted."
    )


def _restarting_error(name: str) -> ServerUnavailableError:
    return ServerUnavailableError(f"{name.capitalize()} died and is being restarted.")


def _shows_a_step(message: EngineOutputs) -> bool:
    """Return True after a successful step. A failed step also sends outputs, but no tokens."""
    if message.numbers or (message.stats is not None and message.stats.num_sampled):
        return True
    return any(output.token_ids or output.embedding for output in message.outputs)
