"""Restart of cores that died.

Front ends keep the tokens of every open sequence. The rest of a sequence is sent to the new core as
a request with the tokens that it has (`EngineRequest.output_token_ids`), and the scheduler resumes
it like a preempted one. Clients see a pause. Greedy answers, and those with a seed, are the ones
that the dead core would have given, because a choice depends on seed and position alone. A request
that meets more deaths than `async_llm.MAX_RESUMES` gets an error: it may be the cause of them.

A core that hangs, or whose messages cannot be read, is killed and replaced in the same way."""

import asyncio
import contextlib
import logging
import time

import zmq

from toolkit.engine.cores.core_client import CoreClient
from toolkit.engine.cores.launch import Launch
from toolkit.errors import EngineDeadError, ToolkitError
from toolkit.worker import WorkerInfo

logger = logging.getLogger(__name__)

BACK_OFF = (0.0, 1.0, 4.0)
"""Seconds before each consecutive restart. After the last one the engine stays dead."""
STABLE_AFTER = 60.0  # seconds of life after which a core's failures no longer count as consecutive
STARTUP_FACTOR = 3
"""Limit on a restart's silence: `--worker-timeout` plus this many times the first start-up."""


class CoreRestarter:
    """Replaces one core, with a limited number of consecutive restarts."""

    def __init__(self, launch: Launch, core: CoreClient) -> None:
        """`core`: the first core, which has just been started."""
        self._launch, self._core = launch, core
        self._startup_timeout = (
            launch.config.parallel.worker_timeout + STARTUP_FACTOR * core.startup_seconds
        )
        self._num_attempts = 0
        self._alive_since = time.monotonic()
        self._spare: CoreClient | None = None
        """Process that has imported its modules, while the core is suspected of hanging."""
        core.on_suspicion = self._prepare

    def _prepare(self, is_suspected: bool) -> None:
        """Start a spare process for a core that may hang; end it if the core does not."""
        self.close()
        if is_suspected:
            # If it fails, the attempt to restart says why.
            with contextlib.suppress(OSError, zmq.ZMQError):
                self._spare = CoreClient(self._launch, self._startup_timeout)

    def close(self) -> None:
        """End the spare process, if there is one."""
        if self._spare is not None:
            self._spare.kill()
            self._spare = None

    async def restart(self, cause: Exception, num_open: int = 0) -> tuple[CoreClient, WorkerInfo]:
        """Start a replacement and return it once it is ready.

        `cause`: the error of the previous core. Its process is killed first, because two do not fit
        on a device. `num_open`: requests that wait for the core. Raises EngineDeadError with the
        cause after the last attempt."""
        self._core.on_suspicion = None
        await self._core.kill_and_wait()
        # A hang is detected long after the core's last message.
        if self._core.last_message_at - self._alive_since > STABLE_AFTER:
            self._num_attempts = 0
        while True:
            is_parallel = self._launch.config.parallel.data_parallel_size > 1
            died = f"{self._launch.name.capitalize()}: " if is_parallel else ""
            died += f"{to_dead_error(cause).message.rstrip('.')}."
            if self._num_attempts == len(BACK_OFF):
                self.close()
                raise EngineDeadError(f"{died} It was restarted {len(BACK_OFF)} times in a row.")
            waiting = f"; {num_open} requests wait for it" if num_open else ""
            logger.error(
                "%s Restarting it (attempt %d of %d)%s.",
                died,
                self._num_attempts + 1,
                len(BACK_OFF),
                waiting,
                exc_info=None if isinstance(cause, ToolkitError) else cause,
            )
            await asyncio.sleep(BACK_OFF[self._num_attempts])
            self._num_attempts += 1
            core: CoreClient | None = None
            start = time.monotonic()
            try:
                core = self._spare or CoreClient(self._launch, self._startup_timeout)
                self._spare = None
                info = await core.ready(lambda name, seconds: None)
                info.adapters = list(self._launch.adapters)
            except Exception as error:
                if core is not None:
                    await core.kill_and_wait()  # it may hang, and take long to exit
                    core.kill()
                cause = error
                continue
            except BaseException:
                if core is not None:
                    core.kill()
                raise
            core.on_suspicion = self._prepare
            self._core, self._alive_since = core, time.monotonic()
            logger.warning(
                "%s runs again after %.1f s", self._launch.name, self._alive_since - start
            )
            return core, info


def to_dead_error(error: Exception) -> EngineDeadError:
    """Convert the error that ended the core to an EngineDeadError."""
    return (
        error
        if isinstance(error, EngineDeadError)
        else EngineDeadError(f"The engine stopped: {error}")
    )
