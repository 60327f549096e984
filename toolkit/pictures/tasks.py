"""Pictures that wait for a worker."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from toolkit.errors import InvalidParamError, ToolkitError
from toolkit.pictures.messages import Job
from toolkit.pictures.sources import Encoded


@dataclass(eq=False, slots=True)
class Task:
    """A picture to process, or only to measure."""

    encoded: Encoded
    param: str
    is_measured: bool
    future: Future[Any]
    is_started: bool = False

    def start(self) -> bool:
        """Return False if the picture is cancelled. From then on it cannot be."""
        if not self.is_started:
            self.is_started = self.future.set_running_or_notify_cancel()
        return self.is_started

    def refuse(self, error: Exception) -> None:
        """End with an error, unless the picture is cancelled."""
        if self.start():
            self.future.set_exception(error)

    def fail(self, problem: str) -> None:
        """End with a problem of the picture."""
        self.refuse(InvalidParamError(self.param, problem))

    def job(self) -> tuple[Job, bytes]:
        """Return the message to a worker, and the bytes that follow it."""
        data, size = self.encoded.data, self.encoded.raw_size
        if isinstance(data, str):
            data = data.encode(errors="surrogatepass")
            return Job("base64", len(data), is_measured=self.is_measured), data
        if size is not None:
            return Job("rgb", len(data), size, self.is_measured), data
        return Job("file", len(data), is_measured=self.is_measured), data


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
        """Take a cancelled picture out of the queue. A closure over its task would be a cycle."""
        if not future.cancelled():
            return
        with self._changed:
            for task in self._tasks:
                if task.future is future:
                    self._tasks.remove(task)
                    return
