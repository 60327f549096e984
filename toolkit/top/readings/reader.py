"""Periodic reading of all servers."""

import asyncio
from collections.abc import Callable

from toolkit.top.readings.recording import RecordingWriter
from toolkit.top.state import State

MIN_PAUSE = 0.01  # seconds between two readings, however slow the first was
RETRY = 1.0  # least seconds between attempts to reach a server that does not answer


class Reader:
    """Reads every server of the state each `state.interval` seconds.

    Calls `changed` after each reading, and `failed` on an error that is not the server's."""

    def __init__(
        self,
        state: State,
        recorder: RecordingWriter | None,
        changed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.state = state
        self.recorder = recorder
        self.changed = changed
        self.failed = failed
        self.needs_requests = False  # read live requests too; a recording always has them
        self._wake_ups = [asyncio.Event() for _ in state.servers]
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start one task per server."""
        self._tasks = [
            asyncio.create_task(self._watch(index)) for index in range(len(self.state.servers))
        ]
        for task in self._tasks:
            task.add_done_callback(self._report_failure)

    def _report_failure(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.failed(error)

    def read_now(self) -> None:
        """Read all servers without waiting for the interval."""
        for event in self._wake_ups:
            event.set()

    async def _watch(self, index: int) -> None:
        """Read one server until cancelled, also while it does not answer."""
        loop = asyncio.get_running_loop()
        server = self.state.servers[index]
        while True:
            started = loop.time()
            if not self.state.is_paused and not await self._read(index):
                return
            pause = max(self.state.interval, RETRY if server.error else 0.0)
            # All servers are read at the same time, so that one redraw shows all of them.
            due = pause * (round(started / pause) + 1)
            await self._sleep(due - loop.time(), self._wake_ups[index])

    async def _read(self, index: int) -> bool:
        """Read one server; return False at the end of a recording."""
        needs_requests = self.needs_requests or self.recorder is not None
        reading = await self.state.sources[index].read(requests=needs_requests)
        if reading is None:
            self.state.num_ended += 1
        else:
            if self.recorder is not None:
                self.recorder.add(reading)
            self.state.servers[index].add(reading)
        self.changed()
        return reading is not None

    async def _sleep(self, seconds: float, wake_up: asyncio.Event) -> None:
        """Sleep, at most until `read_now`."""
        wake_up.clear()
        try:
            await asyncio.wait_for(wake_up.wait(), max(MIN_PAUSE, seconds))
        except TimeoutError:
            return

    async def close(self) -> None:
        """Stop reading, and close connections and files."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for source in self.state.sources:
            await source.close()
        if self.recorder is not None:
            self.recorder.close()
