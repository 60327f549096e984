"""Processes of tests, forked from one that has imported PyTorch and the server already.

These imports take four seconds of CPU time. The processes run the same module with the same
arguments, environment and files as those that Python would start, and they are children of the
process that asked for them. Linux only."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

MAX_MESSAGE = 2**17
MAX_FILES = 8
TITLE = 2**12
"""Bytes for the command line of a forked process."""
PR_SET_CHILD_SUBREAPER = 36
HAVE_CHILDREN = {  # modules that start processes: by name, where they do
    "toolkit": ("toolkit.engine.cores.core_client", "toolkit.serving.supervisor"),
    "toolkit.engine.cores.core_process": ("toolkit.executor.local_ranks",),
}
NURSERY = "nursery of tests"

IMPORTED = (
    "toolkit.cli.root",
    "toolkit.engine.core",
    "toolkit.engine.cores.core_process",
    "toolkit.executor.rank",
    "toolkit.serving.api_worker",
    "toolkit.serving.lifecycle",
    "toolkit.worker.worker",
    # Imported while it starts:
    "rich.panel",
    "rich.table",
    "tokenizers",
    "toolkit.console",
    "tomllib",
)


class ForkServer:
    """A child process with one thread that forks other children of this process."""

    def __init__(self, ours: socket.socket | None = None) -> None:
        """Start a child that imports everything. `ours`: end of a socket to one that has."""
        self.process: subprocess.Popen[bytes] | None = None
        if ours is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "tests.forked", str(theirs.fileno()), "-" * TITLE]
                self.process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    cwd=Path(__file__).parents[1],
                    # The threads of NumPy's BLAS would not survive in forked processes.
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
                )
        self._socket = ours
        self._starting = threading.Lock()

    def start(self, request: dict[str, object], files: list[int]) -> int:
        """Fork a process and return its id. Its first three files are the standard ones."""
        with self._starting, _adopting():
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            answer = self._socket.recv(MAX_MESSAGE)
        if not answer:
            raise OSError("the process that forks others has ended")
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        if self.process is not None:
            self.process.wait()


@functools.cache
def shared() -> ForkServer | None:
    """Return the fork server of this test process; None where there is no fork."""
    if sys.platform != "linux":
        return None
    server = ForkServer()
    atexit.register(server.close)
    return server


class ForkedProcess(subprocess.Popen[Any]):
    """A process `python -m MODULE ARGUMENTS` that a fork server forks."""

    def __init__(
        self, fork_server: ForkServer, command: Sequence[str], *arguments: Any, **options: Any
    ) -> None:
        assert options.get("start_new_session")
        self._fork_server = fork_server
        super().__init__(command, *arguments, **options)

    def _execute_child(self, *arguments: Any) -> None:
        """Fork the process, with the parameters of the method that starts one."""
        command, _, _, _, pass_fds, cwd, env = arguments[:7]
        ends = arguments[10:16]  # of stdin, stdout and stderr, in turn theirs and ours or reverse
        standard = [
            number if end == -1 else end for number, end in enumerate((ends[0], ends[3], ends[5]))
        ]
        request = {
            "command": list(command),
            "environment": dict(os.environ if env is None else env),
            "cwd": str(cwd or os.getcwd()),
            "numbers": [0, 1, 2, *pass_fds],
        }
        self.pid = self._fork_server.start(request, [*standard, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*ends)


def stand_in(start: Callable[..., subprocess.Popen[Any]]) -> types.SimpleNamespace:
    """Return the module `subprocess` with another way to start processes."""
    return types.SimpleNamespace(**vars(subprocess) | {"Popen": start})


@contextlib.contextmanager
def _adopting() -> Any:
    """Make this process the parent of descendants whose parents end."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def main() -> None:
    """Import everything and fork processes, until the socket is closed."""
    for name in IMPORTED:
        importlib.import_module(name)
    importlib.import_module("toolkit.cli.root").tree()
    assert len(os.listdir("/proc/self/task")) == 1, "only processes of one thread can be forked"
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _fork_others(socket.socket(fileno=int(sys.argv[1])))


def _fork_others(ours: socket.socket) -> None:
    """Fork a process for each message on the socket, and send its id."""
    _set_title([NURSERY])
    while True:
        message, files, _, _ = socket.recv_fds(ours, MAX_MESSAGE, MAX_FILES)
        if not message:
            return
        # The child of a child that ends gets another parent: the process that asked for it.
        read, write = os.pipe()
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if (pid := os.fork()) != 0:
                os.write(write, str(pid).encode())
                os._exit(0)
            for number in (ours.detach(), read, write):
                os.close(number)
            while os.getppid() == parent:
                time.sleep(0.0002)
            _run(files, **json.loads(message))
        os.close(write)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)
        ours.send(os.read(read, 100))
        os.close(read)


def _run(
    files: list[int],
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    numbers: list[int],
) -> NoReturn:
    """Run `python -m MODULE ARGUMENTS` in this process, which is new."""
    code: object = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # First to numbers that are not among those that they get.
        free = max(*numbers, *files) + 1
        moved = [os.dup2(file, free + i) for i, file in enumerate(files)]
        for file in files:
            os.close(file)
        for file, number in zip(moved, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        # The streams of before would seek, if their files could be sought in.
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        os.chdir(cwd)
        _set_title(command)
        _, flag, module, *arguments = command
        assert flag == "-m"
        if module in HAVE_CHILDREN:
            _fork_own_children(HAVE_CHILDREN[module])
        sys.orig_argv, sys.argv = command, [module, *arguments]
        _set_environment(environment)
        for name in ("toolkit.cli", "toolkit.cli.commands.serve"):
            sys.modules[name].START = time.perf_counter()
        if not hasattr(sys.modules.get(module), "__path__"):  # a package has a module __main__
            sys.modules.pop(module, None)
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
        threading._shutdown()  # as Python does at its end
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code or 0)


def _set_environment(environment: dict[str, str]) -> None:
    """Take the variables, and the path that Python would make of them."""

    def path() -> list[str]:
        return [os.getcwd(), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]

    sys.path = [folder for folder in sys.path if folder not in (OUR_FOLDER, *path())]
    os.environ.clear()
    os.environ.update(environment)
    sys.path = [*path(), *sys.path]
    if "TEST_HOOKS" in environment:
        import tests.inside.sitecustomize  # noqa: F401  # changes modules


OUR_FOLDER = os.getcwd()


def _fork_own_children(modules: Sequence[str]) -> None:
    """Make these modules fork processes, from a copy of this one as it is now."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        kept = theirs.fileno()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        os.closerange(3, kept)
        os.closerange(kept + 1, 2**16)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _fork_others(theirs)
        os._exit(0)
    theirs.close()
    start = functools.partial(ForkedProcess, ForkServer(ours))
    for name in modules:
        importlib.import_module(name).subprocess = stand_in(start)


def _set_title(command: Sequence[str]) -> None:
    """Overwrite the command line that other processes see. Empty arguments follow."""
    with open("/proc/self/stat") as stat:
        start, end = map(int, stat.read().rpartition(")")[2].split()[45:47])
    title = b"".join(word.encode() + b"\0" for word in command)
    assert len(title) < end - start
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title, len(title))


if __name__ == "__main__":
    # Under its own name, so that forked processes find the module's classes once.
    from tests import forked

    forked.main()
