"""A costly reading that any number of clients may ask for."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

INTERVAL = 0.2  # seconds between two readings, on average
SAVED = 2.0  # seconds of readings that were not taken, and may be later
MAX_WAITING = 4  # callers that wait for the next reading; more get the last one
MAX_AGE = 1.0  # seconds, of a reading for them


class SharedReading(Generic[T]):
    """Takes a reading at most every INTERVAL. Callers in between share the next one.

    So a caller does not get a reading from before its call, unless many wait."""

    def __init__(self, read: Callable[[], Awaitable[T]]) -> None:
        self._read = read
        self._due = -SAVED  # when the next reading may be taken
        self._next: asyncio.Task[T] | None = None  # waits until then
        self._num_waiting = 0
        self._last: tuple[float, T] | None = None  # when, and the reading

    async def get(self) -> T:
        """Return the next reading, or the last one."""
        if self._num_waiting >= MAX_WAITING and self._last is not None:
            at, reading = self._last
            if time.monotonic() - at < MAX_AGE:
                return reading
        if self._next is None:
            self._next = asyncio.ensure_future(self._read_when_due())
        self._num_waiting += 1
        try:
            return await asyncio.shield(self._next)  # one caller may leave
        finally:
            self._num_waiting -= 1

    async def _read_when_due(self) -> T:
        now = time.monotonic()
        due = max(self._due, now - SAVED)
        self._due = due + INTERVAL
        await asyncio.sleep(due - now)
        self._next = None
        at = time.monotonic()
        reading = await self._read()
        self._last = (at, reading)
        return reading
