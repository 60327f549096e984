"""Ranks and engine cores of tests, forked from a process that has imported PyTorch already.

The import takes two seconds of CPU time. The processes run the same module with the same arguments,
environment and files. Tests of servers start theirs as users do."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, NoReturn

MAX_MESSAGE = 2**17
MAX_FILES = 8


class ForkServer:
    """The process that forks the others. It ends with this object's process."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._started: list[int] = []  # process ids
        self._codes: dict[int, int] = {}  # exit codes by process id
        threading.Thread(target=self._read, daemon=True, name="fork-server").start()

    def start(self, request: Mapping[str, object], files: list[int]) -> int:
        """Fork a process and return its id. Its first three files are the standard ones."""
        with self._starting:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            with self._changed:
                assert self._changed.wait_for(lambda: self._started, 60), "no process was forked"
                pid = self._started.pop()
                self._codes.pop(pid, None)
        return pid

    def code(self, pid: int, timeout: float | None) -> int | None:
        """Wait for a process; return its exit code, or None if it still runs."""
        with self._changed:
            self._changed.wait_for(lambda: pid in self._codes, timeout)
            return self._codes.get(pid)

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self.process.wait()

    def _read(self) -> None:
        while message := self._socket.recv(MAX_MESSAGE):
            pid, code = json.loads(message)
            with self._changed:
                if code is None:
                    self._started.append(pid)
                else:
                    self._codes[pid] = code
                self._changed.notify_all()


class ForkedProcess:
    """The part of `subprocess.Popen` that ranks and cores need."""

    def __init__(
        self,
        fork_server: ForkServer,
        command: Sequence[str],
        *,
        stdin: int,
        start_new_session: bool,
        pass_fds: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        assert stdin == subprocess.PIPE
        assert start_new_session
        self._server = fork_server
        request = {
            "command": list(command),
            "environment": dict(os.environ if env is None else env),
            "cwd": os.getcwd(),
            "numbers": [0, 1, 2, *pass_fds],
        }
        theirs, ours = os.pipe()
        self.pid = fork_server.start(request, [theirs, 1, 2, *pass_fds])
        os.close(theirs)
        self.stdin: IO[bytes] = os.fdopen(ours, "wb", buffering=0)

    def poll(self) -> int | None:
        return self._server.code(self.pid, 0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._server.code(self.pid, timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def main() -> None:
    """Fork a process for each message on the socket. Report their ids, and then their ends."""
    import toolkit.engine.core
    import toolkit.executor.rank
    import toolkit.worker.worker  # noqa: F401  # what they import

    gc.collect()
    gc.freeze()
    ours = socket.socket(fileno=int(sys.argv[1]))
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(wakes)
    while True:
        readable, _, _ = select.select([ours, ended], [], [])
        if ended in readable:
            os.read(ended, 1024)
            for pid, code in _reap():
                ours.send(json.dumps([pid, code]).encode())
        if ours in readable:
            message, files, _, _ = socket.recv_fds(ours, MAX_MESSAGE, MAX_FILES)
            if not message:
                return
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for number in (ours.detach(), ended, wakes):
                    os.close(number)
                _run(files, **json.loads(message))
            for file in files:
                os.close(file)
            ours.send(json.dumps([pid, None]).encode())


def _reap() -> Iterator[tuple[int, int]]:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def _run(
    files: list[int],
    command: list[str],
    environment: dict[str, str],
    cwd: str,
    numbers: list[int],
) -> NoReturn:
    """Run `python -m MODULE ARGUMENTS` in this process, which is new."""
    code = 1
    try:
        os.setsid()
        # First to numbers that are not among those that they get.
        free = max(*numbers, *files) + 1
        moved = [os.dup2(file, free + i) for i, file in enumerate(files)]
        for file in files:
            os.close(file)
        for file, number in zip(moved, numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(environment)
        if "TEST_HOOKS" in environment:
            import tests.inside.sitecustomize  # noqa: F401  # changes modules
        _, flag, module, *arguments = command
        assert flag == "-m"
        sys.orig_argv, sys.argv = command, [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
