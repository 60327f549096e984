"""The zygote: imports what workers need once, forks workers that have it, and lends them.

Its standard input is a socket to the process that started it. It ends when that is closed. Threads
of the server are its clients: one takes a worker, sends it a job, and returns it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from toolkit.hardware.parent import resume_with_parent
from toolkit.imports import without_collection
from toolkit.zygote.messages import (
    Channel,
    Connect,
    End,
    Ended,
    Failed,
    Ready,
    Return,
    Start,
    Take,
    Taken,
    Waiting,
)
from toolkit.zygote.worker import Work, serve

NUM_WORKERS = 2  # of a server: others would take the cores of its other processes
GRACE = 5.0  # seconds for a client to end a worker that has reached its limit of time
NEWS_INTERVAL = 2.0  # seconds between messages to clients that wait
PATIENCE = 5.0  # seconds for a client to finish a message that it has begun


def main() -> None:
    """Serve the server until it closes the socket."""
    control = Channel(socket.socket(fileno=os.dup(0)))
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1):
        os.dup2(nothing, standard)
    resume_with_parent()
    start = control.receive(Start)
    try:
        with _exit_with(control.socket):
            work = _load(start)
    except ImportError as error:
        control.send(Failed(f"{error.name or error} cannot be imported: {error}"))
        return
    except Exception as error:
        control.send(Failed(f"{type(error).__name__}: {error}"))
        return
    os.dup2(nothing, 2)
    control.send(Ready())
    zygote = _Zygote(control, work, start.timeout)
    try:
        with contextlib.suppress(EOFError, OSError):
            zygote.run()
    finally:
        zygote.end_all()


@dataclass(eq=False, slots=True)
class _Child:
    """A worker. Not waited for until it is killed, so its id is not used again."""

    pid: int
    end: socket.socket

    @property
    def is_usable(self) -> bool:
        """False if it has ended. Nor may it send what it was not asked for."""
        try:
            self.end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def kill(self) -> int:
        """End the process. Returns its exit code, negative for a signal."""
        self.end.close()
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
            _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


@dataclass(eq=False, slots=True)
class _Client:
    """A thread of the server that takes a worker at a time."""

    channel: Channel
    child: _Child | None = None  # that it has taken
    deadline: float = 0.0  # to return it
    exit_code: int = 0  # of one that it has not returned in time


class _Zygote:
    """Lends NUM_WORKERS workers in the order of requests, but first to those that are urgent.

    A worker whose client is lost is in the middle of a job, and is killed."""

    def __init__(self, control: Channel, work: Work, timeout: float) -> None:
        self._control, self._work, self._timeout = control, work, timeout
        self._idle: list[_Child] = []
        self._clients: set[_Client] = set()
        self._waiting: dict[bool, deque[_Client]] = {True: deque(), False: deque()}
        """Clients by whether they are urgent."""
        self._events = selectors.DefaultSelector()
        self._events.register(control.socket, selectors.EVENT_READ)
        self._next_news = 0.0

    def run(self) -> None:
        """Serve the clients until the control socket is closed: raises EOFError or OSError."""
        self._fill()
        while True:
            for key, _ in self._events.select(self._patience):
                if key.data is None:
                    self._adopt()
                else:
                    self._hear(key.data)
            self._end_overdue()
            self._lend()
            self._send_news()

    def end_all(self) -> None:
        for child in (*self._idle, *self._lent):
            os.kill(child.pid, signal.SIGKILL)

    @property
    def _lent(self) -> list[_Child]:
        return [one.child for one in self._clients if one.child is not None]

    @property
    def _patience(self) -> float | None:
        """Seconds to wait for messages."""
        return NEWS_INTERVAL if any(self._waiting.values()) or self._lent else None

    def _adopt(self) -> None:
        _, end = self._control.receive_with_socket(Connect)
        self._control.send(Ready())
        assert end is not None
        client = _Client(Channel(end))
        self._clients.add(client)
        self._events.register(end, selectors.EVENT_READ, client)
        self._send(client, Ready())

    def _hear(self, client: _Client) -> None:
        try:
            message = client.channel.receive(Take | Return | End, time.monotonic() + PATIENCE)
        except (OSError, EOFError):
            self._drop(client)
            return
        if isinstance(message, Take):
            self._waiting[message.is_urgent].append(client)
        elif isinstance(message, Return):
            if client.child is not None:
                self._idle.append(client.child)
                client.child = None
        else:
            if client.child is not None:
                self._kill(client)
            self._send(client, Ended(client.exit_code))
            self._fill()

    def _drop(self, client: _Client) -> None:
        """Forget a client whose connection has ended."""
        if client not in self._clients:
            return
        self._clients.remove(client)
        self._events.unregister(client.channel.socket)
        client.channel.close()
        for waiting in self._waiting.values():
            if client in waiting:
                waiting.remove(client)
        if client.child is not None:
            self._kill(client)
            self._fill()

    def _send(
        self, client: _Client, message: msgspec.Struct, descriptors: tuple[int, ...] = ()
    ) -> None:
        try:
            client.channel.send(
                message, descriptors=descriptors, deadline=time.monotonic() + PATIENCE
            )
        except OSError:
            self._drop(client)

    def _kill(self, client: _Client) -> None:
        """End the worker that a client has taken."""
        assert client.child is not None
        client.exit_code = client.child.kill()
        client.child = None

    def _end_overdue(self) -> None:
        """End workers whose clients did not end them in time."""
        now = time.monotonic()
        for client in self._clients:
            if client.child is not None and now > client.deadline:
                self._kill(client)

    def _lend(self) -> None:
        """Lend workers that are idle. Refuse clients if there is none and none can be forked."""
        while waiting := self._waiting[True] or self._waiting[False]:
            while self._idle and not self._idle[-1].is_usable:
                self._idle.pop().kill()
            problem = "" if self._idle else self._fill()
            if not self._idle and not problem:
                return
            client = waiting.popleft()
            if problem:
                self._send(client, Failed(problem))
                continue
            client.child = self._idle.pop()
            client.deadline = time.monotonic() + self._timeout + GRACE
            self._send(client, Taken(), (client.child.end.fileno(),))

    def _send_news(self) -> None:
        """Let clients that wait know that this process does not hang."""
        if (now := time.monotonic()) < self._next_news:
            return
        self._next_news = now + NEWS_INTERVAL
        for client in (*self._waiting[True], *self._waiting[False]):
            self._send(client, Waiting())

    def _fill(self) -> str:
        """Fork workers until there are NUM_WORKERS. Returns the problem if there is none at all."""
        num_missing = NUM_WORKERS - len(self._idle) - len(self._lent)
        for _ in range(num_missing):
            try:
                self._idle.append(self._fork())
            except OSError as error:
                is_any = self._idle or self._lent
                return "" if is_any else f"no process can be started: {error.strerror}"
        return ""

    def _fork(self) -> _Child:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                pid = os.fork()
            except OSError:
                ours.close()
                raise
            if pid == 0:
                serve(theirs, self._work)
        return _Child(pid, ours)


def _load(start: Start) -> Work:
    """Import what the workers need."""
    with without_collection():
        work: Work = importlib.import_module(start.module).load(start.settings)
    gc.freeze()
    return work


@contextlib.contextmanager
def _exit_with(end: socket.socket) -> Iterator[None]:
    """Exit when the other end of a socket is closed. The thread that sees it ends at the exit."""
    stop, stopped = os.pipe()

    def wait() -> None:
        ready, _, _ = select.select([end.fileno(), stop], [], [])
        if end.fileno() in ready:
            os._exit(1)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield
    finally:
        os.close(stopped)
        thread.join()
        os.close(stop)


if __name__ == "__main__":
    main()
