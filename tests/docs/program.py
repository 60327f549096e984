"""The program `tk` of shells. It is forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.forked import MAX_FILES, ForkServer, shared

NEW = '#!/bin/sh\nexec "{python}" -m toolkit "$@"\n'
ASKING = """#!{python} -IS
import json, os, socket, sys
files = [0, 1, 2]
for number in map(int, os.listdir("/dev/fd")):  # <(COMMAND) is one of these
    try:
        files += [number] if number > 2 and os.get_inheritable(number) else []
    except OSError:
        pass
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
request = json.dumps([sys.argv[1:], files, os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [request], files)
for number in files:  # else readers and writers of pipes would wait for their ends
    os.close(number)
os._exit(int(server.recv(100)))
"""
"""Sends its arguments and files to the test process, and waits for the exit code."""
MAX_REQUEST = 2**17


@contextlib.contextmanager
def installed_tk(folder: Path) -> Iterator[None]:
    """Write the program `tk` into a folder, and serve it."""
    program, fork_server = folder / "tk", shared()
    if fork_server is None:
        program.write_text(NEW.format(python=sys.executable))
        program.chmod(0o755)
        yield
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path := str(folder / "socket"))
        listener.listen()
        program.write_text(ASKING.format(python=sys.executable, path=path))
        program.chmod(0o755)
        threading.Thread(target=_accept, args=(listener, fork_server), daemon=True).start()
        yield
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, fork_server: ForkServer) -> None:
    """Serve until the listener is shut down."""
    with contextlib.suppress(OSError):
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_run, args=(client, fork_server), daemon=True).start()


def _run(client: socket.socket, fork_server: ForkServer) -> None:
    """Fork the process that a program asks for, and send its exit code."""
    with client:
        message, files, _, _ = socket.recv_fds(client, MAX_REQUEST, MAX_FILES)
        arguments, numbers, folder, environment = msgspec.json.decode(message)
        request = {
            "command": [sys.executable, "-m", "toolkit", *arguments],
            "environment": environment,
            "cwd": folder,
            "numbers": numbers,
        }
        pid = fork_server.start(request, files)
        for file in files:
            os.close(file)
        _, status = os.waitpid(pid, 0)
        client.send(str(os.waitstatus_to_exitcode(status)).encode())
