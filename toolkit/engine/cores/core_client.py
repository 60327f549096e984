"""A front end's side of the core: the sockets between them, and the core's process."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import msgspec
import zmq

from toolkit.config.engine import ENGINE
from toolkit.engine.cores.launch import Launch, Phases
from toolkit.engine.cores.sockets import address, descriptor, has_message, open_socket
from toolkit.engine.messages import (
    Alive,
    EngineOutputs,
    Failed,
    Forgotten,
    FromCore,
    Knock,
    Phase,
    Pong,
    Ready,
    RequestList,
    Start,
    Stop,
    ToCore,
)
from toolkit.errors import EngineDeadError, error_of_kind
from toolkit.worker import Report, WorkerInfo

CHECK_INTERVAL = 0.2
"""Seconds between looks at whether the process still lives."""
KNOCK = 5.0
"""Seconds without a word of the core after which it is asked for one."""
GRACE = 5.0
"""Seconds more than a step may take, for the core to say by itself which of its ranks hangs."""
STOP_TIMEOUT = 10.0
"""Seconds that the core gets to end after a Stop."""

FromAlive = EngineOutputs | RequestList | Forgotten | Phase | Ready | Pong | Alive
"""What a core says while it lives."""


class CoreLink:
    """One front end's messages to and from a core. They are MessagePack over ZMQ, on Unix sockets in a folder that
    only this user can open.
    """

    client: int = 0
    """Which of the core's front ends this is."""

    def __init__(self, folder: str, client: int) -> None:
        """`folder`: where the sockets are. What is sent before the core is there waits for it."""
        self.client = client
        self._context = zmq.Context()
        self._to_core = open_socket(self._context, zmq.PUSH)
        self._to_core.connect(address(folder, "in"))
        self._from_core = open_socket(self._context, zmq.PULL)
        self._from_core.bind(address(folder, f"out{client}"))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived: asyncio.Future[None] | None = None
        """What `receive` waits for."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)

    @property
    def ended(self) -> bool:
        """Whether the core is known to be gone."""
        return False

    def listen(self) -> None:
        """From here on the running loop hears of messages."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor(self._from_core), self._wake)

    def send(self, message: ToCore) -> None:
        """Queues a message; never blocks."""
        self._to_core.send(self._encoder.encode(message))

    async def receive(self) -> list[FromAlive]:
        """The next messages: all that have come."""
        while not (messages := self._received()):
            await self._news()
        return messages

    async def stop(self) -> None:
        """Closes the sockets."""
        self.close()

    def kill(self) -> None:
        """Closes the sockets."""
        self.close()

    def close(self) -> None:
        """Closes the sockets; what has not been sent yet is dropped."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(descriptor(self._from_core))
        self._loop = None
        self._context.destroy(linger=0)

    async def _news(self) -> None:
        """Waits until something has come, or may have."""
        self._arrived = asyncio.get_running_loop().create_future()
        await self._arrived

    def _wake(self) -> None:
        """Something happened on the socket. To ask for its events also quiets its descriptor, whoever waits."""
        if has_message(self._from_core):
            self._end_wait()

    def _end_wait(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _received(self) -> list[FromAlive]:
        """Everything that has come. ZMQ's descriptor tells of new messages only when none are left unread."""
        messages: list[FromAlive] = []
        while has_message(self._from_core):
            message: FromCore = self._decoder.decode(self._from_core.recv())
            if isinstance(message, Failed):
                raise error_of_kind(message.kind, message.message) or EngineDeadError(
                    f"The engine stopped: {message.message}"
                )
            messages.append(message)
        return messages


