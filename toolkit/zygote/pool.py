"""Workers of a zygote, as the server and the offline engine use them."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Sequence

from toolkit.errors import EngineError, ServerUnavailableError, ToolkitError
from toolkit.zygote.keeper import RemoteKeeper, ZygoteKeeper
from toolkit.zygote.lender import Lender, Worker, WorkerLostError
from toolkit.zygote.messages import Answer, Refused, Start
from toolkit.zygote.process import NUM_WORKERS
from toolkit.zygote.tasks import Task, TaskQueue

_log = logging.getLogger(__name__)
MAX_TRIES = 2  # of a task whose zygote ends
MAX_PROBLEM = 1000  # characters of a worker's message


class WorkerPool:
    """Runs tasks with workers, each one at a time, from one or more queues.

    Threads take workers from the zygote, two for each queue."""

    def __init__(self, start: Start, names: Sequence[str], keeper_path: str = "") -> None:
        """names: of the queues. `keeper_path`: socket of the `KeeperServer` whose zygote to use,
        not one of this pool."""
        self._start = start
        self._keeper = RemoteKeeper(keeper_path, start) if keeper_path else ZygoteKeeper(start)
        self._queues = {name: TaskQueue() for name in names}
        self._started = threading.Event()  # it is ready, or was not at first
        self._problem: ToolkitError | None = None  # why there was no zygote at first
        self._error: ToolkitError | None = None  # of all tasks from now on
        self._lenders: list[Lender] = []
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the zygote and return at once."""
        self._keeper.start()
        for name, tasks in self._queues.items():
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
        """Wait until the zygote is ready. Raises ToolkitError if it cannot be."""
        self._started.wait()
        if (problem := self._error or self._problem) is not None:
            raise problem

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, whose children are the workers. 0 if it is not the pool's."""
        return self._keeper.pid

    def put(self, name: str, task: Task) -> None:
        """Run a task, after those that are in the queue of this name.

        The future's errors: InvalidRequestError, ServerUnavailableError, EngineError."""
        self._queues[name].put(task)

    def close(self) -> None:
        """End all processes of the pool. Tasks that are not done get an error."""
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
                del task  # its bytes are not held while this thread waits
        except Exception as error:
            message = f"No more {self._start.subject} are decoded: internal error"
            _log.exception(message)
            self._fail(EngineError(f"{message} ({error})"))
        finally:
            lender.disconnect()

    def _connect(self, lender: Lender) -> None:
        """Connect to the zygote, so that the first task does not wait for it."""
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
                worker = lender.take(is_urgent=task.is_urgent)
            except EngineError as error:
                self._fail(error)
                task.refuse(error)
                return
            except ToolkitError as error:
                task.refuse(self._error or error)
                return
            if not task.start():
                return
            if self._ask(lender, worker, task):
                return
        task.fail(f"cannot be decoded: the process that decoded it ended {MAX_TRIES} times")

    def _ask(self, lender: Lender, worker: Worker, task: Task) -> bool:
        """Let a worker run a task. Returns False if the zygote ended meanwhile."""
        try:
            job, data = task.job()
        except ToolkitError as error:
            task.refuse(error)
            return True
        try:
            answer, found = worker.ask(job, data, self._start.timeout)
        except TimeoutError:
            lender.end()
            task.fail(f"takes longer than {self._start.timeout:g} seconds to decode")
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
        else:
            _finish(task, answer, found)
        return True

    def _fail(self, error: ToolkitError) -> None:
        """Refuse all tasks from now on. The first error stays."""
        self._error = self._error or error
        for tasks in self._queues.values():
            tasks.end(error)
        self._started.set()


def _finish(task: Task, answer: Answer, data: bytearray | bytes) -> None:
    try:
        result = task.result(answer, data)
    except ToolkitError as error:
        task.refuse(error)
    else:
        task.future.set_result(result)


def _ended(exit_code: int) -> str:
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-exit_code).name}"
    return f"was ended by signal {-exit_code}"
