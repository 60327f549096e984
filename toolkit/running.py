"""Records of the servers that run on this machine: one file for each, in the user's runtime folder.

A server writes its record, and removes it when it ends. The record of a server that was killed is
removed by the next reader."""

import contextlib
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from toolkit.config.engine import without_latest
from toolkit.errors import ConfigError, did_you_mean
from toolkit.logs import error_log

logger = logging.getLogger(__name__)

UNLISTED = "TK_UNLISTED"  # environment variable: 1 for a server that ends with its chat: no record
MAX_LOGS = 20  # then the oldest are removed, except those of running servers

State = Literal["starting", "ready", "stopping"]


class RunningServer(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a server. By default it is about this process."""

    model: str  # an absolute path, or the name on the hub
    names: tuple[str, ...]  # of the model in the API
    url: str  # for clients on this machine
    host: str | None  # that it listens on
    port: int | None
    uds: str | None  # Unix socket, instead of host and port
    needs_key: bool
    idle_timeout: float | None = None  # seconds without a request after which it ends
    pid: int = msgspec.field(default_factory=os.getpid)
    process_start: float | None = msgspec.field(default_factory=lambda: process_start(os.getpid()))
    """A later process with the same id has another."""
    since: float = msgspec.field(default_factory=time.time)  # UNIX time
    log: str | None = msgspec.field(default_factory=lambda: _log_file())  # file of its stderr
    state: State = "starting"

    @property
    def address(self) -> str:
        return self.url if self.uds is None else self.uds

    @property
    def title(self) -> str:
        """Name and address for messages."""
        return f"{self.names[0]} at {self.address}"

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return process_start(self.pid) == self.process_start is not None

    def has(self, model: str) -> bool:
        """Return True if the server's model has this name, or was loaded from this path.

        A path that exists is no name: another model may have the name."""
        identity = model_identity(model)
        return identity == self.model or (identity == model and model in self.names)

    def is_called(self, word: str) -> bool:
        """Return True for a name or path of the model, and the number of the port or process."""
        word = without_latest(word)
        return word in self.names or self.has(word) or word in (str(self.port), str(self.pid))


@contextlib.contextmanager
def listed(server: RunningServer) -> Iterator[Callable[[State], None]]:
    """Keep the record for the block. Yields a function that changes its state.

    A server without a writable runtime folder has no record."""
    path = runtime_folder() / f"{server.pid}.json"
    is_listed = os.environ.get(UNLISTED, "") in ("", "0")

    def write(state: State) -> None:
        nonlocal is_listed
        if not is_listed:
            return
        try:
            make_private(path.parent)
            new = path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(msgspec.structs.replace(server, state=state)))
            new.replace(path)
        except OSError as error:
            is_listed = False
            logger.info(
                "tk ps, stop and logs will not find this server: no record in %s (%s)",
                path.parent,
                error.strerror or error,
            )

    write("starting")
    try:
        yield write
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def running_servers() -> list[RunningServer]:
    """Return the user's servers, oldest first. Removes the records of servers that have ended."""
    folder = runtime_folder()
    found = []
    try:
        _require_private(folder)
        paths = list(folder.glob("*.json"))
    except OSError:
        return []
    for path in paths:
        with contextlib.suppress(OSError):
            try:
                server = msgspec.json.decode(path.read_bytes(), type=RunningServer)
            except msgspec.MsgspecError:  # of another version
                continue
            if server.is_running:
                found.append(server)
            else:
                path.unlink()
    return sorted(found, key=lambda server: (server.since, server.pid))


def model_identity(model: str) -> str:
    """Return the absolute path of a model's folder or file, and other names unchanged."""
    path = os.path.expanduser(model)
    return os.path.abspath(path) if os.path.exists(path) else model


def choose(word: str | None, command: str) -> RunningServer:
    """Return the server whose model, port or process has the name or number `word`.

    Without a word, the only server. Raises ConfigError if it is none or one of several. `command`:
    for its message."""
    servers = running_servers()
    if not servers:
        raise ConfigError(f"No server of yours runs on this machine.{_where_logs_are(command)}")
    found = [one for one in servers if word is None or one.is_called(word)]
    if len(found) == 1:
        return found[0]
    titles = as_list(found or servers)
    if not found:
        names = [name for one in servers for name in one.names]
        raise ConfigError(
            f"No server has the name, port or process {word!r}.{did_you_mean(word or '', names)} "
            f"Running: {titles}.{_where_logs_are(command)}"
        )
    raise ConfigError(
        f"{len(found)} servers run: {titles}. Choose one by name, port or process: tk {command} "
        f"{found[0].port or found[0].pid}"
    )


def _where_logs_are(command: str) -> str:
    """Return a sentence about logs of servers that have ended, if tk logs finds no server."""
    folder = _log_folder()
    if command != "logs" or not any(folder.glob("*.log")):
        return ""
    return f" Logs of servers that ran in the background are in {folder}."


def as_list(servers: Sequence[RunningServer]) -> str:
    """Return the servers' names and addresses for a message."""
    return ", ".join(server.title for server in servers)


def runtime_folder() -> Path:
    """Return $XDG_RUNTIME_DIR/tk, else /run/user/UID/tk, else tk-run-UID among temporary files."""
    user = os.getuid()
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{user}"
    with contextlib.suppress(OSError):
        if os.stat(base).st_uid == user and os.access(base, os.W_OK):  # not that of `su`'s caller
            return Path(base) / "tk"
    return Path(tempfile.gettempdir()) / f"tk-run-{user}"


def make_private(folder: Path) -> None:
    """Make a folder if it does not exist. Raises OSError if other users could write to it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_private(folder)


def _log_folder() -> Path:
    return error_log().parent / "servers"


def new_log() -> Path:
    """Make a log file for a server in the background, and remove old ones. Raises ConfigError."""
    folder = _log_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file, path = tempfile.mkstemp(".log", time.strftime("%Y-%m-%d-%H%M%S-"), folder)
        os.close(file)
        in_use = {server.log for server in running_servers()}
        for old in sorted(folder.glob("*.log"))[:-MAX_LOGS]:
            if str(old) not in in_use:
                old.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"A server in the background needs a log file, and {folder} takes none: "
            f"{error.strerror}."
        ) from None
    return Path(path)


def process_start(pid: int) -> float | None:
    """Return a number that identifies the process with this id; None if there is none.

    On Linux, ticks since boot: a change of the clock does not move them."""
    if sys.platform != "linux":
        import psutil

        try:
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
        except psutil.Error:
            return None
    try:
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = line.rpartition(")")[2].split()  # the name before it may have spaces
    return None if fields[0] in ("Z", "X") else float(fields[19])


def _require_private(folder: Path) -> None:
    """Raise OSError unless only this user can write to the folder: others may make it in /tmp."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(None, "it is not a private folder of this user")


def _log_file() -> str | None:
    """Return the file that stderr is written to; None if it is no file, or cannot be known."""
    try:
        if stat.S_ISREG(os.fstat(2).st_mode):
            return os.readlink("/proc/self/fd/2")
    except OSError:  # no /proc
        pass
    return None
