"""Processes that turn pictures into pixels, as the server and the offline engine use them."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections import deque
from concurrent.futures import Future

import msgspec

from toolkit.errors import EngineError, InvalidParamError, ServerUnavailableError, ToolkitError
from toolkit.pictures.messages import Refused
from toolkit.pictures.processes import Worker, WorkerLostError, Zygote, ZygoteLostError
from toolkit.pictures.settings import PictureLimits, ProcessorSettings
from toolkit.pictures.sources import Encoded
from toolkit.pictures.tasks import Task, TaskQueue

_log = logging.getLogger(__name__)
MAX_STARTS = 4  # of the zygote, in START_WINDOW
START_WINDOW = 600.0  # seconds
MAX_PROBLEM = 1000  # characters of a worker's message


class Pixels(msgspec.Struct, frozen=True):
    """A picture for the vision tower."""

    width: int  # of the picture, after EXIF rotation
    height: int
    grid: tuple[int, ...]  # what the processor made of it, e.g. (1, rows, columns) of patches
    shape: tuple[int, ...]
    dtype: str  # "uint8" or "float32"
    data: bytes


class PicturePool:
    """Two workers, or another number, that decode pictures one at a time each.

    Each has a thread here, which starts it again after it has ended. Sizes are measured before
    pictures that wait are processed."""

    def __init__(
        self, settings: ProcessorSettings, limits: PictureLimits, num_workers: int = 2
    ) -> None:
        self._settings, self._limits, self._num_workers = settings, limits, num_workers
        self._zygote: Zygote | None = None
        self._zygote_lock = threading.Lock()
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._tasks = TaskQueue()
        self._is_ready = False
        self._started = threading.Event()  # it is ready, or will never be
        self._last_words = ""  # of the last zygote that ended
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the zygote and return at once."""
        self._zygote = self._start_zygote()
        self._threads = [
            threading.Thread(target=self._serve, name=f"pictures-{number}", daemon=True)
            for number in range(self._num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait until the image processor is imported. Raises ToolkitError if it cannot be."""
        self._started.wait()
        if self._tasks.error is not None:
            raise self._tasks.error

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, whose children are the workers. 0 before `start`."""
        return self._zygote.pid if self._zygote else 0

    def measure(self, encoded: Encoded, param: str) -> Future[tuple[int, int]]:
        """Read (width, height) after EXIF rotation from the header.

        The future's errors: InvalidRequestError, ServerUnavailableError, EngineError."""
        future: Future[tuple[int, int]] = Future()
        if (size := encoded.raw_size) is None:
            self._tasks.put(Task(encoded, param, True, future))
        elif size[0] * size[1] > self._limits.max_pixels:
            future.set_exception(self._too_large(param, size))
        else:
            future.set_result(size)
        return future

    def process(self, encoded: Encoded, param: str) -> Future[Pixels]:
        """Decode and resize a picture. The future's errors are those of `measure`."""
        future: Future[Pixels] = Future()
        size = encoded.raw_size
        if size is not None and size[0] * size[1] > self._limits.max_pixels:
            future.set_exception(self._too_large(param, size))
        else:
            self._tasks.put(Task(encoded, param, False, future))
        return future

    def close(self) -> None:
        """End all processes. Pictures that are not done get an error."""
        self._fail(ServerUnavailableError("The server is shutting down."))
        with self._zygote_lock:
            if self._zygote is not None:
                self._zygote.close()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Run tasks until the pool is closed. Another error is a bug, and ends the pool."""
        try:
            self._run_all()
        except Exception as error:
            _log.exception("Pictures are not decoded any more: internal error")
            self._fail(EngineError(f"Pictures are not decoded any more: internal error ({error})"))

    def _run_all(self) -> None:
        worker: Worker | None = None
        while True:
            try:
                worker = self._usable(worker)
            except ServerUnavailableError:
                worker = None  # the next task tries again
            except ToolkitError:
                return  # `_fail` has reported it
            if (task := self._tasks.next()) is None:
                return
            try:
                worker = self._run(worker, task)
            except Exception as error:
                task.future.set_exception(error)
                raise
            del task  # a picture's bytes are not held while this thread waits

    def _run(self, worker: Worker | None, task: Task) -> Worker | None:
        """Run a task. Returns the worker if it can take another."""
        try:
            worker = self._usable(worker)
        except ToolkitError as error:
            task.future.set_exception(error)
            return None
        job, data = task.job()
        try:
            answer, pixels = worker.ask(job, data, self._limits.timeout)
        except TimeoutError:
            worker.end()
            task.fail(f"takes longer than {self._limits.timeout:g} seconds to decode")
            return None
        except WorkerLostError:
            exit_code = worker.end()
            if exit_code is not None:
                task.fail(f"cannot be decoded: the process that decoded it {_ended(exit_code)}")
            elif task.was_lost:
                task.fail("cannot be decoded: the process that decoded it ended twice")
            else:
                self._tasks.put_back(task)
            return None
        if isinstance(answer, Refused):
            task.fail(answer.problem[:MAX_PROBLEM])
        elif task.is_measured:
            task.future.set_result((answer.width, answer.height))
        else:
            task.future.set_result(
                Pixels(answer.width, answer.height, answer.grid, answer.shape, answer.dtype, pixels)
            )
        if answer.is_last:
            worker.end()
            return None
        return worker

    def _usable(self, worker: Worker | None) -> Worker:
        """Return the worker, or another if it has ended. Raises ToolkitError."""
        if worker is not None:
            if not worker.has_ended:
                return worker
            worker.end()
        while True:
            zygote = self._living_zygote()
            try:
                worker = zygote.fork()
            except ZygoteLostError as error:
                self._last_words = str(error)
                continue
            except EngineError as error:
                self._fail(error)
                raise
            self._is_ready = True
            self._started.set()
            return worker

    def _living_zygote(self) -> Zygote:
        with self._zygote_lock:
            if self._tasks.error is not None:
                raise self._tasks.error
            if self._zygote is not None and self._zygote.is_lost:
                self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = self._start_zygote()
            return self._zygote

    def _start_zygote(self) -> Zygote:
        """Start a zygote, unless the last few have ended too soon."""
        now = time.monotonic()
        if len(self._starts) == MAX_STARTS and now - self._starts[0] < START_WINDOW:
            error = ServerUnavailableError(
                f"The process that decodes pictures ended {MAX_STARTS} times within "
                f"{START_WINDOW / 60:g} minutes ({self._last_words})."
            )
            if not self._is_ready:
                self._fail(error)
            raise error
        self._starts.append(now)
        return Zygote(self._settings, self._limits)

    def _fail(self, error: ToolkitError) -> None:
        """Refuse all pictures from now on."""
        self._tasks.end(error)
        self._started.set()

    def _too_large(self, param: str, size: tuple[int, int]) -> InvalidParamError:
        most = self._limits.max_pixels
        return InvalidParamError(
            param, f"is a picture of {size[0]} x {size[1]} pixels; at most {most:,} are allowed"
        )


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"
