"""What reads the servers, each at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from toolkit.top.readings.recording import Recorder
from toolkit.top.state import State

SOONEST = 0.01
"""Seconds between two readings, however slow the first was."""
RETRY = 1.0
"""At least so many seconds between attempts to reach a server that is gone."""


class Reader:
    """Reads every server of the state each `state.interval` seconds, and calls `changed` after each reading; `failed`,
    when something went wrong that is not the server's fault.
    """

    def __init__(
        self,
        state: State,
        recorder: Recorder | None,
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.state = state
        self.recorder = recorder
        self.changed = changed
        self.failed = failed
        self.wants_requests = False
        """Whether live requests are asked for, too; a recording has them always."""
        self._woken = [asyncio.Event() for _ in state.servers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to read all servers."""
        self._tasks = [
            asyncio.create_task(self._watch(index)) for index in range(len(self.state.servers))
        ]
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failed(error)

    def read_now(self) -> None:
        """Does not wait for the next readings to be due."""
        for event in self._woken:
            event.set()

    async def _watch(self, index: int) -> None:
        """Reads one server until it is cancelled; one that is gone is tried again and again."""
        loop = asyncio.get_running_loop()
        server = self.state.servers[index]
        while True:
            begun = loop.time()
            if not self.state.is_paused and not await self._read(index):
                return
            pause = max(self.state.interval, RETRY if server.error else 0.0)
            due = pause * (
                round(begun / pause) + 1
            )  # all servers keep step, so that one redrawing does for all
            await self._rest(due - loop.time(), self._woken[index])

    async def _read(self, index: int) -> bool:
        """Whether there may be more to come."""
        wanted = self.wants_requests or self.recorder is not None
        reading = await self.state.sources[index].read(requests=wanted)
        if reading is None:
            self.state.num_ended += 1
        else:
            if self.recorder is not None:
                self.recorder.add(reading)
            self.state.servers[index].add(reading)
        self.changed()
        return reading is not None

    async def _rest(self, seconds: float, woken: asyncio.Event) -> None:
        """Waits, but for no longer than until `read_now`."""
        woken.clear()
        try:
            await asyncio.wait_for(woken.wait(), max(SOONEST, seconds))
        except TimeoutError:
            return

    async def close(self) -> None:
        """Stops reading, and lets go of servers and files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self.state.sources:
            await source.close()
        if self.recorder is not None:
            self.recorder.close()