class CoreClient(CoreLink):
    """The first front end: it starts the core's process, and notices when that ends or hangs: when it makes no step within
    `--worker-timeout`.
    """

    def __init__(self, launch: Launch, patience: float = math.inf) -> None:
        """Starts the process; `ready` waits for it, unless it says nothing of its start for `patience` seconds."""
        self.sockets = tempfile.mkdtemp(prefix="tk-")
        super().__init__(self.sockets, 0)
        self._timer: asyncio.TimerHandle | None = None
        self.heard_at = time.monotonic()
        """When the core last said anything."""
        self._unheard = 0.0
        """Seconds without a word of the core; from a Knock on, of those since that. Only those in which this process looked: when
        both are put aside, none pass."""
        self._knocked = self._ready = False
        self._timeout, self._patience = launch.config.parallel.worker_timeout, patience
        self._began = time.monotonic()
        self.took = 0.0
        """Seconds that the start took."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.engine.cores.core_process", self.sockets],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, ENGINE: str(launch.index), **launch.environment},
            )
        except OSError:  # out of memory or processes
            self.close()
            shutil.rmtree(self.sockets, ignore_errors=True)
            raise
        self._start = Start(launch.config, str(launch.folder), launch.log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether its process is known to be gone."""
        return self._process.poll() is not None

    async def ready(self, report: Report) -> WorkerInfo:
        """Waits until requests can come. Raises the ToolkitError that start-up met, or EngineDeadError."""
        self._to_core.send(self._encoder.encode(self._start))
        self.listen()
        self._look()
        while True:
            for message in await self.receive():
                if isinstance(message, Phase):
                    report(message.name, message.seconds)
                elif isinstance(message, Ready):
                    self._ready = True
                    self.took = time.monotonic() - self._began
                    return message.info

    async def receive(self) -> list[FromAlive]:
        """The next messages: all that have come. Raises what ended the core: a ToolkitError of start-up, else
        EngineDeadError with the cause, which may be that it hangs.
        """
        waited = False
        while True:
            code = self._process.poll()
            messages = self._received()
            if messages:
                self._unheard, self._knocked = 0.0, False
                self.heard_at = time.monotonic()
                return messages
            if code is not None and waited:
                raise EngineDeadError(
                    f"The engine's process ended without a word ({how_ended(code)})."
                )
            if not self._ready and self._unheard > self._patience:
                raise EngineDeadError(
                    f"The engine's process lives and has said nothing of its start for {self._patience:.0f} s: it hangs."
                )
            if self._knocked and self._unheard > self._timeout + GRACE:
                raise EngineDeadError(
                    f"The engine's process lives and has made no step for {self._timeout:g} s (--worker-timeout): it hangs, or its "
                    "steps take longer than that."
                )
            await self._news()
            waited = True

    def _look(self) -> None:
        """Has `receive` look at the process now and then."""
        self._unheard += CHECK_INTERVAL
        if self._ready and not self._knocked and self._unheard > KNOCK:
            self._unheard, self._knocked = 0.0, True
            self.send(Knock())
        self._end_wait()
        self._timer = asyncio.get_running_loop().call_later(CHECK_INTERVAL, self._look)

    async def end(self) -> None:
        """Ends the process by force, and returns when it has let go of all that it held. The sockets stay: what is
        sent from now on is lost.
        """
        if self._process.poll() is None:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    async def stop(self) -> None:
        """Ends the process: with a word, then by force."""
        if self._process.poll() is None:
            self.send(Stop())
            deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT
            while self._process.poll() is None and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Ends the process by force and removes the sockets."""
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


async def all_ready(cores: Sequence[CoreClient], report: Report) -> list[WorkerInfo]:
    """Waits for cores that are being started. When one cannot be, all are ended, and its error is raised."""
    phases = Phases(len(cores), report)
    starting = [asyncio.ensure_future(core.ready(phases.add)) for core in cores]
    try:
        return await asyncio.gather(*starting)
    except BaseException:
        for task in starting:
            task.cancel()
        for core in cores:
            core.kill()
        raise


def how_ended(code: int) -> str:
    """An ended process' exit code in words."""
    if code == -9:
        return "killed by SIGKILL: often the system was out of memory; dmesg tells"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
