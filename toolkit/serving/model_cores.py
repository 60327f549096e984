"""The cores of one model, started by the first process and used by the API workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.engine.async_llm import find_folders
from toolkit.engine.cores.core_client import CoreClient, CoreMessage
from toolkit.engine.cores.launch import plan_launches
from toolkit.engine.cores.pool import Core, CorePool
from toolkit.engine.cores.replica import lost_core_error
from toolkit.engine.front.observation import observe_gauges, observe_step
from toolkit.engine.local_files import with_local_files
from toolkit.engine.messages import ClientGone, EngineOutputs
from toolkit.errors import EngineDeadError
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.scheduler.stats import EngineStats, total
from toolkit.serving.control import (
    CoreAddress,
    CoreDead,
    CoreLoads,
    CoreRestarted,
    CoresPaused,
    FoundModel,
    ToWorker,
)
from toolkit.serving.front import ModelSetup
from toolkit.worker import Report, WorkerInfo

logger = logging.getLogger(__name__)

LOADS_INTERVAL = 0.02  # seconds, at least, between two CoreLoads


class ModelCores:
    """Starts the cores of a model, and sends the workers what happens to them."""

    def __init__(
        self,
        index: int,
        setup: ModelSetup,
        metrics: Metrics,
        broadcast: Callable[[ToWorker], None],
        on_change: Callable[[], None],
    ) -> None:
        """`index`: of the model. `broadcast` sends a message to the workers; `on_change` is called
        when a core runs again or is lost."""
        self._index, self.setup, self._metrics = index, setup, metrics
        metrics.max_loras = setup.engine.lora.max_loras
        self._broadcast, self._on_change = broadcast, on_change
        self.infos: list[WorkerInfo] = []
        self.fatal_error: EngineDeadError | None = None  # once no core runs or will be restarted
        self._pool = CorePool(0, self)
        self._stats: list[EngineStats] = []  # of each core's latest step
        self._has_planned_loads = False

    @property
    def stats(self) -> EngineStats:
        """Sums over the cores, as of their last steps."""
        return total(self._stats)

    @property
    def has_core(self) -> bool:
        """True if a core runs now."""
        return any(core.is_ready for core in self._pool.cores)

    @property
    def addresses(self) -> list[CoreAddress]:
        """Addresses of the cores, for a worker that starts."""
        return [_address_of(core) for core in self._pool.cores]

    async def launch(self, log: LogStyle, shared: str) -> FoundModel:
        """Find the model and start its cores. Workers keep its adapters in the folder `shared`."""
        model, tokenizer = await find_folders(self.setup.engine.model)
        engine = await asyncio.to_thread(with_local_files, self.setup.engine)
        launches = plan_launches(engine, model, log)
        self._pool = CorePool.launch(launches, self)
        self._stats = [EngineStats() for _ in launches]
        has_adapters = self.setup.engine.lora.is_enabled
        file = Path(shared) / f"adapters-{self._index}"
        return FoundModel(self.setup, str(model), str(tokenizer), str(file) if has_adapters else "")

    async def ready(self, report: Report) -> None:
        """Wait until the cores accept requests, and watch them from then on."""
        self.infos = await self._pool.ready(report)
        for core in self._pool.cores:
            self._pool.watch(core.index)

    def remove_client(self, client: int) -> None:
        """End the requests of a worker that has exited."""
        for core in self._pool.cores:
            if core.link is not None and not core.is_dead:
                core.link.send(ClientGone(client))

    async def stop(self) -> None:
        """End the cores."""
        await self._pool.stop()

    # ---- what happens to cores (`cores.pool.CoreEvents`)

    def on_message(self, core: Core, message: CoreMessage) -> None:
        """Record the statistics of a core's steps."""
        if isinstance(message, EngineOutputs) and message.stats is not None:
            self._stats[core.index] = message.stats
            observe_step(self._metrics.for_engine(core.index), message.stats)
        self._plan_loads()

    def on_failed(self, cores: Sequence[Core]) -> int:
        for core in cores:
            self._stats[core.index] = EngineStats(adapters={})
            observe_gauges(self._metrics.for_engine(core.index), self._stats[core.index])
        if cores:  # else the task of another core, dead at the same time, has sent it
            self._broadcast(CoresPaused(self._index, [core.index for core in cores]))
        return 0

    def on_replaced(self, core: Core) -> None:
        self._metrics.for_engine(core.index).count_restart()
        address = _address_of(core)
        assert address.info is not None
        self._broadcast(CoreRestarted(self._index, core.index, address.sockets, address.info))
        self._on_change()

    def on_lost(self, core: Core, error: EngineDeadError) -> None:
        self._broadcast(CoreDead(self._index, core.index, error.message))
        if all(one.is_dead for one in self._pool.cores):
            self.fatal_error = error
        else:
            logger.error("%s", lost_core_error(error))
        self._on_change()

    def _plan_loads(self) -> None:
        """Send the loads of several cores to the workers soon: each knows only its own requests."""
        if len(self._stats) == 1 or self._has_planned_loads:
            return
        self._has_planned_loads = True

        def send() -> None:
            self._has_planned_loads = False
            loads = [stats.num_running + stats.num_waiting for stats in self._stats]
            self._broadcast(CoreLoads(self._index, loads))

        asyncio.get_running_loop().call_later(LOADS_INTERVAL, send)


def _address_of(core: Core) -> CoreAddress:
    """Return a core's address for workers."""
    link = core.link
    if not core.is_ready or not isinstance(link, CoreClient):
        return CoreAddress("", None, "" if core.error is None else core.error.message)
    return CoreAddress(link.sockets, core.info, "")
