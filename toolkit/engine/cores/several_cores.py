"""Several cores in their own processes, behind the interface of `EngineCore`, for `LLM`."""

import asyncio
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolkit.config import EngineConfig
from toolkit.engine.cores.core_client import CoreMessage
from toolkit.engine.cores.launch import Launch, plan_launches, smallest_core
from toolkit.engine.cores.pool import Core, CorePool
from toolkit.engine.cores.router import Placement, Router
from toolkit.engine.messages import (
    Abort,
    EngineOutputs,
    EngineRequest,
    PrefixCacheCleared,
    ResetPrefixCache,
    ToCore,
)
from toolkit.errors import EngineDeadError
from toolkit.logs import LogStyle
from toolkit.worker import Report, WorkerInfo

T = TypeVar("T")


@dataclass(slots=True)
class _PlacedRequest:
    """A request and its placement."""

    placement: Placement
    num_open: int  # sequences that have not ended


class SeveralCores:
    """Has `add`, `step` and `abort` like `EngineCore`; the router chooses the core of each request.

    Cores are not restarted: if one dies, `step` raises EngineDeadError with the cause. Messages are
    sent and received in a thread with its own event loop, independent of the caller's."""

    def __init__(self, config: EngineConfig, folder: Path, report: Report) -> None:
        """Raises like the executor of `EngineCore`."""
        launches = plan_launches(config, folder, LogStyle())
        self._num_cores = len(launches)
        self._router = Router(self._num_cores)
        self._random = random.Random(config.model.seed)
        self._caches = config.cache.enable_prefix_caching
        self._placed: dict[int, _PlacedRequest] = {}
        """By the number of each sequence that has not ended."""
        self._messages: queue.SimpleQueue[
            tuple[int, EngineOutputs | PrefixCacheCleared | EngineDeadError]
        ] = queue.SimpleQueue()  # (core, message)
        self._fatal_error: EngineDeadError | None = None
        self._pool: CorePool | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="engine-cores"
        )
        self._thread.start()
        try:
            infos = self._run_in_loop(self._start(launches, report))
        except BaseException:
            self.shutdown()
            raise
        for core, info in enumerate(infos):
            capacity, has_states = info.cache_tokens, info.num_state_slots > 0
            self._router.connect(core, capacity, has_states=has_states)
        self.info: WorkerInfo = smallest_core(infos)

    @property
    def has_work(self) -> bool:
        return bool(self._placed)

    def add(self, request: EngineRequest) -> None:
        """Send a request to one of the cores."""
        if self._fatal_error is not None:
            raise EngineDeadError(self._fatal_error.message)
        if request.spec.params.seed is None:  # otherwise all cores would draw the same seeds
            request.seed = self._random.getrandbits(63)
        cores = range(self._num_cores)
        placement = self._router.place(request.spec, cores, caches=self._caches)
        placed = _PlacedRequest(placement, request.num_sequences)
        for number in range(request.number, request.number + request.num_sequences):
            self._placed[number] = placed
        self._send(placement.core, request)

    def abort(self, abort: Abort) -> None:
        """End sequences. Unknown numbers have ended already."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number in abort.numbers:
            if number in self._placed:
                numbers[self._placed[number].placement.core].append(number)
                self._finish(number)
        for core, ending in numbers.items():
            self._send(core, Abort(ending))

    def step(self) -> dict[int, EngineOutputs]:
        """Return the results of the next step of any core, like `EngineCore.step`."""
        if self._fatal_error is not None:
            raise EngineDeadError(self._fatal_error.message)
        core, message = self._messages.get()
        if isinstance(message, EngineDeadError):
            self._fatal_error = message
            raise message
        if isinstance(message, PrefixCacheCleared):
            self._router.clear_prefixes(core)
            return {0: EngineOutputs()}
        for output in message.outputs:
            placed = self._placed.get(output.number)
            if placed is not None:
                self._router.mark_computed(placed.placement)
                if output.finish_reason is not None:
                    self._finish(output.number)
        return {0: message}

    def drop_steps(self) -> None:
        """Do nothing: an interrupt of the caller does not reach the cores."""

    def reset_prefix_cache(self) -> None:
        """Evict all cached prompts."""
        for core in range(self._num_cores):
            self._send(core, ResetPrefixCache())

    def shutdown(self) -> None:
        """Stop the cores and the thread."""
        if self._loop.is_closed():
            return
        self._placed.clear()
        self._fatal_error = EngineDeadError("The engine was shut down.")
        self._run_in_loop(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _finish(self, number: int) -> None:
        placed = self._placed.pop(number)
        placed.num_open -= 1
        if not placed.num_open:
            self._router.release(placed.placement)

    def _send(self, core: int, message: ToCore) -> None:
        assert self._pool is not None
        link = self._pool.cores[core].link
        assert link is not None
        self._loop.call_soon_threadsafe(link.send, message)

    def _run_in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # The coroutines below run in the thread.

    async def _start(self, launches: list[Launch], report: Report) -> list[WorkerInfo]:
        self._pool = CorePool.launch(launches, self, revives=False)
        infos = await self._pool.ready(report)
        for core in range(self._num_cores):
            self._pool.watch(core)
        return infos

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # start-up, if it is still running
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if self._pool is not None:
            await self._pool.stop()

    def on_message(self, core: Core, message: CoreMessage) -> None:
        if isinstance(message, EngineOutputs) and not (message.outputs or message.numbers):
            return  # statistics of idle cores, which would pile up unread
        if isinstance(message, EngineOutputs | PrefixCacheCleared):
            self._messages.put((core.index, message))

    def on_failed(self, cores: Sequence[Core]) -> int:
        return 0

    def on_replaced(self, core: Core) -> None:
        raise AssertionError("no core is replaced")

    def on_lost(self, core: Core, error: EngineDeadError) -> None:
        message = f"{core.name.capitalize()}: {error.message}"
        self._messages.put((core.index, EngineDeadError(message)))
