"""Processes for the chat templates that requests bring.

Jinja's sandbox keeps a template from running Python, but no check inside a process can end every
expression in time. A process can be killed: at the limit, and when the client has gone."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import Any

from toolkit.errors import InvalidRequestError, ServerUnavailableError
from toolkit.framing import frame, read_frame

MAX_PROCESSES = 4
MAX_SECONDS = 2.0  # A conversation of a million tokens takes a fraction of a second
MAX_BYTES = 2**29  # address space of a process

_ENVIRONMENT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "VIRTUAL_ENV")
"""Variables that Python needs. Others may be secrets."""


class TemplatePool:
    """Renders templates, each in a process of its own meanwhile.

    Processes start when they are needed. One that rendered without a problem is used again."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[_Process] = []

    async def render(
        self, template: str, special_tokens: dict[str, str], options: dict[str, Any]
    ) -> str:
        """Return the prompt that a template makes. `options` are those of `render_template`.

        Cancellation ends the rendering. Raises InvalidRequestError for a wrong template and beyond
        a limit, ServerUnavailableError if there can be no process."""
        try:
            job = json.dumps([template, special_tokens, options]).encode()
        except RecursionError:
            raise _refusal("arguments of a tool call are nested too deeply") from None
        async with self._slots:
            answer = None
            if process := self._take_idle():
                answer = await self._ask(process, job)
            if answer is None:  # an idle process may have died before the job
                answer = await self._ask(await _Process.start(), job)
        if answer is None:
            raise _refusal(
                f"it needs more than {MAX_BYTES // 2**20} MiB of memory, or too deep a stack"
            )
        if "problem" in answer:
            raise _refusal(answer["problem"])
        return str(answer["text"])

    async def _ask(self, process: "_Process", job: bytes) -> dict[str, str] | None:
        """Return the answer, None if the process dies. Raises InvalidRequestError at the limit."""
        try:
            async with asyncio.timeout(MAX_SECONDS):
                answer: dict[str, str] = json.loads(await process.ask(job))
        except BaseException as error:
            await process.kill()
            if isinstance(error, TimeoutError):
                raise _refusal(f"it takes longer than {MAX_SECONDS:g} seconds") from None
            if isinstance(error, OSError | asyncio.IncompleteReadError):
                return None
            raise
        self._idle.append(process)
        return answer

    def _take_idle(self) -> "_Process | None":
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            process.close()
        return None

    async def close(self) -> None:
        """End the processes that have nothing to do."""
        while self._idle:
            await self._idle.pop().kill()


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"The chat template of the request cannot be rendered: {problem}", param="chat_template"
    )


class _Process:
    def __init__(
        self,
        process: subprocess.Popen[bytes],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls) -> "_Process":
        """Return when the process is ready. Raises ServerUnavailableError."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", "toolkit.text.template_process", str(MAX_BYTES),
                     str(MAX_SECONDS)],
                    stdin=subprocess.PIPE,  # the process ends when this end is closed
                    stdout=theirs.fileno(),
                    env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ours.close()
                raise ServerUnavailableError(
                    f"The process that renders chat templates could not be started: {error}"
                ) from None
        ours.setblocking(False)
        started = cls(process, *await asyncio.open_connection(sock=ours))
        try:
            await read_frame(started._reader)
        except (OSError, asyncio.IncompleteReadError):
            await started.kill()
            raise ServerUnavailableError(
                "The process that renders chat templates ended while it started "
                f"(exit code {process.returncode})."
            ) from None
        except BaseException:
            await started.kill()
            raise
        return started

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, job: bytes) -> bytes:
        """Return the answer to a job. Raises OSError or IncompleteReadError if the process dies."""
        self._writer.write(frame(job))
        await self._writer.drain()
        return await read_frame(self._reader)

    async def kill(self) -> None:
        self._process.kill()
        self.close()
        while self.is_alive:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        self._writer.transport.abort()
        assert self._process.stdin is not None
        self._process.stdin.close()
