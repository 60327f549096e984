"""Private servers that outlive their chat: they end some time after the last request.

They listen on a Unix socket in the user's runtime folder, so that no other user can reach them, and
have a record like those of `tk serve`."""

import contextlib
import fcntl
import hashlib
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from toolkit.chat.local import POLL, last_line, start, stop, wait_until_ready
from toolkit.chat.screen.starting import Tick
from toolkit.errors import ConfigError
from toolkit.running import (
    RunningServer,
    make_private,
    model_identity,
    new_log,
    running_servers,
    runtime_folder,
)

MAX_PATH = 100  # bytes of a socket's path; Linux allows 107, macOS 103


def kept_servers() -> list[RunningServer]:
    """Return the private servers that are ready or starting, oldest first."""
    return [
        one
        for one in running_servers()
        if one.uds is not None and one.idle_timeout is not None and one.state != "stopping"
    ]


def can_keep_servers() -> bool:
    """Return True if the runtime folder can have their sockets and records."""
    folder = runtime_folder()
    if len(os.fsencode(_socket_path(folder))) > MAX_PATH:
        return False
    try:
        make_private(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


def kept_server(
    model: str,
    keep_alive: float,
    *,
    tick: Tick,
    hint: str = "",
    command: Sequence[str] | None = None,
) -> RunningServer:
    """Return the private server of a model. Starts it if there is none.

    Only one process starts it; others wait. `command` replaces `tk serve MODEL`. Raises
    ServerError, with the end of the log and `hint`, if the server exits during start-up."""
    with _lock(model, tick):
        started = time.monotonic()
        while (found := _find(model)) is not None:  # its starter may have been killed
            if found.state == "ready":
                return found
            tick(
                time.monotonic() - started, "" if found.log is None else last_line(Path(found.log))
            )
            time.sleep(POLL)
        return _start(model, keep_alive, tick, hint, command)


def _find(model: str) -> RunningServer | None:
    return next((one for one in kept_servers() if one.has(model)), None)


def _start(
    model: str,
    keep_alive: float,
    tick: Tick,
    hint: str,
    command: Sequence[str] | None,
) -> RunningServer:
    """Start a server and wait until it is ready. It ends if this process is interrupted before."""
    path = _socket_path(runtime_folder())
    log = new_log()
    flags = ["--uds", path, "--idle-timeout", f"{keep_alive:g}", "--api-workers", "1"]
    process = start(
        [*(command or [sys.executable, "-m", "toolkit", "serve", model]), *flags],
        log,
        {"TK_LOG_FORMAT": "text", "TK_DETACH": "0"},
        without=("TK_API_KEY", "TK_API_KEY_FILE"),
        ends_with_parent=False,
    )
    transport = httpx.HTTPTransport(uds=path)
    try:
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=5.0) as http:
            wait_until_ready(http, process, log, tick, hint)
        while (found := _record(process.pid)) is None or found.state != "ready":
            if process.poll() is not None:
                raise ConfigError(f"The server of {model} ended as soon as it was ready.")
            time.sleep(POLL)
    except BaseException:
        stop(process)
        raise
    return found


def _record(pid: int) -> RunningServer | None:
    return next((one for one in running_servers() if one.pid == pid), None)


def _socket_path(folder: Path) -> str:
    return str(folder / f"{secrets.token_hex(4)}.sock")


@contextlib.contextmanager
def _lock(model: str, tick: Tick) -> Iterator[None]:
    """Let one process at a time look for the model's server and start it."""
    digest = hashlib.sha256(model_identity(model).encode()).hexdigest()[:16]
    folder = runtime_folder()
    make_private(folder)
    descriptor = os.open(folder / f"{digest}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    started = time.monotonic()
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                tick(time.monotonic() - started, "another chat starts it")
                time.sleep(POLL)
        yield
    finally:
        os.close(descriptor)
