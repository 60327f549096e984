"""Front end's connection to a core, and the core's process."""

import asyncio
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import zmq

from toolkit.config.engine import ENGINE_VARIABLE
from toolkit.engine.cores.launch import Launch
from toolkit.engine.cores.sockets import address, descriptor, has_message, open_socket
from toolkit.engine.messages import (
    EngineOutputs,
    Failed,
    FromCore,
    NeedFeature,
    OperationResult,
    Ping,
    Pong,
    PrefixCacheCleared,
    Ready,
    RequestList,
    StartCore,
    StartupPhase,
    StepReport,
    Stop,
    ToCore,
)
from toolkit.errors import EngineDeadError, error_of_kind
from toolkit.worker import Report, WorkerInfo

CHECK_INTERVAL = 0.2  # seconds between checks of the process
PING_AFTER = 1.0  # seconds without a message after which a Ping is sent
GRACE = 0.5  # seconds for a step's limit, for an answer on its way
RANKS_GRACE = 3.0  # instead, with several ranks: the core can first report which of them hangs
STOP_TIMEOUT = 10.0  # seconds for the core to exit after a Stop

CoreMessage = (
    EngineOutputs
    | RequestList
    | OperationResult
    | PrefixCacheCleared
    | NeedFeature
    | StartupPhase
    | Ready
    | StepReport
    | Pong
)  # messages of a live core


