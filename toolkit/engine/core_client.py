"""The front end's side of a core process: starts it, talks to it, notices its end."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

import toolkit.errors
from toolkit.config import EngineConfig
from toolkit.engine.messages import EngineOutputs, Failed, FromCore, Phase, Ready, Start, Stop, ToCore
from toolkit.engine.sockets import Socket, descriptor, has_message, open_socket
from toolkit.errors import EngineDeadError, ToolkitError
from toolkit.worker import Report, WorkerInfo

CHECK_INTERVAL = 0.5
"""Seconds between looks at whether the process still lives."""
STOP_TIMEOUT = 10.0
"""Seconds that the core gets to end after a Stop."""


class CoreClient:
    """Messages are MessagePack over ZMQ, on Unix sockets in a folder that only this user can open."""

    def __init__(self, config: EngineConfig, folder: Path, log_level: str = "info") -> None:
        """Starts the process; `ready` waits for it."""
        self._sockets = tempfile.mkdtemp(prefix="tk-")
        self._context = zmq.Context()
        self._to_core = self._bind(zmq.PUSH, "in")
        self._from_core = self._bind(zmq.PULL, "out0")
        self._arrived: asyncio.Future[None] | None = None
        """What `receive` waits for."""
        self._timer: asyncio.TimerHandle | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromCore)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.engine.process", self._sockets],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        self._start = Start(config, str(folder), log_level)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self, report: Report) -> WorkerInfo:
        """Waits until requests can come. Raises the ToolkitError that start-up met, or EngineDeadError."""
        self._to_core.send(self._encoder.encode(self._start))
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(descriptor(self._from_core), self._wake)
        self._look()
        while True:
            for message in await self.receive():
                if isinstance(message, Phase):
                    report(message.name, message.seconds)
                elif isinstance(message, Ready):
                    return message.info

    def send(self, message: ToCore) -> None:
        """Queues a message; never blocks."""
        self._to_core.send(self._encoder.encode(message))

    async def receive(self) -> list[EngineOutputs | Phase | Ready]:
        """The next messages: all that have come. Raises what ended the core: a ToolkitError of start-up, else
        EngineDeadError with the cause.
        """
        waited = False
        while True:
            code = self._process.poll()
            messages = self._received()
            if messages:
                return messages
            if code is not None and waited:
                raise EngineDeadError(f"The engine's process ended without a word ({_how(code)}).")
            self._arrived = self._loop.create_future()
            await self._arrived
            waited = True

    def _wake(self) -> None:
        """Something happened on the socket. To ask for its events also quiets its descriptor, whoever waits."""
        if has_message(self._from_core):
            self._end_wait()

    def _look(self) -> None:
        """Has `receive` look at the process now and then."""
        self._end_wait()
        self._timer = self._loop.call_later(CHECK_INTERVAL, self._look)

    def _end_wait(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _received(self) -> list[EngineOutputs | Phase | Ready]:
        """Everything that has come. ZMQ's descriptor tells of new messages only when none are left unread."""
        messages: list[EngineOutputs | Phase | Ready] = []
        while has_message(self._from_core):
            message: FromCore = self._decoder.decode(self._from_core.recv())
            if isinstance(message, Failed):
                kind = getattr(toolkit.errors, message.kind, None) if message.kind else None
                if isinstance(kind, type) and issubclass(kind, ToolkitError):
                    raise kind(message.message)
                raise EngineDeadError(f"The engine stopped: {message.message}")
            messages.append(message)
        return messages

    def _bind(self, kind: int, name: str) -> Socket:
        socket = open_socket(self._context, kind)
        socket.bind(f"ipc://{self._sockets}/{name}")
        return socket

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
            if not self._loop.is_closed():
                self._loop.remove_reader(descriptor(self._from_core))
        self._context.destroy(linger=0)
        shutil.rmtree(self._sockets, ignore_errors=True)


def _how(code: int) -> str:
    if code == -9:
        return "killed by SIGKILL: often the system was out of memory; dmesg tells"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
