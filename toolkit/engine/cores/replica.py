"""One of the engine's cores, as a front end sees it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from toolkit.engine.cores.core_client import CoreLink
from toolkit.engine.cores.revival import Reviver
from toolkit.engine.messages import (
    EndRequests,
    EngineOutputs,
    ListRequests,
    Ping,
    Pong,
    RequestList,
    ToCore,
)
from toolkit.engine.observation import observe_gauges
from toolkit.errors import EngineDeadError, ServerUnavailableError
from toolkit.metrics import Metrics
from toolkit.scheduler.stats import EngineStats
from toolkit.worker import WorkerInfo

FRESH = 1.0
"""Seconds for which a step shows that the engine is well."""
HUNG = 5.0
"""Seconds in which an engine that is well runs a step when it is asked to."""
FAILURES = 3
"""Requests in a row that end with an error, after which a core is passed over."""
ANSWER_TIMEOUT = 10.0
"""Seconds that the core gets to answer a question: it looks at them between steps."""

Question = Callable[[int, int], ListRequests | EndRequests]
"""What to ask, of the client that asks and the ticket that the answer will have."""


class Replica:
    """A place for a core: one that dies is followed by another. Requests are sent to it while it `runs`."""

    def __init__(self, index: int, name: str, metrics: Metrics) -> None:
        self.index = index
        self.name = name
        self.metrics = metrics
        """Its own: their label tells the engines apart."""
        self.info: WorkerInfo | None = None
        self._link: CoreLink | None = None
        self.runs = False
        """Not from a core's end to the beginning of the next."""
        self.dead: EngineDeadError | None = None
        """Why there will be no other core."""
        self.stats = EngineStats()
        self.reviver: Reviver | None = None
        """None when somebody else sees to the core."""
        self.reader: asyncio.Task[None] | None = None
        """Takes in what the core sends."""
        self._stepped_at = 0.0
        """When the last news came of a step that did not fail."""
        self._pinged_at = 0.0
        """Since when a Ping is unanswered; 0 when none is."""
        self._ponged = asyncio.Event()
        self._step_error: str | None = None
        self._num_failures, self._failed_at = 0, 0.0
        """Requests in a row that ended with an error, and when the last one did."""
        self._num_asked = 0
        self._asked: dict[int, asyncio.Future[RequestList]] = {}
        """Who waits for which of the core's answers, by ticket."""

    @property
    def linked(self) -> bool:
        """Whether there has been a core."""
        return self._link is not None

    @property
    def link(self) -> CoreLink:
        """The way to the core, or to the last one."""
        assert self._link is not None
        return self._link

    def connect(self, link: CoreLink, info: WorkerInfo) -> None:
        """Goes on with a core that is ready."""
        if self._link is not None:
            self._link.kill()
        self._link, self.info = link, info
        self.runs, self._pinged_at, self._step_error = True, 0.0, None
        self._num_failures = 0

    def disconnect(self) -> None:
        """The core has died, or is of no use any more: nothing is sent to it, or taken in of it."""
        self.runs = False
        if self.reader is not None and self.reviver is None:
            self.reader.cancel()
        self.stats = EngineStats()
        observe_gauges(self.metrics, self.stats)
        self._ponged.set()
        for asking in self._asked.values():
            if not asking.done():
                asking.set_exception(_restarting(self.name))

    def send(self, message: ToCore) -> None:
        """Sends it, if there is a core."""
        if self.runs:
            self.link.send(message)

    def take(self, message: object) -> None:
        """Takes in what the core says beside its outputs."""
        if isinstance(message, RequestList):
            asking = self._asked.pop(message.ticket, None)
            if asking is not None and not asking.done():
                asking.set_result(message)
        elif isinstance(message, Pong):
            self._pinged_at, self._step_error = 0.0, message.error
            self._stepped_at = time.monotonic()
            self._ponged.set()

    def note_step(self, message: EngineOutputs, now: float) -> None:
        """Remembers what a step says of the core."""
        if _shows_a_step(message):
            self._stepped_at, self._step_error = now, None
        if message.stats is not None:
            self.stats = message.stats

    def note_end(self, reason: str, now: float) -> None:
        """Remembers how a request of its ended."""
        if reason == "error":
            self._num_failures, self._failed_at = self._num_failures + 1, now
        else:
            self._num_failures = 0

    @property
    def is_trusted(self) -> bool:
        """Whether nothing speaks against sending it requests while others run: one that fails them quickly looks idle. After a
        while it is tried again.
        """
        now = time.monotonic()
        hangs = self._pinged_at and now - self._pinged_at > HUNG
        return not hangs and (self._num_failures < FAILURES or now - self._failed_at > HUNG)

    def probe(self, now: float) -> bool:
        """Whether it has not been heard of lately: then it is asked for a step, which an idle core makes for this."""
        if not self.runs or now - self._stepped_at <= FRESH:
            return False
        if not self._pinged_at:
            self._pinged_at = now
            self._ponged.clear()
            self.link.send(Ping(self.link.client))
        return True

    async def ask(self, question: Question) -> RequestList:
        """The core's answer. Raises ServerUnavailableError when none comes."""
        self._num_asked += 1
        ticket = self._num_asked
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self.link.send(question(self.link.client, ticket))
        try:
            return await asyncio.wait_for(answer, ANSWER_TIMEOUT)
        except TimeoutError:
            raise ServerUnavailableError(
                f"{self.name.capitalize()} has not answered for {ANSWER_TIMEOUT:g} s."
            ) from None
        finally:
            self._asked.pop(ticket, None)

    async def check(self) -> None:
        """Returns when a step has been made lately, or an idle core makes one now. Raises ServerUnavailableError when
        the core is being started again or does not answer in time, EngineDeadError when it is gone.
        """
        now = time.monotonic()
        if self.probe(now):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ponged.wait(), max(0.0, self._pinged_at + HUNG - now))
            if not self._ponged.is_set():
                seconds = time.monotonic() - self._pinged_at
                raise ServerUnavailableError(
                    f"{self.name.capitalize()} has made no step for {seconds:.0f} s."
                )
        if self.dead is not None:
            raise EngineDeadError(
                self.dead.message
            )  # another each time: a raise adds to an error's traceback
        if not self.runs:
            raise _restarting(self.name)
        if self._step_error is not None:
            raise ServerUnavailableError(
                f"{self.name.capitalize()}'s steps fail: {self._step_error}"
            )


def without_it(error: EngineDeadError) -> EngineDeadError:
    """Why one of several cores is gone for good, as whoever asks is told."""
    return EngineDeadError(
        f"{error.message} The server goes on without it until it is started again."
    )


def _restarting(name: str) -> ServerUnavailableError:
    return ServerUnavailableError(f"{name.capitalize()} died and is being started again.")


def _shows_a_step(message: EngineOutputs) -> bool:
    """Whether a step brought it that ran to its end: one that failed has news too, and none of tokens."""
    if message.numbers or (message.stats is not None and message.stats.num_sampled):
        return True
    return any(output.token_ids or output.embedding for output in message.outputs)