class CoreLink:
    """Messages between one front end and a core.

    They are MessagePack over ZMQ, on Unix sockets in a folder that only this user can open."""

    client: int = 0  # number of this front end

    def __init__(self, folder: str, client: int) -> None:
        """`folder` holds the sockets. Messages sent before the core is connected are queued."""
        self.client = client
        self._context = zmq.Context()
        self._to_core = open_socket(self._context, zmq.PUSH)
        self._to_core.connect(address(folder, "in"))
        self._from_core = open_socket(self._context, zmq.PULL)
        self._from_core.bind(address(folder, f"out{client}"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Future[None] | None = None  # `receive` waits for it
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    @property
    def has_exited(self) -> bool:
        """True if the core's process is known to have exited."""
        return False

    def listen(self) -> None:
        """Watch the socket in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor(self._from_core), self._on_socket_event)

    def send(self, message: ToCore, data: bytes | None = None) -> None:
        """Queue a message, and data as a second frame. Never blocks."""
        encoded = self._encoder.encode(message)
        if data is None:
            self._to_core.send(encoded)
        else:
            self._to_core.send_multipart([encoded, data], copy=False)

    async def receive(self) -> list[CoreMessage]:
        """Wait for messages and return all that have arrived."""
        while not (messages := self._receive_available()):
            await self._wait_for_message()
        return messages

    async def stop(self) -> None:
        """Close the sockets."""
        self.close()

    def kill(self) -> None:
        """Close the sockets."""
        self.close()

    def close(self) -> None:
        """Close the sockets. Unsent messages are dropped."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(descriptor(self._from_core))
        self._loop = None
        self._context.destroy(linger=0)

    async def _wait_for_message(self) -> None:
        """Wait until a message may have arrived."""
        self._arrived = asyncio.get_running_loop().create_future()
        await self._arrived

    def _on_socket_event(self) -> None:
        """Handle a socket event.

        Reading ZMQ's event flags also resets the descriptor, even if nothing waits."""
        if has_message(self._from_core):
            self._wake_receiver()

    def _wake_receiver(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _receive_available(self) -> list[CoreMessage]:
        """Return all messages that have arrived.

        ZMQ's descriptor signals new messages only after all earlier ones are read."""
        messages: list[CoreMessage] = []
        while has_message(self._from_core):
            message: FromCore = self._decoder.decode(self._from_core.recv())
            if isinstance(message, Failed):
                raise error_of_kind(message.kind, message.message) or EngineDeadError(
                    f"The engine stopped: {message.message}"
                )
            messages.append(message)
        return messages


class CoreClient(CoreLink):
    """The first front end: starts the core's process and detects its exit or hang.

    A core hangs if it makes no step within `--worker-timeout`. After PING_AFTER seconds of silence
    it gets a Ping, which it answers between two steps, and for which an idle core runs none. Half
    that time after a Ping, the core is suspected of hanging."""

    def __init__(self, launch: Launch, startup_timeout: float = math.inf) -> None:
        """Start the process. `ready` raises after `startup_timeout` seconds of silence."""
        self.sockets = tempfile.mkdtemp(prefix="tk-")
        try:
            super().__init__(self.sockets, 0)
        except BaseException:  # too many open files
            shutil.rmtree(self.sockets, ignore_errors=True)
            raise
        self._timer: asyncio.TimerHandle | None = None
        self.last_message_at = time.monotonic()
        self._silent_for = 0.0
        """Seconds since the latest message or, after a Ping, since the Ping.

        Counts only time in which this process ran: while both are suspended, it stands still."""
        self._is_pinged = self._is_ready = self._is_suspected = False
        self.on_suspicion: Callable[[bool], None] | None = None
        """Called with True when the core is suspected, and False when it answers after all."""
        parallel = launch.config.parallel
        self._timeout = parallel.worker_timeout
        self._max_silence = self._timeout + (RANKS_GRACE if parallel.world_size > 1 else GRACE)
        self._startup_timeout = startup_timeout
        self._started_at = time.monotonic()
        self.startup_seconds = 0.0
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.engine.cores.core_process", self.sockets],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, ENGINE_VARIABLE: str(launch.index), **launch.environment},
            )
        except OSError:  # out of memory or processes
            self.close()
            shutil.rmtree(self.sockets, ignore_errors=True)
            raise
        self._start = StartCore(launch.config, str(launch.folder))
        self._to_core.send(self._encoder.encode(launch.log))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_exited(self) -> bool:
        """True if the process has exited."""
        return self._process.poll() is not None

    async def ready(self, report: Report) -> WorkerInfo:
        """Wait until the core accepts requests. Raises the ToolkitError of start-up."""
        self._to_core.send(self._encoder.encode(self._start))
        self.listen()
        self._check_process()
        while True:
            for message in await self.receive():
                if isinstance(message, StartupPhase):
                    report(message.name, message.seconds)
                elif isinstance(message, Ready):
                    self._is_ready = True
                    self.startup_seconds = time.monotonic() - self._started_at
                    return message.info

    async def receive(self) -> list[CoreMessage]:
        """Wait for messages and return all that have arrived.

        Raises the error that ended the core: a ToolkitError of start-up, else EngineDeadError with
        the cause, which may be a hang."""
        waited = False
        while True:
            code = self._process.poll()
            messages = self._receive_available()
            if messages:
                self._silent_for, self._is_pinged = 0.0, False
                self.last_message_at = time.monotonic()
                self._suspect(False)
                return messages
            if code is not None and waited:
                raise EngineDeadError(
                    f"The engine's process ended unexpectedly ({describe_exit(code)})."
                )
            if not self._is_ready and self._silent_for > self._startup_timeout:
                raise EngineDeadError(
                    "The engine's process is alive but its start has made no progress for "
                    f"{self._startup_timeout:.0f} s: it hangs."
                )
            if self._is_pinged and self._silent_for > self._max_silence:
                raise EngineDeadError(
                    f"The engine's process is alive but has made no step for {self._timeout:g} s "
                    "(--worker-timeout): it hangs, or its steps take longer than that."
                )
            await self._wait_for_message()
            waited = True

    def _check_process(self) -> None:
        """Wake `receive` periodically to check the process."""
        self._silent_for += CHECK_INTERVAL
        if self._is_ready and not self._is_pinged and self._silent_for > PING_AFTER:
            self._silent_for, self._is_pinged = 0.0, True
            self.send(Ping())
        self._wake_receiver()
        self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._check_process)
        if self._is_pinged and self._silent_for > self._timeout / 2:
            self._suspect(True)

    def _suspect(self, suspected: bool) -> None:
        if suspected != self._is_suspected:
            self._is_suspected = suspected
            if self.on_suspicion is not None:
                self.on_suspicion(suspected)

    async def kill_and_wait(self) -> None:
        """Kill the process and wait for its exit, which frees its resources.

        The sockets stay open. Messages sent from now on are lost."""
        if self._process.poll() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """Ask the process to exit; kill it after STOP_TIMEOUT."""
        if self._process.poll() is None:
            self.send(Stop())
            deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT
            while self._process.poll() is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Kill the process and remove the sockets."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.close()
        shutil.rmtree(self.sockets, ignore_errors=True)


def describe_exit(code: int) -> str:
    """Describe the exit code of a process."""
    if code == -9:
        return "killed by SIGKILL, often because the system was out of memory; see dmesg"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
