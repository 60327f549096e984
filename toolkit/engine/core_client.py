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
import zmq.asyncio

import toolkit.errors
from toolkit.config import EngineConfig
from toolkit.engine.messages import EngineOutputs, Failed, FromCore, Phase, Ready, Start, Stop, ToCore
from toolkit.errors import EngineDeadError, ToolkitError
from toolkit.worker import Report, WorkerInfo

STOP_TIMEOUT = 10.0
"""Seconds that the core gets to end after a Stop."""


class CoreClient:
    """Messages are MessagePack over ZMQ, on Unix sockets in a folder that only this user can open."""

    def __init__(self, config: EngineConfig, folder: Path, log_level: str = "info") -> None:
        """Starts the process; `ready` waits for it."""
        self._sockets = tempfile.mkdtemp(prefix="tk-")
        self._context = zmq.asyncio.Context()
        self._to_core = self._context.socket(zmq.PUSH)
        self._from_core = self._context.socket(zmq.PULL)
        for socket, name in ((self._to_core, "in"), (self._from_core, "out")):
            socket.set_hwm(0)
            socket.bind(f"ipc://{self._sockets}/{name}")
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
        await self._to_core.send(self._encoder.encode(self._start))
        while True:
            message = await self.receive()
            if isinstance(message, Phase):
                report(message.name, message.seconds)
            elif isinstance(message, Ready):
                return message.info

    def send(self, message: ToCore) -> None:
        """Queues a message; never blocks."""
        self._to_core.send(self._encoder.encode(message))

    async def receive(self) -> EngineOutputs | Phase | Ready:
        """The next message. Raises what ended the core: a ToolkitError of start-up, else EngineDeadError with
        the cause.
        """
        while not await self._from_core.poll(500):
            code = self._process.poll()
            if code is not None and not await self._from_core.poll(0):
                raise EngineDeadError(f"The engine's process ended without a word ({_how(code)}).")
        message: FromCore = self._decoder.decode(await self._from_core.recv())
        if isinstance(message, Failed):
            kind = getattr(toolkit.errors, message.kind, None) if message.kind else None
            if isinstance(kind, type) and issubclass(kind, ToolkitError):
                raise kind(message.message)
            raise EngineDeadError(f"The engine stopped: {message.message}")
        return message

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
        self._context.destroy(linger=0)
        shutil.rmtree(self._sockets, ignore_errors=True)


def _how(code: int) -> str:
    if code == -9:
        return "killed by SIGKILL: often the system was out of memory; dmesg tells"
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
