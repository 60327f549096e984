"""`tk serve --detach`: a server in the background, with a log file."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

from toolkit.config import ServerConfig
from toolkit.running import new_log, running_servers

POLL = 0.05  # seconds


def detach(config: ServerConfig) -> int:
    """Start this command again in its own session, and return when its server is ready.

    Until then its log is copied to stderr. Returns the exit code: that of a server that does not
    start. Ctrl-C ends it."""
    path = new_log()
    with (
        path.open("rb") as log,
        tempfile.TemporaryDirectory(prefix="tk-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications,
    ):
        notifications.bind(address := os.path.join(folder, "ready"))
        notifications.setblocking(False)
        process = _start(config, path, address)
        try:
            while not (is_ready := _is_ready(notifications)) and process.poll() is None:
                _copy(log)
                time.sleep(POLL)
        except BaseException:
            process.send_signal(signal.SIGINT)
            process.wait()
            raise
        finally:
            _copy(log)
    if not is_ready:
        path.unlink()  # stderr has all of it
        return process.wait()
    record = next((one for one in running_servers() if one.pid == process.pid), None)
    if record is None:  # its log says why
        end = f"'kill {process.pid}' ends it. Its log: {path}"
    else:
        word = record.port or record.names[0]
        end = f"'tk stop {word}' ends it, 'tk logs {word}' prints its log, {path}"
    print(f"The server keeps running (process {process.pid}). {end}", file=sys.stderr)
    return 0


def _start(config: ServerConfig, log: Path, address: str) -> subprocess.Popen[bytes]:
    """Start the server. `address`: of the socket that it notifies, as systemd's, when ready."""
    arguments = [word for word in sys.argv[1:] if word != "--detach"]
    environment = os.environ | {
        "TK_DETACH": "0",
        "NOTIFY_SOCKET": address,
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
    if config.log_format == "auto":
        environment["TK_LOG_FORMAT"] = "text"  # as on a terminal
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "toolkit", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


def _is_ready(notifications: socket.socket) -> bool:
    """Return True once the server has sent that it is ready."""
    with contextlib.suppress(BlockingIOError):
        return notifications.recv(100) == b"READY=1"
    return False


def _copy(log: BinaryIO) -> None:
    """Copy the new bytes of the log to stderr."""
    sys.stderr.write(log.read().decode(errors="replace"))
    sys.stderr.flush()
