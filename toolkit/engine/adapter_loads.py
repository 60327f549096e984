"""Adapters in the memory of a core's workers, and the requests that wait for one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

from toolkit.engine.messages import Operate, OperationResult
from toolkit.errors import CheckpointError, ToolkitError
from toolkit.lora.files import find_adapter
from toolkit.scheduler import Request
from toolkit.scheduler.places import Places
from toolkit.sequence import Adapter
from toolkit.worker.operations import LoadAdapter, Operation, UnloadAdapter

WAIT_SECONDS = 0.002  # longest wait for an adapter, in seconds, if the engine has no other work

Waiter = Request | Operate  # what an adapter is read for


class AdapterLoads:
    """Has adapters read before their requests run, and dropped when others need the memory.

    Requests that wait add no cost to a step: a callback reports the end of an operation."""

    def __init__(
        self,
        operate: Callable[[Operation], Future[None]],
        max_adapters: int,
        loaded: Iterable[Adapter],
    ) -> None:
        self._operate = operate
        self._places = Places[Waiter](max_adapters)
        self._adapters: dict[str, Adapter] = {}  # those in places, by key
        self._reading: dict[str, list[Waiter]] = {}
        self._ended: deque[tuple[str, str | None]] = deque()
        """Keys of adapters that were read, and errors. Threads append to it."""
        self._has_ended = threading.Event()
        self._users: dict[Request, str] = {}  # requests that hold a place, and the keys
        self._unwanted: set[str] = set()  # keys to drop when no request uses them
        self._ready: list[Request] = []
        self._failed: dict[Request, str] = {}
        self._results: list[tuple[int, OperationResult]] = []
        for adapter in loaded:
            self._adapters[adapter.key] = adapter
            self._places.enter(adapter.key)
            self._places.leave(adapter.key)

    @property
    def names(self) -> list[str]:
        """Names of the adapters in memory, and of those that are being read."""
        return [adapter.name for adapter in self._adapters.values()]

    @property
    def has_work(self) -> bool:
        """True if something is being read, or waits for memory or to be answered."""
        return bool(self._reading or self._results or self._places.has_waiting)

    def add(self, request: Request) -> None:
        """Take a request. `pop_ready` returns it once its adapter is in memory."""
        self._enter(request)

    def operate(self, asked: Operate) -> None:
        """Do an operation. `pop_results` returns the answer."""
        if isinstance(asked.operation, LoadAdapter):
            self._enter(asked)
            return
        key = asked.operation.adapter.key
        if key in self._adapters:
            self._unwanted.add(key)
            self._drop_unwanted(key)
        self._answer(asked)

    def leave(self, request: Request) -> None:
        """Note that a request has ended."""
        key = self._users.pop(request, None)
        if key is not None:
            self._places.leave(key)
            self._drop_unwanted(key)

    def pop_ready(self) -> list[Request]:
        """Return requests whose adapters are in memory now."""
        while self._ended:
            self._end(*self._ended.popleft())
        for waiter in self._places.take_waiting():
            self._enter(waiter)
        ready, self._ready = self._ready, []
        return ready

    def pop_failed(self) -> list[tuple[Request, str]]:
        """Return (request, reason) for adapters that could not be read since the last call."""
        failed, self._failed = self._failed, {}
        return [(request, reason) for request, reason in failed.items() if not request.is_finished]

    def pop_results(self) -> list[tuple[int, OperationResult]]:
        """Return the answers to operations, with the clients that asked."""
        results, self._results = self._results, []
        return results

    def wait(self) -> None:
        """Wait up to WAIT_SECONDS for an adapter."""
        self._has_ended.clear()
        if self._reading and not self._ended:
            self._has_ended.wait(WAIT_SECONDS)

    def _enter(self, waiter: Waiter) -> None:
        if isinstance(waiter, Request):
            if waiter.is_finished:
                return
            adapter = waiter.spec.adapter
            assert adapter is not None
        else:
            adapter = waiter.operation.adapter
        key = adapter.key
        if not self._places.has_room(key):
            self._places.wait(key, waiter)
            return
        entry = self._places.enter(key)
        self._unwanted.discard(key)
        if isinstance(waiter, Request):
            self._users[waiter] = key
        if entry.replaced is not None:
            self._operate(UnloadAdapter(self._adapters.pop(entry.replaced)))
        if entry.is_new:
            self._adapters[key], self._reading[key] = adapter, []
            self._places.enter(key)  # until it is read, also if the waiter ends before
            self._operate(LoadAdapter(adapter)).add_done_callback(partial(self._on_end, key))
        if key in self._reading:
            self._reading[key].append(waiter)
        else:
            self._serve(waiter, None)

    def _on_end(self, key: str, done: Future[None]) -> None:
        error = done.exception()
        if error is not None:
            failure = f"adapter {self._adapters[key].name!r} could not be read: {error}"
            failure = error.message if isinstance(error, ToolkitError) else failure
            self._ended.append((key, failure))
        else:
            self._ended.append((key, None))
        self._has_ended.set()

    def _end(self, key: str, error: str | None) -> None:
        """Handle the end of a reading."""
        adapter = self._adapters[key]
        if error is None and _has_changed(adapter):
            error = (
                f"adapter {adapter.name!r} ({adapter.folder}): its files have changed since it was "
                f"loaded. Load it again, or, if no operator loaded it, send the request again."
            )
        for waiter in self._reading.pop(key):
            self._serve(waiter, error)
        self._places.leave(key)
        if error is not None:
            self._unwanted.add(key)
        self._drop_unwanted(key)

    def _serve(self, waiter: Waiter, error: str | None) -> None:
        if isinstance(waiter, Operate):
            self._places.leave(waiter.operation.adapter.key)
            self._answer(waiter, error or "")
        elif error is not None:
            self.leave(waiter)
            self._failed[waiter] = error
        elif not waiter.is_finished:
            self._ready.append(waiter)

    def _answer(self, asked: Operate, error: str = "") -> None:
        self._results.append((asked.client, OperationResult(asked.ticket, error)))

    def _drop_unwanted(self, key: str) -> None:
        if key not in self._unwanted or key in self._reading or self._places.num_users(key):
            return
        self._unwanted.remove(key)
        self._places.remove(key)
        self._operate(UnloadAdapter(self._adapters.pop(key)))


def _has_changed(adapter: Adapter) -> bool:
    try:
        return find_adapter(adapter.name, Path(adapter.folder)) != adapter
    except CheckpointError:
        return True
