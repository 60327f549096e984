"""The requests that have not ended, and the blocks and rows that they hold."""

import bisect
import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from toolkit.scheduler.block_pool import BlockPool, HostBlockPool
from toolkit.scheduler.places import Places
from toolkit.scheduler.policy import POLICIES, Rank
from toolkit.scheduler.request import FinishReason, Request, RequestStatus
from toolkit.scheduler.rows import Rows
from toolkit.scheduler.speculation import StepCosts
from toolkit.scheduler.stats import EngineStats
from toolkit.scheduler.step import RunningBatch, StepBuilder, StepInFlight
from toolkit.sequence import Adapter


class LiveRequests:
    """Books of requests: added, running, preempted, ended."""

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
        max_loras: int = 0,
        most_drafts: int = 0,
        most_step_drafts: int = 0,
        step_seconds: Sequence[tuple[int, float]] = (),
        verify_seconds: Sequence[tuple[int, float]] = (),
    ) -> None:
        """`chunks_prompts`: a prompt may span several steps; else a long one gets its own step.

        `num_stages`: pipeline stages; that many steps in flight have different requests.
        `max_loras`: adapters that running requests may have.
        `most_drafts`: drafts that a request computes in one step; `most_step_drafts`: that all
        do. `step_seconds`, `verify_seconds`: see `StepCosts`."""
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
        """In rank order, so that a preempted request has not been scheduled in the same step."""
        self._requests: dict[str, Request] = {}
        self._waiting: list[tuple[Rank, Request]] = []
        self._rows = Rows(max_num_seqs, block_size, most_drafts)
        self.max_loras = max_loras
        self.adapters = Places[Request](max_loras)
        """The devices' places for adapters, by the adapters' keys."""
        self.ended_with_adapter: list[Request] = []
        """Requests that had an adapter. The owner empties it."""
        self._num_by_adapter: Counter[Adapter] = Counter()  # requests that have not ended
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._num_rows_released = 0
        self._batch: RunningBatch | None = None  # None if `running` has changed since it was made
        self._in_flight: dict[int, StepInFlight] = {}
        self._suspects: list[Request] = []
        self._num_unexplained_failures = 0
        self._rank = POLICIES[policy]
        self.most_step_drafts = most_step_drafts or max_num_seqs * most_drafts
        self.step_costs = StepCosts(step_seconds, verify_seconds)
        self._num_steps = 0
        self._num_arrivals = 0
        self._stats = EngineStats()

    def add(self, request: Request, *, is_queued: bool = True) -> None:
        """Add a request. Raises ValueError if it does not fit into the whole cache.

        `is_queued`: it may be scheduled at once, not only after `enqueue`."""
        longest = min(request.num_prompt_tokens + request.spec.max_tokens, self.max_model_len)
        if self._blocks_for(longest) > self.pool.num_blocks:
            raise ValueError(
                f"the request needs up to {longest} tokens of KV cache and all of it holds "
                f"{self.pool.num_blocks * self.block_size}"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.id] = request
        if request.spec.adapter is not None:
            self._num_by_adapter[request.spec.adapter] += 1
        if is_queued:
            self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Put a waiting request into the queue, unless it has ended."""
        if not request.is_finished:
            heapq.heappush(self._waiting, (self._rank(request), request))

    def abort(self, request_id: str) -> Request | None:
        """End a request and free what it holds. Return None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def abort_client(self, client: int) -> int:
        """End all requests of a client. Returns their number."""
        ending = [request for request in self._requests.values() if request.client == client]
        for request in ending:
            self._finish(request, FinishReason.ABORT)
        return len(ending)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def requests(self) -> Collection[Request]:
        """All requests that have not ended."""
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
        """Return the present gauges and the counts since the last call."""
        stats, self._stats = self._stats, EngineStats()
        stats.num_running = len(self.running)
        stats.num_waiting = self.num_waiting
        stats.kv_cache_usage = self.pool.usage
        stats.block_times = self.pool.watch.take()
        return stats

    def count_by_adapter(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return how many requests run and wait, by adapter. `names`: those without any, too."""
        counts = dict.fromkeys(names, (0, 0))
        for adapter, count in self._num_by_adapter.items():  # maybe two revisions of one name
            running, waiting = counts.get(adapter.name, (0, 0))
            now = self.adapters.num_users(adapter.key)
            counts[adapter.name] = running + now, waiting + count - now
        return counts

    def reset_prefix_cache(self) -> None:
        """Evict all cached content. Running requests keep their own blocks."""
        self.pool.evict_all()

    def _preempt(self, request: Request, step: StepBuilder, *, swap: bool = True) -> None:
        """Swap out or drop the blocks of a request that has just left `running`, and requeue it."""
        self._register_blocks(request)
        kept = self._blocks_for(request.num_computed_tokens)
        # The partial result of a pooled prompt stays with its row: it is recomputed.
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
        self.enqueue(request)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            index = bisect.bisect_left(self.running, self._rank(request), key=self._rank)
            assert self.running[index] is request
            del self.running[index]
            self._register_blocks(request)
            self._release(request)
        elif request.status is RequestStatus.SWAPPED:
            self.host_pool.release(request.host_blocks)
            request.host_blocks = []
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]
        if (adapter := request.spec.adapter) is not None:
            self.ended_with_adapter.append(request)
            self._num_by_adapter[adapter] -= 1
            if not self._num_by_adapter[adapter]:
                del self._num_by_adapter[adapter]
        if request in self._suspects:
            self._suspects.remove(request)

    def _release(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.blocks = []
        if request.spec.adapter is not None:
            self.adapters.leave(request.spec.adapter.key)
        self._free_rows.append(request.row)
        self._rows.leave(request)
        self._num_rows_released += 1
        self._batch = None

    def _register_blocks(self, request: Request) -> None:
        """Add the request's full blocks to the prefix cache, as far as their tokens are known.

        Blocks of the step being scheduled count: a later reader's step runs after it, or the same
        step writes them before they are read."""
        first = request.num_registered_blocks
        full = min(request.num_computed_tokens, request.num_known_tokens) // self.block_size
        if first < full and request.cacheable:
            hashes = request.hashes(full, self.block_size)
            for index in range(first, full):
                self.pool.register(request.blocks[index], hashes[index])
            request.num_registered_blocks = full

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
