"""Several cores in processes of their own, for a caller that steps one: what `LLM` has with --data-parallel-size."""

from __future__ import annotations

import asyncio
import queue
import random
import threading
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from toolkit.config import EngineConfig
from toolkit.engine.cores.core_client import CoreClient, all_ready
from toolkit.engine.cores.launch import Launch, least, plan
from toolkit.engine.cores.revival import as_dead
from toolkit.engine.cores.router import Router, Share
from toolkit.engine.messages import (
    Abort,
    EngineOutputs,
    EngineRequest,
    Forgotten,
    ResetPrefixCache,
    ToCore,
)
from toolkit.errors import EngineDeadError
from toolkit.logs import LogStyle
from toolkit.worker import Report, WorkerInfo

T = TypeVar("T")


@dataclass(slots=True)
class _Placed:
    """A request, and what it is to its core."""

    share: Share
    num_open: int
    """Of its sequences."""


class SeveralCores:
    """In the place of an `EngineCore`: `add`, `step`, `abort`. The router chooses the core of each request. None is started again:
    when one dies, `step` raises EngineDeadError with the cause.

    Messages come and go in a thread with an event loop of its own, whatever loop the caller may be in.
    """

    def __init__(self, config: EngineConfig, folder: Path, report: Report) -> None:
        """Raises as `EngineCore`'s executor does."""
        launches = plan(config, folder, LogStyle())
        self._router = Router(len(launches))
        self._random = random.Random(config.model.seed)
        self._caches = config.cache.enable_prefix_caching
        self._placed: dict[int, _Placed] = {}
        """By the numbers of their sequences that have not ended."""
        self._news: queue.SimpleQueue[tuple[int, EngineOutputs | Forgotten | EngineDeadError]] = (
            queue.SimpleQueue()
        )
        """What each core says."""
        self._dead: EngineDeadError | None = None
        self._cores: list[CoreClient] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, daemon=True, name="engine-cores"
        )
        self._thread.start()
        try:
            infos = self._run(self._start(launches, report))
        except BaseException:
            self.shutdown()
            raise
        for core, info in enumerate(infos):
            self._router.connect(core, info.num_blocks * info.block_size)
        self.info: WorkerInfo = least(infos)

    @property
    def has_work(self) -> bool:
        return bool(self._placed)

    def add(self, request: EngineRequest) -> None:
        """Gives a request to one of the cores."""
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)
        if request.spec.params.seed is None:  # cores would all draw the same seeds
            request.seed = self._random.getrandbits(63)
        cores = range(len(self._cores))
        share = self._router.place(request.spec, cores, caches=self._caches)
        placed = _Placed(share, request.num_sequences)
        for number in range(request.number, request.number + request.num_sequences):
            self._placed[number] = placed
        self._tell(share.core, request)

    def abort(self, abort: Abort) -> None:
        """Ends sequences; unknown ones have ended already."""
        numbers: defaultdict[int, list[int]] = defaultdict(list)
        for number in abort.numbers:
            if number in self._placed:
                numbers[self._placed[number].share.core].append(number)
                self._end(number)
        for core, ending in numbers.items():
            self._tell(core, Abort(ending))

    def step(self) -> dict[int, EngineOutputs]:
        """What the next step of any core has brought, as `EngineCore.step` tells it."""
        if self._dead is not None:
            raise EngineDeadError(self._dead.message)
        core, news = self._news.get()
        if isinstance(news, EngineDeadError):
            self._dead = news
            raise news
        if isinstance(news, Forgotten):
            self._router.forget_prompts(core)
            return {0: EngineOutputs()}
        for output in news.outputs:
            placed = self._placed.get(output.number)
            if placed is not None:
                self._router.computed(placed.share)
                if output.finish_reason is not None:
                    self._end(output.number)
        return {0: news}

    def drop_steps(self) -> None:
        """Nothing: what interrupts the caller does not interrupt the cores."""

    def reset_prefix_cache(self) -> None:
        """Forgets the cached beginnings of prompts."""
        for core in range(len(self._cores)):
            self._tell(core, ResetPrefixCache())

    def shutdown(self) -> None:
        """Ends the cores and the thread."""
        if self._loop.is_closed():
            return
        self._placed.clear()
        self._dead = EngineDeadError("The engine was shut down.")
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _end(self, number: int) -> None:
        placed = self._placed.pop(number)
        placed.num_open -= 1
        if not placed.num_open:
            self._router.end(placed.share)

    def _tell(self, core: int, message: ToCore) -> None:
        self._loop.call_soon_threadsafe(self._cores[core].send, message)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    # ---- in the thread

    async def _start(self, launches: list[Launch], report: Report) -> list[WorkerInfo]:
        for launch in launches:
            self._cores.append(CoreClient(launch))
        infos = await all_ready(self._cores, report)
        self._hearing = [
            asyncio.create_task(self._hear(launch, core))
            for launch, core in zip(launches, self._cores, strict=True)
        ]
        return infos

    async def _hear(self, launch: Launch, core: CoreClient) -> None:
        try:
            while True:
                for message in await core.receive():
                    if isinstance(message, EngineOutputs) and not (
                        message.outputs or message.numbers
                    ):
                        continue  # idle cores tell of themselves now and then, which nobody may ever ask for
                    if isinstance(message, EngineOutputs | Forgotten):
                        self._news.put((launch.index, message))
        except Exception as error:
            dead = EngineDeadError(f"{launch.name.capitalize()}: {as_dead(error).message}")
            self._news.put((launch.index, dead))

    async def _stop(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:  # start-up, if that is where it ends
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*(core.stop() for core in self._cores))
