"""The cores of one model: started, watched, replaced when they die, and stopped.

The process that launches cores replaces those that die. Other front ends have links to them, and
follow what that process reports (`pause`, `replace`, `remove`)."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from toolkit.engine.cores.core_client import CoreClient, CoreLink, CoreMessage
from toolkit.engine.cores.launch import Launch, StartupPhases, engine_name
from toolkit.engine.cores.revival import CoreRestarter, to_dead_error
from toolkit.errors import EngineDeadError
from toolkit.worker import Report, WorkerInfo


class CoreState(enum.Enum):
    STARTING = "starting"
    READY = "ready"
    FAILING = "failing"  # it has died or hangs; a replacement starts
    DRAINING = "draining"  # it has been asked to exit
    STOPPED = "stopped"


NEXT = {
    CoreState.STARTING: {CoreState.READY, CoreState.STOPPED},
    CoreState.READY: {CoreState.FAILING, CoreState.DRAINING, CoreState.STOPPED},
    CoreState.FAILING: {CoreState.READY, CoreState.DRAINING, CoreState.STOPPED},
    CoreState.DRAINING: {CoreState.STOPPED},
    CoreState.STOPPED: set[CoreState](),
}
"""The states that may follow each."""


@dataclass(slots=True, eq=False)
class Core:
    """An engine core, and its successors when it dies."""

    index: int
    name: str
    state: CoreState = CoreState.STARTING
    link: CoreLink | None = None
    """Connection to the core, or to the one before. None before the first."""
    info: WorkerInfo | None = None  # of the core, or of the one before
    error: EngineDeadError | None = None  # why no other follows
    restarter: CoreRestarter | None = None  # None if another process replaces it, or none does
    reader: asyncio.Task[None] | None = None  # processes its messages

    @property
    def is_ready(self) -> bool:
        return self.state is CoreState.READY

    @property
    def is_dead(self) -> bool:
        """True if it has died and will not be replaced."""
        return self.error is not None

    def enter(self, state: CoreState) -> None:
        """Change the state. Raises RuntimeError for a change that `NEXT` does not have."""
        if state not in NEXT[self.state]:
            raise RuntimeError(f"{self.name} is {self.state.value} and cannot be {state.value}")
        self.state = state


class CoreEvents(Protocol):
    """Owner of a pool: what happens to its cores."""

    def on_message(self, core: Core, message: CoreMessage) -> None:
        """Handle a message. An error of this ends the core, as one of the connection does."""

    def on_failed(self, cores: Sequence[Core]) -> int:
        """Move the work of cores that died together.

        Returns how many requests wait for a core, for the log."""

    def on_replaced(self, core: Core) -> None:
        """Use a core that follows one that died."""

    def on_lost(self, core: Core, error: EngineDeadError) -> None:
        """Go on without a core that will not be replaced."""


class CorePool:
    """Has the cores, and a task for each that reads its messages."""

    def __init__(self, count: int, events: CoreEvents) -> None:
        """Make a pool without connections: `connect` makes these."""
        self.cores = [Core(index, engine_name(index, count)) for index in range(count)]
        self._events = events
        self._launches: Sequence[Launch] = ()
        self._revives = False

    @property
    def infos(self) -> list[WorkerInfo]:
        """Descriptions of the cores that run or have run."""
        return [core.info for core in self.cores if core.info is not None]

    @classmethod
    def launch(
        cls, launches: Sequence[Launch], events: CoreEvents, *, revives: bool = True
    ) -> Self:
        """Start the processes. `revives`: replace those that die later."""
        pool = cls(len(launches), events)
        pool._launches, pool._revives = launches, revives
        try:
            for core, launch in zip(pool.cores, launches, strict=True):
                core.link = CoreClient(launch)
        except BaseException:
            pool.kill()
            raise
        return pool

    async def ready(self, report: Report) -> list[WorkerInfo]:
        """Wait until the launched cores accept requests. If one fails, kill all, raise its error.

        Their messages wait for `watch`."""
        phases = StartupPhases(len(self.cores), report)
        clients = [core.link for core in self.cores if isinstance(core.link, CoreClient)]
        starting = [asyncio.ensure_future(client.ready(phases.add)) for client in clients]
        try:
            infos = await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            self.kill()
            raise
        for core, launch, client, info in zip(
            self.cores, self._launches, clients, infos, strict=True
        ):
            core.info = info
            core.enter(CoreState.READY)
            if self._revives:
                core.restarter = CoreRestarter(launch.for_replacement(info), client)
        return infos

    def watch(self, index: int) -> asyncio.Task[None]:
        """Process a core's messages from now on, and replace it when it dies.

        If another process replaces the core, the task ends with the error that ended the core."""
        core = self.cores[index]
        if core.reader is not None:
            core.reader.cancel()
        core.reader = asyncio.create_task(self._read(core), name=f"core-{index}")
        return core.reader

    async def _read(self, core: Core) -> None:
        while True:
            try:
                await self._handle_messages(core)
            except Exception as cause:
                if core.restarter is None and not self._launches:
                    raise
                gone = [
                    one for one in self.cores if one.is_ready and (one is core or _is_gone(one))
                ]
                num_waiting = self._fail(gone)
                try:
                    if core.restarter is None:
                        raise to_dead_error(cause) from cause
                    link, info = await core.restarter.restart(cause, num_waiting)
                except EngineDeadError as error:
                    self.remove(core.index, error)
                    return
                self.replace(core.index, link, info)

    async def _handle_messages(self, core: Core) -> None:
        """Process a core's messages. Raises the error that ended the core."""
        link = core.link
        assert link is not None
        while True:
            for message in await link.receive():
                self._events.on_message(core, message)

    # ---- changes

    def connect(self, index: int, link: CoreLink, info: WorkerInfo) -> Core:
        """Use a core that is ready, in place of the one before."""
        core = self.cores[index]
        core.enter(CoreState.READY)
        if core.link is not None:
            core.link.kill()
        core.link, core.info = link, info
        return core

    def pause(self, *indices: int) -> None:
        """Stop using cores that have died. Those that died together are passed together."""
        self._fail([core for core in map(self.cores.__getitem__, indices) if core.is_ready])

    def _fail(self, cores: Sequence[Core]) -> int:
        for core in cores:
            core.enter(CoreState.FAILING)
            if core.reader is not None and not self._launches:
                core.reader.cancel()
        return self._events.on_failed(cores)

    def replace(self, index: int, link: CoreLink, info: WorkerInfo) -> None:
        """Use the replacement of a core that has died."""
        self._events.on_replaced(self.connect(index, link, info))

    def remove(self, index: int, error: EngineDeadError) -> None:
        """Go on without a core that will not be replaced."""
        core = self.cores[index]
        core.enter(CoreState.STOPPED)
        core.error = error
        if core.link is not None:
            core.link.kill()
        self._events.on_lost(core, error)

    # ---- the end

    async def stop_watching(self) -> None:
        """Process no more messages, and replace no core."""
        readers = [core.reader for core in self.cores if core.reader is not None]
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers)  # they may be restarting cores
        self._end_spares()

    async def stop(self) -> None:
        """Ask the cores to exit, and wait for it. Kill those that are starting."""
        await self.stop_watching()
        running = [core for core in self.cores if CoreState.DRAINING in NEXT[core.state]]
        for core in running:
            core.enter(CoreState.DRAINING)
        await asyncio.gather(*(core.link.stop() for core in running if core.link is not None))
        for core in running:
            core.enter(CoreState.STOPPED)
        self.kill()

    def kill(self) -> None:
        """End the processes at once."""
        self._end_spares()
        for core in self.cores:
            if core.state is not CoreState.STOPPED:
                core.enter(CoreState.STOPPED)
                if core.link is not None:
                    core.link.kill()

    def _end_spares(self) -> None:
        for core in self.cores:
            if core.restarter is not None:
                core.restarter.close()


def _is_gone(core: Core) -> bool:
    return core.link is not None and core.link.has_exited
