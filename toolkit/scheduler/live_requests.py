"""The requests that have not ended: who waits, who runs, and the blocks and rows that they hold."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Collection

from toolkit.scheduler.block_pool import BlockPool, HostBlockPool
from toolkit.scheduler.policy import POLICIES, Rank
from toolkit.scheduler.request import FinishReason, Request, RequestStatus
from toolkit.scheduler.rows import Rows
from toolkit.scheduler.stats import EngineStats
from toolkit.scheduler.step import InFlight, Lineup, Step


class LiveRequests:
    """They come, run, are preempted and end; this keeps the books of it."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: str = "fcfs",
        num_host_blocks: int = 0,
        enable_prefix_caching: bool = True,
        chunks_prompts: bool = True,
        num_stages: int = 1,
    ) -> None:
        """`chunks_prompts`: a prompt may be computed in several steps; one longer than a step has one for itself, if not.
        `num_stages`: steps in flight that are to have different requests (`toolkit.scheduler.planner`).
        """
        self.block_size = block_size
        self.num_stages = num_stages
        self.chunks_prompts = chunks_prompts
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.host_pool = HostBlockPool(num_host_blocks)
        self.running: list[Request] = []
        """In rank order, so that whoever is preempted has not been scheduled yet in the same step."""
        self._requests: dict[str, Request] = {}
        self._waiting: list[tuple[Rank, Request]] = []
        self._rows = Rows(max_num_seqs, block_size)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_rows_left = 0
        self._lineup: Lineup | None = None
        """None when `running` has changed since."""
        self._in_flight: dict[int, InFlight] = {}
        self._suspects: list[Request] = []
        self._num_unexplained_failures = 0
        self._rank = POLICIES[policy]
        self._num_steps = 0
        self._num_arrivals = 0
        self._stats = EngineStats()

    def add(self, request: Request, *, in_line: bool = True) -> None:
        """Takes a request in. Raises ValueError when the whole cache is too small for it. `in_line`: it may be scheduled
        at once, and not from `line_up` on.
        """
        longest = min(request.num_prompt_tokens + request.spec.max_tokens, self.max_model_len)
        if self._blocks_for(longest) > self.pool.num_blocks:
            raise ValueError(
                f"the request needs up to {longest} tokens of KV cache and all of it holds "
                f"{self.pool.num_blocks * self.block_size}"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.id] = request
        if in_line:
            self.line_up(request)

    def line_up(self, request: Request) -> None:
        """Puts a request that waits in line; nothing when it has ended."""
        if not request.is_finished:
            heapq.heappush(self._waiting, (self._rank(request), request))

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at once and frees what it holds; None when it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def abort_client(self, client: int) -> None:
        """Ends all requests of a client."""
        for request in [request for request in self._requests.values() if request.client == client]:
            self._finish(request, FinishReason.ABORT)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def requests(self) -> Collection[Request]:
        """All that have not ended."""
        return self._requests.values()

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self.running)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    def take_stats(self) -> EngineStats:
        """The gauges of now and the counts since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.num_running = len(self.running)
        stats.num_waiting = self.num_waiting
        stats.kv_cache_usage = self.pool.usage
        stats.block_times = self.pool.watch.take()
        return stats

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content; running requests keep their own blocks."""
        self.pool.forget_all()

    def _preempt(self, request: Request, step: Step, *, swap: bool = True) -> None:
        """Takes the blocks of a request that has just left `running`, and puts it back in line."""
        self._remember(request)
        kept = self._blocks_for(request.num_computed_tokens)
        # What a pooled prompt has come to so far stays with the row: it is computed anew.
        swap = swap and self.host_pool.num_blocks > 0 and request.spec.pooling is None
        host_blocks = self.host_pool.allocate(kept) if swap else None
        if host_blocks:
            step.swap_out.extend(zip(request.blocks, host_blocks, strict=False))
            request.host_blocks = host_blocks
            request.status = RequestStatus.SWAPPED
        else:
            request.num_computed_tokens = 0
            request.status = RequestStatus.PREEMPTED
        self._release(request)
        request.num_preemptions += 1
        self._stats.num_preemptions += 1
        step.preempted = True
        self.line_up(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            index = bisect.bisect_left(self.running, self._rank(request), key=self._rank)
            assert self.running[index] is request
            del self.running[index]
            self._remember(request)
            self._release(request)
        elif request.status is RequestStatus.SWAPPED:
            self.host_pool.release(request.host_blocks)
            request.host_blocks = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]
        if request in self._suspects:
            self._suspects.remove(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        self._free_rows.append(request.row)
        self._rows.leave(request)
        self._num_rows_left += 1
        self._lineup = None

    def _remember(self, request: Request) -> None:
        """Makes the request's full blocks findable, as far as their tokens are known.

        Blocks of the step being scheduled count: a later reader's step runs after, or writes them in the same
        one before it reads.
        """
        first = request.num_remembered_blocks
        full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if first < full and request.cacheable:
            hashes = request.hashes(full, self.block_size)
            for index in range(first, full):
                self.pool.remember(request.blocks[index], hashes[index])
            request.num_remembered_blocks = full

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
