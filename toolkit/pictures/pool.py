"""Processes that turn pictures into pixels, as the server and the offline engine use them."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from concurrent.futures import Future

import msgspec

from toolkit.errors import EngineError, InvalidParamError, ServerUnavailableError, ToolkitError
from toolkit.pictures.keeper import RemoteKeeper, ZygoteKeeper
from toolkit.pictures.messages import Refused, Start
from toolkit.pictures.processes import Lender, Worker, WorkerLostError
from toolkit.pictures.settings import PictureLimits, ProcessorSettings
from toolkit.pictures.sources import Encoded
from toolkit.pictures.tasks import Task, TaskQueue
from toolkit.pictures.zygote import NUM_WORKERS

_log = logging.getLogger(__name__)
MAX_TRIES = 2  # of a picture whose zygote ends
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
    """Decodes pictures with workers, each one at a time.

    Threads take workers from the zygote, which lends them for sizes before pixels. So two threads
    are for sizes only."""

    def __init__(
        self, settings: ProcessorSettings, limits: PictureLimits, keeper_path: str = ""
    ) -> None:
        """`keeper_path`: socket of the `KeeperServer` whose zygote to use, not one of this pool."""
        self._limits = limits
        start = Start(settings, limits)
        self._keeper = RemoteKeeper(keeper_path, start) if keeper_path else ZygoteKeeper(start)
        self._sizes, self._pixels = TaskQueue(), TaskQueue()
        self._started = threading.Event()  # it is ready, or was not at first
        self._problem: ToolkitError | None = None  # why there was no zygote at first
        self._lenders: list[Lender] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the zygote and return at once."""
        self._keeper.start()
        for tasks, name in ((self._sizes, "sizes"), (self._pixels, "pixels")):
            for number in range(NUM_WORKERS):
                lender = Lender(self._keeper)
                self._lenders.append(lender)
                self._threads.append(
                    threading.Thread(
                        target=self._serve,
                        args=(tasks, lender),
                        name=f"{name}-{number}",
                        daemon=True,
                    )
                )
        for thread in self._threads:
            thread.start()

    def wait_ready(self) -> None:
        """Wait until the image processor is imported. Raises ToolkitError if it cannot be."""
        self._started.wait()
        if (problem := self._pixels.error or self._problem) is not None:
            raise problem

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, whose children are the workers. 0 if it is not the pool's."""
        return self._keeper.pid

    def measure(self, encoded: Encoded, param: str) -> Future[tuple[int, int]]:
        """Read (width, height) after EXIF rotation from the header.

        The future's errors: InvalidRequestError, ServerUnavailableError, EngineError."""
        future: Future[tuple[int, int]] = Future()
        if (size := encoded.raw_size) is None:
            self._sizes.put(Task(encoded, param, True, future))
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
            self._pixels.put(Task(encoded, param, False, future))
        return future

    def close(self) -> None:
        """End all processes of the pool. Pictures that are not done get an error."""
        self._fail(ServerUnavailableError("The server is shutting down."))
        self._keeper.close()
        for lender in self._lenders:
            lender.close()
        for thread in self._threads:
            thread.join()

    def _serve(self, tasks: TaskQueue, lender: Lender) -> None:
        """Run tasks until the pool is closed. Another error is a bug, and ends the pool."""
        try:
            self._connect(lender)
            while (task := self._next(tasks, lender)) is not None:
                try:
                    self._run(lender, task)
                except Exception as error:
                    task.refuse(error)
                    raise
                del task  # a picture's bytes are not held while this thread waits
        except Exception as error:
            _log.exception("Pictures are not decoded any more: internal error")
            self._fail(EngineError(f"Pictures are not decoded any more: internal error ({error})"))
        finally:
            lender.disconnect()

    def _connect(self, lender: Lender) -> None:
        """Connect to the zygote, so that the first picture does not wait for it."""
        try:
            lender.connect()
            self._problem = None
        except EngineError as error:
            self._fail(error)
        except ServerUnavailableError as error:  # the next task tries again
            self._problem = error
        self._started.set()

    def _next(self, tasks: TaskQueue, lender: Lender) -> Task | None:
        """Wait for a task. Its worker is the last one, if that was taken just now."""
        if lender.keeps_worker and (task := tasks.next(is_awaited=False)) is not None:
            return task
        lender.give_back()
        return tasks.next()

    def _run(self, lender: Lender, task: Task) -> None:
        """Run a task, once more if it was lost with the zygote."""
        for _ in range(MAX_TRIES):
            try:
                worker = lender.take(is_measured=task.is_measured)
            except EngineError as error:
                self._fail(error)
                task.refuse(error)
                return
            except ToolkitError as error:
                task.refuse(self._pixels.error or error)
                return
            if not task.start():
                return
            if self._ask(lender, worker, task):
                return
        task.fail(f"cannot be decoded: the process that decoded it ended {MAX_TRIES} times")

    def _ask(self, lender: Lender, worker: Worker, task: Task) -> bool:
        """Let a worker run a task. Returns False if the zygote ended meanwhile."""
        job, data = task.job()
        try:
            answer, pixels = worker.ask(job, data, self._limits.timeout)
        except TimeoutError:
            lender.end()
            task.fail(f"takes longer than {self._limits.timeout:g} seconds to decode")
            return True
        except WorkerLostError:
            exit_code = lender.end()
            if exit_code is None:
                return False
            task.fail(f"cannot be decoded: the process that decoded it {_ended(exit_code)}")
            return True
        if answer.is_last:
            lender.end()
        if isinstance(answer, Refused):
            task.fail(answer.problem[:MAX_PROBLEM])
        elif task.is_measured:
            task.future.set_result((answer.width, answer.height))
        else:
            task.future.set_result(
                Pixels(answer.width, answer.height, answer.grid, answer.shape, answer.dtype, pixels)
            )
        return True

    def _fail(self, error: ToolkitError) -> None:
        """Refuse all pictures from now on."""
        self._sizes.end(error)
        self._pixels.end(error)
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
