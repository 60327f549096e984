"""A process that imports the image processor once, and forks workers that have it.

Its standard input is a socket to the server. It ends when that is closed."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import select
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from toolkit.hardware.parent import resume_with_parent
from toolkit.imports import without_collection
from toolkit.pictures.messages import Channel, End, Ended, Failed, Fork, Forked, Ready, Start

if TYPE_CHECKING:
    from toolkit.pictures.processor import PictureProcessor

_HIDDEN = {"torch", "torchvision", "jax", "tensorflow"}


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
            processor = _load(start)
    except ImportError as error:
        control.send(Failed(f"{error.name or error} cannot be imported: {error}"))
        return
    except Exception as error:
        control.send(Failed(f"{type(error).__name__}: {error}"))
        return
    os.dup2(nothing, 2)
    control.send(Ready())
    zygote = _Zygote(control, processor, start)
    try:
        with contextlib.suppress(EOFError, OSError):
            zygote.run()
    finally:
        zygote.end_all()


class _Zygote:
    def __init__(self, control: Channel, processor: PictureProcessor, start: Start) -> None:
        self._control, self._processor, self._start = control, processor, start
        self._children: set[int] = set()  # not waited for, so their ids are not used again

    def run(self) -> None:
        while True:
            message = self._control.receive(Fork | End)
            if isinstance(message, Fork):
                self._fork()
            else:
                self._control.send(Ended(self._end(message.pid)))

    def end_all(self) -> None:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)

    def _fork(self) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                pid = os.fork()
            except OSError as error:
                self._control.send(Failed(f"no process can be started: {error.strerror}"))
                return
            if pid == 0:
                from toolkit.pictures.worker import serve

                serve(theirs, self._processor, self._start.limits)
            self._children.add(pid)
            self._control.send(Forked(pid), descriptors=(ours.fileno(),))

    def _end(self, pid: int) -> int:
        """Return the exit code, negative for a signal."""
        self._children.remove(pid)
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)


def _load(start: Start) -> PictureProcessor:
    """Import the processor, and use it once: it imports more then."""
    with without_collection(), _without_torch():
        from PIL import Image

        from toolkit.pictures import worker  # noqa: F401  (for the forked processes)
        from toolkit.pictures.processor import PictureProcessor

        processor = PictureProcessor(start.settings)
        processor.process(Image.new("RGB", (64, 64)))
    gc.freeze()
    return processor


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Import Transformers as if PyTorch was not installed.

    Pillow's image processors do not need it. It would take 4 seconds and 380 MB."""
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in _HIDDEN else found(name, package)

    importlib.util.find_spec = find_spec
    try:
        yield
    finally:
        importlib.util.find_spec = found


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
