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
    was_lost: bool = False  # with a zygote that died

    def fail(self, problem: str) -> None:
        self.future.set_exception(InvalidParamError(self.param, problem))

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
    """Tasks in the order of their arrival, but those that only measure first.

    `error` is what tasks get once the queue has ended."""

    def __init__(self) -> None:
        self.error: ToolkitError | None = None
        self._measured: deque[Task] = deque()
        self._processed: deque[Task] = deque()
        self._changed = threading.Condition()

    def put(self, task: Task) -> None:
        """Append a task. It leaves the queue when its future is cancelled."""
        self._add(task)
        task.future.add_done_callback(self._remove_cancelled)

    def put_back(self, task: Task) -> None:
        """Let a task be the next: its worker ended with the zygote."""
        task.was_lost = True
        self._add(task)

    def next(self) -> Task | None:
        """Wait for a task, which cannot be cancelled then. None once the queue has ended."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._measured or self._processed or self.error)
                if self.error is not None:
                    return None
                task = (self._measured or self._processed).popleft()
                if task.was_lost or task.future.set_running_or_notify_cancel():
                    return task

    def end(self, error: ToolkitError) -> None:
        """Fail all tasks, now and later. The first error stays."""
        with self._changed:
            self.error = self.error or error
            tasks = [*self._measured, *self._processed]
            self._measured.clear()
            self._processed.clear()
            self._changed.notify_all()
        for task in tasks:
            if task.was_lost or task.future.set_running_or_notify_cancel():
                task.future.set_exception(self.error)

    def _add(self, task: Task) -> None:
        with self._changed:
            if self.error is None:
                tasks = self._measured if task.is_measured else self._processed
                if task.was_lost:
                    tasks.appendleft(task)
                else:
                    tasks.append(task)
                self._changed.notify()
                return
        task.future.set_exception(self.error)

    def _remove_cancelled(self, future: Future[Any]) -> None:
        """Take a cancelled picture out of the queue. A closure over its task would be a cycle."""
        if not future.cancelled():
            return
        with self._changed:
            for tasks in (self._measured, self._processed):
                for task in tasks:
                    if task.future is future:
                        tasks.remove(task)
                        return
