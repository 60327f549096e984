"""Tasks that wait for a worker."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

from toolkit.errors import InvalidParamError, ToolkitError
from toolkit.zygote.lender import Data
from toolkit.zygote.messages import Job


class Task:
    """Data to decode, and the future of the result."""

    is_urgent = False  # before tasks that are not

    def __init__(self, param: str) -> None:
        """`param`: the parameter of the data, for errors."""
        self.future: Future[Any] = Future()
        self._param = param
        self._is_started = False

    def job(self) -> tuple[Job, Data]:
        """Return the message to a worker, and the bytes that follow it. Raises ToolkitError."""
        raise NotImplementedError

    def result(self, answer: Any, data: bytearray | bytes) -> Any:
        """Return the result of the worker's answer and its bytes. Raises ToolkitError."""
        raise NotImplementedError

    def start(self) -> bool:
        """Return False if the task is cancelled. From then on it cannot be."""
        if not self._is_started:
            self._is_started = self.future.set_running_or_notify_cancel()
        return self._is_started

    def refuse(self, error: Exception) -> None:
        """End with an error, unless the task is cancelled."""
        if self.start():
            self.future.set_exception(error)

    def fail(self, problem: str) -> None:
        """End with a problem of the data."""
        self.refuse(InvalidParamError(self._param, problem))


class TaskQueue:
    """Tasks in the order of their arrival.

    `error` is what tasks get once the queue has ended."""

    def __init__(self) -> None:
        self.error: ToolkitError | None = None
        self._tasks: deque[Task] = deque()
        self._changed = threading.Condition()

    def put(self, task: Task) -> None:
        """Append a task. It leaves the queue when its future is cancelled."""
        with self._changed:
            error = self.error
            if error is None:
                self._tasks.append(task)
                self._changed.notify()
        if error is None:
            task.future.add_done_callback(self._remove_cancelled)
        else:
            task.refuse(error)

    def next(self, *, is_awaited: bool = True) -> Task | None:
        """Return the next task. None once the queue has ended, or if there is none now."""
        with self._changed:
            if is_awaited:
                self._changed.wait_for(lambda: self._tasks or self.error)
            return self._tasks.popleft() if self._tasks else None

    def end(self, error: ToolkitError) -> None:
        """Fail all tasks, now and later. The first error stays."""
        with self._changed:
            self.error = self.error or error
            tasks = list(self._tasks)
            self._tasks.clear()
            self._changed.notify_all()
        for task in tasks:
            task.refuse(self.error)

    def _remove_cancelled(self, future: Future[Any]) -> None:
        """Take a cancelled task out of the queue. A closure over its task would be a cycle."""
        if not future.cancelled():
            return
        with self._changed:
            for task in self._tasks:
                if task.future is future:
                    self._tasks.remove(task)
                    return
