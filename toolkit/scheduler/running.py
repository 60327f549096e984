"""Requests that run, and what they hold meanwhile: a row, blocks, and places (`needs`)."""

import bisect
from collections.abc import Iterator

import numpy as np

from toolkit.scheduler.blocks.block_tables import BlockTables
from toolkit.scheduler.needs import Needs
from toolkit.scheduler.queue import RequestQueue
from toolkit.scheduler.request import Request, RequestStatus
from toolkit.scheduler.rows import Rows
from toolkit.scheduler.states import StateSlots
from toolkit.scheduler.stats import StatsRecorder
from toolkit.scheduler.step import RunningBatch, StepBuilder


class RunningRequests:
    """Running requests in rank order, so that a preempted one is not scheduled in the same step."""

    def __init__(
        self,
        queue: RequestQueue,
        rows: Rows,
        blocks: BlockTables,
        needs: Needs,
        states: StateSlots | None,
        stats: StatsRecorder,
    ) -> None:
        """`queue`: preempted requests wait there. `states`: None if the model has none."""
        self.requests: list[Request] = []
        """Read only."""
        self._queue = queue
        self._rows = rows
        self._blocks = blocks
        self._needs = needs
        self._states = states
        self._stats = stats
        self._batch: RunningBatch | None = None  # None if `requests` changed since it was made

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

    @property
    def batch(self) -> RunningBatch:
        """All of them as arrays."""
        if self._batch is None:
            rows = np.array([request.row for request in self.requests], np.intp)
            wants = any(request.params.prompt_logprobs is not None for request in self.requests)
            has_features = any(request.spec.features for request in self.requests)
            self._batch = RunningBatch(
                list(self.requests), rows, rows.astype(np.int32), wants, has_features
            )
        return self._batch

    def admit(self, request: Request, step: int) -> None:
        """Give a row, from this step on, to a request that has its blocks and its adapter."""
        request.status = RequestStatus.RUNNING
        self._rows.place(request, step, self._blocks.capacity(request))
        if self._states is not None:
            self._rows.state_slots[request.row] = request.state_slot
            self._rows.boundary[request.row] = request.branch
            self._rows.stated[request.row] = request.num_computed_tokens
        bisect.insort(self.requests, request, key=self._queue.rank)
        self._batch = None

    def preempt(self, request: Request, step: StepBuilder | None = None) -> None:
        """Requeue a request. `step` copies its blocks and its state to the host, if they fit.

        Without a step or room for both, its tokens are computed again."""
        is_swapped = step is not None and self._swap_out(request, step)
        self.remove(request)
        if is_swapped:
            request.status = RequestStatus.SWAPPED
        else:
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._stats.current.num_preemptions += 1
        self._queue.push(request)

    def _swap_out(self, request: Request, step: StepBuilder) -> bool:
        """Have a step copy a request's memory to the host. Return False if it has no room."""
        if request.spec.pooling is not None:  # the partial result stays with its row
            return False
        if self._states is not None and not self._states.has_host_slot:
            return False
        copies = self._blocks.swap_out(request)
        if copies and self._states is not None:
            step.state_swap_out.append(self._states.swap_out(request))
        step.swap_out += copies
        return bool(copies)

    def release_host(self, request: Request) -> None:
        """Take the host's memory from a swapped request."""
        self._blocks.release_host(request)
        if self._states is not None:
            self._states.release_host(request)

    def remove(self, request: Request) -> None:
        """Take a request's row, blocks and adapter. Full blocks stay in the prefix cache."""
        rank = self._queue.rank
        index = bisect.bisect_left(self.requests, rank(request), key=rank)
        assert self.requests[index] is request
        del self.requests[index]
        self._blocks.register(request)
        self._blocks.release(request)
        self._needs.leave(request)
        if self._states is not None:
            self._states.leave(request)
        self._rows.leave(request)
        self._batch = None
