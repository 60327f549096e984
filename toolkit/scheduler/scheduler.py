"""Scheduler: chooses the requests of each step, takes in its tokens, and recovers from failures."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from toolkit.cache_group import ONE_GROUP, CacheGroup, most_pages, most_step
from toolkit.scheduler.blocks.block_tables import BlockTables, held_pages
from toolkit.scheduler.encoder_cache import ROWS_PER_PAGE, EncoderCache
from toolkit.scheduler.needs import Needs, longest_run
from toolkit.scheduler.output import ModelOutput, SchedulerOutput
from toolkit.scheduler.planner import Planner
from toolkit.scheduler.queue import RequestQueue, Suspects
from toolkit.scheduler.request import FinishReason, Request, RequestStatus
from toolkit.scheduler.results import TokenAppender
from toolkit.scheduler.rows import NO_TOKEN, Rows
from toolkit.scheduler.running import RunningRequests
from toolkit.scheduler.speculation import UNKNOWN_TIMES, StepCosts, StepTimes
from toolkit.scheduler.states import GRAIN, StateSlots
from toolkit.scheduler.stats import EngineStats, StatsRecorder
from toolkit.scheduler.step import StepLimits, StepResults
from toolkit.sequence import Adapter, Feature


class Scheduler:
    """Gives requests tokens in each step, running ones first, under one token budget.

    There is no prefill phase and no decode phase. A request is behind by `num_tokens_to_compute`;
    a step takes as much of that as the budget and the blocks allow. When a request catches up, the
    step samples its next token.

    Steps may be scheduled before the tokens of earlier ones are known. Each running request is then
    assumed to continue by one token; tokens past its end are dropped in `update`."""

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
        groups: Sequence[CacheGroup] = ONE_GROUP,
        enable_prefix_caching: bool = True,
        num_state_slots: int = 0,
        num_host_slots: int = 0,
        state_grain: int = GRAIN,
        chunks_prompts: bool = True,
        num_stages: int = 1,
        max_loras: int = 0,
        num_feature_pages: int = 0,
        rows_per_page: int = ROWS_PER_PAGE,
        most_encoded: int = 0,
        most_drafts: int = 0,
        most_step_drafts: int = 0,
        step_times: StepTimes = UNKNOWN_TIMES,
    ) -> None:
        """`chunks_prompts`, `num_stages`: see `StepLimits`.

        `num_blocks`, `num_host_blocks`: pages, each of which has blocks of one of the `groups`.

        `num_state_slots`: for the states of running requests, and snapshots; 0: the model has none.
        `num_host_slots`: in host memory, for the states of swapped requests.
        `state_grain`: tokens between places of snapshots.

        `max_loras`: adapters that running requests may have. `num_feature_pages`,
        `rows_per_page`: of the encoder cache; `most_encoded`: see `Needs`.
        `most_drafts`: drafts that a request computes in one step; `most_step_drafts`: that all
        do."""
        self.enable_prefix_caching = enable_prefix_caching
        self.ended_with_needs: list[Request] = []
        """Requests that had an adapter or features. The owner empties it."""
        self._requests: dict[str, Request] = {}
        self._num_by_adapter: Counter[Adapter] = Counter()  # requests that have not ended
        self._num_arrivals = 0
        self._stats = StatsRecorder()
        self._limits = StepLimits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            num_stages=num_stages,
            chunks_prompts=chunks_prompts,
            most_drafts=most_step_drafts or max_num_seqs * most_drafts,
        )
        self._queue = RequestQueue(policy)
        self._suspects = Suspects()
        self._blocks = BlockTables(num_blocks, num_host_blocks, block_size, groups, max_model_len)
        self.pool, self.host_pool = self._blocks.pool, self._blocks.host_pool
        self.rows = Rows(
            max_num_seqs, block_size, max_model_len, most_drafts, step_times.idle_fading
        )
        cache = EncoderCache(num_feature_pages, rows_per_page)
        self.needs = Needs(max_loras, cache, most_encoded, self._stats)
        self.states: StateSlots | None = None
        """Slots of the devices for requests' states. None: the model has none."""
        if num_state_slots:
            grain = math.lcm(state_grain, block_size)
            self.states = StateSlots(
                num_state_slots, grain, block_size, num_host_slots, has_drafts=most_drafts > 0
            )
        self.running = RunningRequests(
            self._queue, self.rows, self._blocks, self.needs, self.states, self._stats
        )
        self.planner = Planner(
            self._limits,
            StepCosts(step_times),
            queue=self._queue,
            running=self.running,
            suspects=self._suspects,
            rows=self.rows,
            blocks=self._blocks,
            needs=self.needs,
            states=self.states,
            stats=self._stats,
        )
        self._most_step = most_step(max_num_batched_tokens, most_drafts, num_stages)
        self._appender = TokenAppender(self.rows, self._stats, self._finish)

    # ---- requests

    def add(self, request: Request, *, is_queued: bool = True) -> None:
        """Add a request. Raises ValueError if it does not fit into the whole cache.

        `is_queued`: it may be scheduled at once, not only after `enqueue`."""
        longest = min(request.num_prompt_tokens + request.spec.max_tokens, self.rows.max_model_len)
        pages = most_pages(self._blocks.groups, self._blocks.block_size, longest, self._most_step)
        if pages > self.pool.num_blocks:
            raise ValueError(
                f"the request needs up to {longest} tokens of KV cache, in {pages} pages, and all "
                f"of it has {self.pool.num_blocks}"
            )
        cache = self.needs.cache
        pages = max(map(cache.num_for, request.spec.features), default=0)
        if pages > cache.num_pages:
            raise ValueError(
                f"a picture or clip needs {pages} pages of the encoder cache, which has "
                f"{cache.num_pages}"
            )
        if (length := longest_run(request)) > self._limits.max_num_batched_tokens:
            raise ValueError(
                f"a picture has {length} tokens that see each other, and a step has at most "
                f"{self._limits.max_num_batched_tokens} (--max-num-batched-tokens)"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.id] = request
        request.follow()
        if request.spec.adapter is not None:
            self._num_by_adapter[request.spec.adapter] += 1
        if is_queued:
            self.enqueue(request)

    def lacking(self, request: Request) -> list[Feature]:
        """Return the features that a request has to compute, as far as can be known now."""
        cached = self._blocks.find_cached(request)
        if self._blocks.has_features:
            return list(request.spec.features) if self._blocks.lacks_feature(cached) else []
        if self.states is not None:
            _, cached = self.states.begin_with(request, cached)
        first = cached.length
        cache = self.needs.cache
        wanted = (one for one in request.spec.features if one.end > first or not one.runs)
        return [one for one in wanted if one not in cache]

    def enqueue(self, request: Request) -> None:
        """Put a waiting request into the queue, unless it has ended."""
        self._queue.push(request)

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

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.SWAPPED:
            self.running.release_host(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._requests[request.id]
        adapter = request.spec.adapter
        if adapter is not None or request.spec.features:
            self.ended_with_needs.append(request)
        if adapter is not None:
            self._num_by_adapter[adapter] -= 1
            if not self._num_by_adapter[adapter]:
                del self._num_by_adapter[adapter]
        request.unfollow()
        self._suspects.remove(request)

    # ---- steps

    def schedule(self) -> SchedulerOutput | None:
        """Return the next step, or None if all wait for the tokens of steps in flight."""
        return self.planner.plan()

    def first_scheduled(self, output: SchedulerOutput) -> list[Request]:
        """Return the requests that this step, the latest, runs for the first time."""
        admitted = self.planner.in_flight[output.step].admitted
        return [request for request in admitted if not request.num_preemptions]

    def constrained(self, output: SchedulerOutput) -> list[tuple[Request, list[int]]]:
        """Return the requests of a step in flight that a grammar constrains, with their drafts.

        A step that was planned before its drafts were known may verify more than there are.
        Missing ones are token 0."""
        requests = self.planner.in_flight[output.step].requests
        found = []
        for index in output.constrained.tolist():
            request = requests[index]
            count = output.num_drafts.item(index) if len(output.num_drafts) else 0
            drafts = np.maximum(self.rows.draft_tokens[request.row, :count], 0).tolist()
            found.append((request, drafts if request.row >= 0 else [NO_TOKEN] * count))
        return found

    def update(self, output: SchedulerOutput, result: ModelOutput) -> StepResults:
        """Append a step's tokens and end the requests that are done."""
        self._stats.current.late_compilations += result.num_compiled
        step = self.planner.in_flight.pop(output.step, None)
        if step is None:  # dropped after a failure
            return StepResults(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32))
        which = output.samples.nonzero()[0]
        results = self._appender.append(step, which, output, result)
        suspect = self._suspects.current
        if suspect is None:
            self._suspects.num_failures = 0
        elif any(step.requests[index] is suspect for index in which.tolist()):
            self._clear_suspect(suspect)
        return results

    @property
    def max_num_seqs(self) -> int:
        """Requests that run at once. Out of memory lowers it."""
        return self._limits.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step. Out of memory lowers it."""
        return self._limits.max_num_batched_tokens

    @property
    def num_steps_in_flight(self) -> int:
        return len(self.planner.in_flight)

    # ---- when a step fails

    def recover(self, output: SchedulerOutput, *, out_of_memory: bool) -> list[Request]:
        """Drop all steps in flight after one failed; their requests are recomputed.

        Out of memory halves the budget and the number of running requests. Any other failure runs
        the step's requests one at a time until the one that fails alone is found. Return the
        requests that end with an error."""
        step = self.planner.in_flight.get(output.step)
        scheduled = [] if step is None else list(dict.fromkeys([*step.requests, *step.loading]))
        requests = [request for request in scheduled if not request.is_finished]
        tokens = output.total_tokens
        self.drop_steps_in_flight()
        given_up: list[Request] = []
        if out_of_memory and (len(requests) > 1 or tokens > self._blocks.block_size):
            before = self.max_num_seqs, self.max_num_batched_tokens
            self._limits.halve(tokens, len(requests))
            most = self.max_num_batched_tokens
            given_up = [one for one in self._requests.values() if longest_run(one) > most]
            if before == (self.max_num_seqs, most) and step is not None:  # it is no smaller now
                given_up += [one for one in step.loading if one in requests and one not in given_up]
        elif len(requests) <= 1 or self._suspects.num_failures >= 3:
            given_up = requests
        elif not out_of_memory:
            self._suspects.try_alone(sorted(requests, key=self._queue.rank))
        for request in given_up:
            self._finish(request, FinishReason.ERROR)
        return given_up

    def drop_steps_in_flight(self) -> None:
        """Recompute all requests and empty the prefix cache: what was written is unknown."""
        self.planner.in_flight.clear()
        while self.running:
            self.running.preempt(self.running.requests[-1])
        for request in self._requests.values():
            request.drop_in_flight()
            if request.status is RequestStatus.SWAPPED:
                self.running.release_host(request)
                request.num_computed_tokens = 0
                request.status = RequestStatus.PREEMPTED
        self.pool.evict_all()
        self.needs.clear()
        if self.states is not None:
            self.states.clear()

    def _clear_suspect(self, request: Request) -> None:
        """Requeue a suspect that caught up alone, so that the next one has the whole cache."""
        self._suspects.clear_current()
        if self._suspects.current is not None:
            self.running.preempt(request)

    def check(self) -> None:
        """Raise RuntimeError if a block or a row is lost, or has more users than it counts."""
        requests, states = self._requests.values(), self.states
        rows = sorted((*self.rows.free, *(request.row for request in self.running)))
        problem = (
            self.pool.problem(map(held_pages, (one.blocks for one in requests)))
            or self.host_pool.problem(map(held_pages, (one.host_blocks for one in requests)))
            or self.needs.cache.problem()
            or (None if rows == list(range(len(rows))) else f"rows are free or held: {rows}")
            or (None if states is None else states.problem(requests))
        )
        if problem is not None:
            raise RuntimeError(f"the scheduler's accounts are wrong: {problem}")

    # ---- statistics

    def take_stats(self) -> EngineStats:
        """Return the present gauges and the counts since the last call."""
        stats = self._stats.take()
        stats.num_running = len(self.running.requests)
        stats.num_waiting = len(self._requests) - stats.num_running
        stats.kv_cache_usage = self.pool.usage
        stats.block_times = self.pool.watch.take()
        return stats

    def count_by_adapter(self, names: Iterable[str]) -> dict[str, tuple[int, int]]:
        """Return how many requests run and wait, by adapter. `names`: those without any, too."""
        counts = dict.fromkeys(names, (0, 0))
        for adapter, count in self._num_by_adapter.items():  # maybe two revisions of one name
            running, waiting = counts.get(adapter.name, (0, 0))
            now = self.needs.num_running(adapter)
            counts[adapter.name] = running + now, waiting + count - now
        return counts

    def reset_prefix_cache(self) -> None:
        """Evict all cached content. Running requests keep their own blocks and states."""
        self.pool.evict_all()
        if self.states is not None:
            self.states.clear()
