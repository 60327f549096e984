"""Streamed output of one AsyncLLM request."""

import asyncio
import time
from collections.abc import Callable
from typing import Self

from toolkit.engine.cores.replica import Replica
from toolkit.engine.cores.router import Placement
from toolkit.engine.front.output_processor import RequestState
from toolkit.engine.messages import EngineRequest
from toolkit.engine.outputs import Delta
from toolkit.errors import EngineError, InvalidRequestError
from toolkit.scheduler import FinishReason


class RequestStream:
    """Deltas of one request; unread ones are merged. Iterate to the end, or `close` to end it."""

    def __init__(
        self, abort: Callable[[str], None], state: RequestState, request: EngineRequest
    ) -> None:
        """`abort` ends a request by its id."""
        self.state = state
        self.arrival = time.monotonic()
        self.scheduled = 0.0
        self.request = request
        self.num_deaths = 0  # cores that died while they ran it
        self.replica: Replica | None = None  # its core; None while no core is running
        self.placement: Placement | None = None  # its load on that core if there are several
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None
        self._failure: Exception | None = None
        self._num_unfinished = len(state.sequences)
        state.wake = self._wake

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Raises EngineError, or InvalidRequestError, if the request cannot be finished."""
        if not self._num_unfinished:
            raise StopAsyncIteration
        while (delta := self.state.next_delta()) is None:
            if self._failure is not None:
                self._num_unfinished = 0
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if delta.error is not None:
            self.close()
            is_invalid = delta.finish_reason == FinishReason.INVALID
            kind = InvalidRequestError if is_invalid else EngineError
            raise kind(f"The request could not be finished: {delta.error}")
        self._num_unfinished -= delta.finish_reason is not None
        if not self._num_unfinished:
            self._detach()
        return delta

    def fail(self, error: Exception) -> None:
        """End the request with an error, after its unread output."""
        self._failure = error
        self._wake()

    def close(self) -> None:
        """End the request if it is still running."""
        self._num_unfinished = 0
        self._detach()
        self._abort(self.state.id)

    def _detach(self) -> None:
        """Drop the state's reference: a cycle would keep the prompt until garbage collection."""
        self.state.wake = lambda: None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
