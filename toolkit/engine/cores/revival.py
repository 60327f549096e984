"""Another core in the place of one that died."""

from __future__ import annotations

import asyncio
import logging
import time

from toolkit.engine.cores.core_client import CoreClient
from toolkit.engine.cores.launch import Launch
from toolkit.errors import EngineDeadError, ToolkitError
from toolkit.worker import WorkerInfo

logger = logging.getLogger(__name__)

BACK_OFF = (0.0, 1.0, 4.0)
"""Seconds before each attempt in a row; after the last one the engine stays dead."""
STABLE = 60.0
"""Seconds after which a core that lives has ended the row."""
SLOWER = 3
"""Times as long as the first one's whole start, besides `--worker-timeout`, that a core may say nothing of its own."""


class Reviver:
    """Starts cores in one place, a bounded number of times in a row."""

    def __init__(self, launch: Launch, core: CoreClient) -> None:
        """`core`: the first one, which has just been started."""
        self._launch, self._core = launch, core
        self._patience = launch.config.parallel.worker_timeout + SLOWER * core.took
        self._num_attempts = 0
        self._alive_since = time.monotonic()

    async def another(self, cause: Exception, num_open: int = 0) -> tuple[CoreClient, WorkerInfo]:
        """A core that is ready. `cause`: what the last one died of, or why it is of no use any more: its process is
        ended first, as two do not fit on a device. `num_open`: requests that wait for it. Raises EngineDeadError when that
        was the last attempt, with the cause.
        """
        await self._core.end()
        if self._core.heard_at - self._alive_since > STABLE:  # that one hangs is noticed long after
            self._num_attempts = 0
        while True:
            several = self._launch.config.parallel.data_parallel_size > 1
            died = f"{self._launch.name.capitalize()}: " if several else ""
            died += f"{as_dead(cause).message.rstrip('.')}."
            if self._num_attempts == len(BACK_OFF):
                raise EngineDeadError(
                    f"{died} It has been started again {len(BACK_OFF)} times in a row."
                )
            waiting = "" if not num_open else f"; open requests that go on then: {num_open}"
            logger.error(
                "%s It is started again (attempt %d of %d)%s.",
                died,
                self._num_attempts + 1,
                len(BACK_OFF),
                waiting,
                exc_info=None if isinstance(cause, ToolkitError) else cause,
            )
            await asyncio.sleep(BACK_OFF[self._num_attempts])
            self._num_attempts += 1
            core: CoreClient | None = None
            begun = time.monotonic()
            try:
                core = CoreClient(self._launch, self._patience)
                info = await core.ready(lambda name, seconds: None)
            except Exception as error:
                if core is not None:
                    await core.end()  # it may live and hang, for long even then
                    core.kill()
                cause = error
                continue
            except BaseException:
                if core is not None:
                    core.kill()
                raise
            self._core, self._alive_since = core, time.monotonic()
            logger.warning(
                "%s runs again, after %.1f s", self._launch.name, self._alive_since - begun
            )
            return core, info


def as_dead(error: Exception) -> EngineDeadError:
    """What ended the core, as every request is told."""
    return (
        error
        if isinstance(error, EngineDeadError)
        else EngineDeadError(f"The engine stopped: {error}")
    )
