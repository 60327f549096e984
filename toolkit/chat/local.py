"""A private server that ends with its chat: a child process on a free port of 127.0.0.1."""

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from toolkit.chat.screen.starting import Tick
from toolkit.chat.state import private_file, state_folder
from toolkit.client.wire import ServerError
from toolkit.running import UNLISTED

POLL = 0.1  # seconds
GRACE = 10.0  # seconds between SIGTERM and SIGKILL
LAST_LINES = 15
MAX_LINE = 400  # bytes of a line that the progress shows
PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server that is ready."""

    url: str
    api_key: str


@contextmanager
def local_server(
    model: str | None,
    *,
    tick: Tick,
    hint: str = "",
    command: Sequence[str] | None = None,
    flags: Sequence[str] = (),
) -> Iterator[LocalServer]:
    """Start a server, wait until it is ready, and stop it at the end.

    `flags`: more flags of `tk serve MODEL`. `command` replaces it; the flags for host and port are
    appended. Raises ServerError, with the end of the log and `hint`, if the server exits during
    start-up."""
    port = free_port()
    key = secrets.token_urlsafe(24)
    if command is None:
        command = [sys.executable, "-m", "toolkit", "serve", *([model] if model else [])]
    log = private_file(state_folder() / f"chat-server-{os.getpid()}.log")
    process = start(
        [*command, *flags, "--host", "127.0.0.1", "--port", str(port)],
        log,
        {"TK_API_KEY": key, "TK_LOG_FORMAT": "text", UNLISTED: "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, trust_env=False, timeout=5.0) as http:
            wait_until_ready(http, process, log, tick, hint)
        yield LocalServer(url, key)
    finally:
        has_died = process.poll() is not None
        stop(process)
        if not has_died:  # otherwise the log has the reason
            log.unlink(missing_ok=True)


def start(
    command: Sequence[str],
    log: Path,
    extra: Mapping[str, str],
    *,
    without: Sequence[str] = (),
    ends_with_parent: bool = True,
) -> subprocess.Popen[bytes]:
    """Start a child that Ctrl-C does not reach.

    `extra`, `without`: environment variables to add and to leave out. `ends_with_parent`: on Linux,
    it ends with this process."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" and ends_with_parent else None

    def die_with_parent() -> None:
        assert libc is not None
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={
                **{key: value for key, value in os.environ.items() if key not in without},
                **extra,
            },
            start_new_session=True,
            preexec_fn=die_with_parent if libc is not None else None,
        )


def wait_until_ready(
    http: httpx.Client,
    process: subprocess.Popen[bytes],
    log: Path,
    tick: Tick,
    hint: str,
) -> None:
    """Wait until /health returns 200. Raises ServerError if the child exits first."""
    started = time.monotonic()
    while True:
        tick(time.monotonic() - started, last_line(log))
        if (code := process.poll()) is not None:
            raise ServerError(
                f"The server did not start (exit code {code}).{hint} The end of its log, {log}:"
                f"\n\n{last_lines(log)}"
            )
        with contextlib.suppress(httpx.HTTPError):
            if http.get("/health").status_code == 200:
                return
        time.sleep(POLL)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM, then after GRACE seconds SIGKILL to what is left of the process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
        process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def exit_on_signals(*signals: signal.Signals) -> Iterator[None]:
    """Make these signals raise SystemExit inside the block, so that child processes are stopped."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_line(log: Path) -> str:
    """Return the last complete line of a log; empty without one."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - MAX_LINE))
        lines = file.read().decode(errors="replace").split("\n")[:-1]
    return lines[-1] if lines else ""


def last_lines(log: Path) -> str:
    lines = log.read_text(errors="replace").rstrip().splitlines()
    return "\n".join(lines[-LAST_LINES:]) or "(empty)"


def free_port() -> int:
    """Return a free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
