"""The scheduler: which requests compute how many tokens in the next step, and what a step's tokens mean for
them.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from toolkit.scheduler.block_pool import BlockPool, HostBlockPool
from toolkit.scheduler.output import IntArray, ModelOutput, NewRow, PromptLogprobs, SchedulerOutput
from toolkit.scheduler.request import FinishReason, Request, RequestStatus
from toolkit.scheduler.rows import Rows

RowArray = npt.NDArray[np.intp]
BoolArray = npt.NDArray[np.bool_]

Rank = tuple[int, int]
"""Order among requests: the smaller is scheduled first and preempted last."""


@dataclass(slots=True)
class StepResult:
    """What one step gave one request, when that is more than a token."""

    request: Request
    token_id: int | None = None
    sample: int = -1
    """Index of its token among those the step sampled."""
    prompt_logprobs: PromptLogprobs | None = None
    error: str | None = None


@dataclass(slots=True)
class StepResults:
    """What one step gave all requests.

    `clients`, `numbers`, `token_ids` [num_plain]: requests that got a token and nothing else. `others`: those of
    which there is more to tell. A request whose tokens are told together at its end is in neither before.
    """

    clients: IntArray
    numbers: npt.NDArray[np.int64]
    token_ids: IntArray
    others: list[StepResult] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerStats:
    """Gauges are of now; counters are since the last reading."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    block_times: list[list[float]] = field(default_factory=list)
    """As from `BlockWatch.take`."""


@dataclass(slots=True)
class _Lineup:
    """The running requests in rank order, and their rows. Steps in flight hold on to it: it is never changed."""

    requests: list[Request]
    rows: RowArray
    rows_int32: IntArray
    wants_prompt_logprobs: bool


@dataclass(slots=True)
class _Step:
    """A step being put together: requests that were scheduled together, then others one by one."""

    budget: int
    together: _Together | None = None
    requests: list[Request] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)
    num_computed: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_blocks: list[int] = field(default_factory=list)
    """Three numbers each."""
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: list[int] = field(default_factory=list)
    preempted: bool = False

    @property
    def num_requests(self) -> int:
        return len(self.requests) + (0 if self.together is None else len(self.together.requests))


@dataclass(slots=True)
class _Together:
    """The part of a step that was made in one go."""

    requests: list[Request]
    rows: RowArray
    rows_int32: IntArray
    num_tokens: IntArray
    num_computed: IntArray
    samples: BoolArray


@dataclass(slots=True)
class _InFlight:
    """A step whose tokens are not known yet."""

    requests: list[Request]
    rows: RowArray
    admitted: list[Request]
    num_rows_left: int
    """How many times a row had been left when it was scheduled."""


class Scheduler:
    """Gives every request some number of tokens each step, running ones first, under one token budget.

    NOTE: there is no prefill and no decode. A request is behind by `num_tokens_to_compute`; the step takes as
    much of that as the budget and the blocks allow. When it catches up, the step samples its next token.

    Steps may be scheduled before the tokens of earlier ones are known. Each running request is then assumed
    to go on by one token; what a request computes past its end is dropped in `update`.
    """

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
    ) -> None:
        """`chunks_prompts`: a prompt may be computed in several steps; one longer than a step has one for itself, if not."""
        self.block_size = block_size
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
        self._lineup: _Lineup | None = None
        """None when `running` has changed since."""
        self._in_flight: dict[int, _InFlight] = {}
        self._suspects: list[Request] = []
        self._num_unexplained_failures = 0
        self._rank: Callable[[Request], Rank] = (
            _rank_by_priority if policy == "priority" else _rank_by_arrival
        )
        self._num_steps = 0
        self._num_arrivals = 0
        self._stats = SchedulerStats()

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Puts a request in line. Raises ValueError when the whole cache is too small for it."""
        longest = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        if self._blocks_for(longest) > self.pool.num_blocks:
            raise ValueError(
                f"the request needs up to {longest} tokens of KV cache and all of it holds "
                f"{self.pool.num_blocks * self.block_size}"
            )
        request.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._requests[request.id] = request
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

    def take_stats(self) -> SchedulerStats:
        """The gauges of now and the counts since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running = len(self.running)
        stats.num_waiting = self.num_waiting
        stats.kv_cache_usage = self.pool.usage
        stats.block_times = self.pool.watch.take()
        return stats

    def reset_prefix_cache(self) -> None:
        """Forgets all cached content; running requests keep their own blocks."""
        self.pool.forget_all()

    # ---- a step

    def schedule(self) -> SchedulerOutput | None:
        """The next step, or None when nothing can run before an earlier step's tokens are known."""
        step = _Step(budget=self.max_num_batched_tokens)
        if self._suspects or not self._schedule_together(step):
            self._schedule_one_by_one(step)
        if not step.preempted:
            self._schedule_waiting(step)
        if not step.num_requests and not step.swap_out:
            return None
        return self._close(step)

    def _schedule_together(self, step: _Step) -> bool:
        """Gives the running requests their tokens and blocks; False, and nothing changed, when blocks lack.

        The same as one by one, in NumPy: Python is only for those that need a block or compute a prompt.
        Blocks that decoding fills are not made findable here but when they are given up: nobody asks for them
        sooner.
        """
        lineup, rows = self._current_lineup(), self._rows
        if not lineup.requests:
            return True
        where = lineup.rows
        computed, tokens = rows.computed.take(where), rows.tokens.take(where)
        in_flight = rows.in_flight.take(where)
        num_tokens = tokens - computed
        num_tokens *= tokens < rows.limit.take(where)  # none when its last token is in flight
        total = int(np.add.reduce(num_tokens))
        if total > step.budget:
            before = num_tokens.cumsum() - num_tokens
            num_tokens = np.clip(step.budget - before, 0, num_tokens).astype(np.int32)
            total = step.budget
        end = computed + num_tokens
        grows = end > rows.capacity.take(where)
        if np.count_nonzero(grows) and not self._grow_together(lineup, grows, end, step):
            return False
        samples = end == tokens
        rows.computed[where], rows.tokens[where], rows.in_flight[where] = (
            end,
            tokens + samples,
            in_flight + samples,
        )
        part = _Together(lineup.requests, where, lineup.rows_int32, num_tokens, computed, samples)
        if np.count_nonzero(num_tokens) < len(num_tokens):
            part = _without_idle(part)
        step.budget -= total
        step.together = part
        if lineup.wants_prompt_logprobs:
            step.prompt_logprobs += _wanting_prompt_logprobs(part)
        in_prompt = computed < rows.prompts.take(where)
        if np.count_nonzero(in_prompt):
            for index in np.flatnonzero(in_prompt).tolist():
                self._remember(lineup.requests[index])
        return True

    def _grow_together(self, lineup: _Lineup, grows: BoolArray, end: IntArray, step: _Step) -> bool:
        """Gives blocks to those that grow to `end` tokens; False, and nothing changed, when there are too few."""
        which = np.flatnonzero(grows)
        rows = lineup.rows.take(which)
        capacity = self._rows.capacity.take(rows)
        counts = -(-(end.take(which) - capacity) // self.block_size)
        blocks = self.pool.allocate(int(counts.sum()))
        if blocks is None:
            return False
        self._rows.capacity[rows] = capacity + counts * self.block_size
        at = 0
        for index, row, count in zip(which.tolist(), rows.tolist(), counts.tolist(), strict=True):
            self._grow(lineup.requests[index], row, blocks[at : at + count], step)
            at += count
        return True

    def _current_lineup(self) -> _Lineup:
        if self._lineup is None:
            rows = np.array([request.row for request in self.running], np.intp)
            wants = any(request.params.prompt_logprobs is not None for request in self.running)
            self._lineup = _Lineup(list(self.running), rows, rows.astype(np.int32), wants)
        return self._lineup

    def _schedule_one_by_one(self, step: _Step) -> None:
        """The same where requests may have to make room for each other, or only one may run."""
        index = 0
        while index < len(self.running) and step.budget > 0:
            request = self.running[index]
            num_tokens = min(self._num_wanted(request), step.budget)
            if num_tokens > 0 and self._make_room(request, num_tokens, step):
                self._take(request, num_tokens, step)
            index += 1

    def _make_room(self, request: Request, num_tokens: int, step: _Step) -> bool:
        """Gives the request blocks for its next tokens, preempting from the lowest rank up; False when it
        went itself.
        """
        while True:
            need = self._blocks_for(request.num_computed_tokens + num_tokens) - len(request.blocks)
            blocks = self.pool.allocate(max(0, need))
            if blocks is not None:
                if blocks:
                    self._grow(request, request.row, blocks, step)
                    self._rows.capacity[request.row] += len(blocks) * self.block_size
                return True
            victim = self.running.pop()
            self._preempt(victim, step)
            if victim is request:
                return False

    def _grow(self, request: Request, row: int, blocks: list[int], step: _Step) -> None:
        held = request.blocks
        for block in blocks:
            step.new_blocks += (row, len(held), block)
            held.append(block)
        if len(held) % self._rows.settle_every == 0:
            request.settle()

    def _schedule_waiting(self, step: _Step) -> None:
        set_aside = []
        while self._waiting and step.budget > 0 and len(self.running) < self.max_num_seqs:
            entry = heapq.heappop(self._waiting)
            request = entry[1]
            if request.is_finished:
                continue
            if not self._is_ready(request):
                set_aside.append(entry)
            elif not self._admit(request, step):
                set_aside.append(entry)
                break
        for entry in set_aside:
            heapq.heappush(self._waiting, entry)

    def _is_ready(self, request: Request) -> bool:
        if request.num_in_flight or (request.grammar is not None and not request.grammar.is_compiled):
            return False
        if self._suspects:
            return request is self._suspects[0]
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        if leader.wants_prompt_logprobs:  # which come before anything of its siblings
            return False
        return (
            leader.num_computed_tokens >= (leader.num_prompt_tokens - 1) // self.block_size * self.block_size
        )

    def _admit(self, request: Request, step: _Step) -> bool:
        """Gives a waiting request a row and blocks for its first tokens; False, and nothing changed, when
        blocks lack.
        """
        if request.status is RequestStatus.SWAPPED:
            cached: list[int] = []
            num_computed = request.num_computed_tokens
        else:
            cached = self._find_cached(request)
            num_computed = len(cached) * self.block_size
        num_tokens = request.num_tokens - num_computed
        if num_tokens > step.budget:
            if self.chunks_prompts:
                num_tokens = step.budget
            elif step.num_requests:
                return False
        need = self._blocks_for(num_computed + num_tokens) - len(cached)
        if need > self.pool.num_free - self.pool.num_free_among(cached):
            return False
        self.pool.share(cached)
        fresh = self.pool.allocate(need)
        assert fresh is not None
        request.blocks = cached + fresh
        if request.status is RequestStatus.SWAPPED:
            step.swap_in.extend(zip(request.host_blocks, request.blocks, strict=False))
            self.host_pool.release(request.host_blocks)
            request.host_blocks = []
        elif request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_computed
            self._stats.prefix_cache_queries += request.num_prompt_tokens
            self._stats.prefix_cache_hits += num_computed
        request.num_computed_tokens = num_computed
        request.num_remembered_blocks = len(cached)
        request.status = RequestStatus.RUNNING
        self._rows.place(request, self._free_rows.pop(), self._num_steps, self.max_model_len)
        self._lineup = None
        step.new_rows.append(
            NewRow(
                row=request.row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed,
                blocks=list(request.blocks),
                params=request.params,
                seed=request.seed,
                eos_token_ids=sorted(request.eos_token_ids),
                pooling=request.pooling,
            )
        )
        bisect.insort(self.running, request, key=self._rank)
        self._take(request, num_tokens, step)
        return True

    def _find_cached(self, request: Request) -> list[int]:
        """Blocks that hold the beginning of the request's tokens; at least one token is left to compute."""
        if not request.cacheable or request.wants_prompt_logprobs:
            return []
        most = (request.num_tokens - 1) // self.block_size
        return self.pool.find(request.hashes(most, self.block_size)[:most])

    def _take(self, request: Request, num_tokens: int, step: _Step) -> None:
        """Puts `num_tokens` of a request into the step."""
        if request.wants_prompt_logprobs and request.num_computed_tokens < request.num_prompt_tokens - 1:
            step.prompt_logprobs.append(step.num_requests)
        step.requests.append(request)
        step.num_tokens.append(num_tokens)
        step.num_computed.append(request.num_computed_tokens)
        step.budget -= num_tokens
        samples = request.num_tokens_to_compute == num_tokens
        step.samples.append(samples)
        request.schedule(num_tokens, samples=samples)
        self._remember(request)

    def _close(self, step: _Step) -> SchedulerOutput:
        part = self._joined(step)
        output = SchedulerOutput(
            step=self._num_steps,
            rows=part.rows_int32,
            num_tokens=part.num_tokens,
            num_computed=part.num_computed,
            samples=part.samples,
            new_rows=step.new_rows,
            new_blocks=np.array(step.new_blocks, np.int32).reshape(-1, 3),
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            prompt_logprobs=step.prompt_logprobs,
        )
        if self._rows.constrained.any():
            output.constrained = np.flatnonzero(self._rows.constrained.take(part.rows) & part.samples)
        self._num_steps += 1
        admitted = part.requests[len(part.requests) - len(step.new_rows) :]
        self._in_flight[output.step] = _InFlight(part.requests, part.rows, admitted, self._num_rows_left)
        return output

    def _joined(self, step: _Step) -> _Together:
        """Both parts of a step."""
        if step.together is not None and not step.requests:
            return step.together
        rows = np.array([request.row for request in step.requests], np.intp)
        part = _Together(
            step.requests,
            rows,
            rows.astype(np.int32),
            np.array(step.num_tokens, np.int32),
            np.array(step.num_computed, np.int32),
            np.array(step.samples, np.bool_),
        )
        if step.together is None:
            return part
        first = step.together
        return _Together(
            first.requests + part.requests,
            np.concatenate((first.rows, part.rows)),
            np.concatenate((first.rows_int32, part.rows_int32)),
            np.concatenate((first.num_tokens, part.num_tokens)),
            np.concatenate((first.num_computed, part.num_computed)),
            np.concatenate((first.samples, part.samples)),
        )

    def first_scheduled(self, output: SchedulerOutput) -> list[Request]:
        """Requests that this step, the latest, runs for the first time."""
        return [r for r in self._in_flight[output.step].admitted if not r.num_preemptions]

    def constrained(self, output: SchedulerOutput) -> list[Request]:
        """The requests of a step in flight whose next token is bound to a grammar."""
        requests = self._in_flight[output.step].requests
        return [requests[index] for index in output.constrained.tolist()]

    def update(self, output: SchedulerOutput, result: ModelOutput) -> StepResults:
        """Takes in a step's tokens: appends them and ends the requests that are done. Tokens of ended ones
        are dropped.
        """
        step = self._in_flight.pop(output.step, None)
        if step is None:  # it was dropped
            return StepResults(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int32))
        others = self._new_prompt_logprobs(step, result)
        which = np.flatnonzero(output.samples)
        results = self._take_in(step, which, output.step, result.token_ids)
        results.others = others + results.others
        if not self._suspects:
            self._num_unexplained_failures = 0
        elif any(step.requests[index] is self._suspects[0] for index in which.tolist()):
            self._acquit(self._suspects.pop(0))
        return results

    def _take_in(self, step: _InFlight, which: RowArray, number: int, token_ids: IntArray) -> StepResults:
        """Appends the tokens of the requests that sampled, whose indices in the step are `which`."""
        table, others = self._rows, []
        rows, samples = step.rows.take(which), np.arange(len(which))
        if step.num_rows_left != self._num_rows_left:
            stays = table.taken_at.take(rows) <= number
            for sample in samples[~stays].tolist():
                others += self._append_late(step.requests[which.item(sample)], token_ids.item(sample), sample)
            which, samples, rows, token_ids = which[stays], samples[stays], rows[stays], token_ids[stays]
        known = table.sampled(rows, token_ids)
        told = table.ended(rows, token_ids, known)
        told |= table.single.take(rows)
        silent = told | table.quiet.take(rows)
        clients, numbers = table.clients.take(rows), table.numbers.take(rows)
        results = StepResults(clients, numbers, token_ids, others)
        if np.count_nonzero(silent):
            plain = ~silent
            results = StepResults(clients[plain], numbers[plain], token_ids[plain], others)
        if np.count_nonzero(told):
            for at in np.flatnonzero(told).tolist():
                request = step.requests[which.item(at)]
                others.append(self._news(request, token_ids.item(at), samples.item(at)))
        return results

    def _append_late(self, request: Request, token_id: int, sample: int) -> list[StepResult]:
        """A token of a request that has left its row since."""
        if request.is_finished:
            return []
        request.append(token_id)
        news = self._news(request, token_id, sample)
        return [] if request.whole and not request.is_finished else [news]

    def _news(self, request: Request, token_id: int, sample: int) -> StepResult:
        """What there is to tell of a request with its newest token; ends it when it is done."""
        if token_id < 0:
            request.drop_last()
            self._finish(request, FinishReason.ERROR)
            return StepResult(request, error=_why_nothing(request))
        if request.num_known_tokens >= request.stops_from and token_id in request.ending_token_ids:
            request.stop_reason = token_id if token_id in request.stop_token_ids else None
            self._finish(request, FinishReason.STOP)
        elif request.num_known_tokens >= request.length_limit(self.max_model_len):
            self._finish(request, FinishReason.LENGTH)
        elif request.row >= 0:
            self._rows.single[request.row] = request.tells_singly
        return StepResult(request, token_id, sample)

    def _new_prompt_logprobs(self, step: _InFlight, result: ModelOutput) -> list[StepResult]:
        """The prompt positions of this step that were not reported before a preemption."""
        news = []
        for index, found in result.prompt_logprobs.items():
            request, values = step.requests[index], found.values
            skip = request.num_prompt_logprobs + 1 - found.start
            if request.is_finished or skip >= len(values.ranks):
                continue
            if skip > 0:
                values = type(values)(values.token_ids[skip:], values.logprobs[skip:], values.ranks[skip:])
            request.num_prompt_logprobs += len(values.ranks)
            prompt_logprobs = PromptLogprobs(found.start + max(skip, 0), values)
            news.append(StepResult(request, prompt_logprobs=prompt_logprobs))
        return news

    # ---- when a step fails

    def recover(self, output: SchedulerOutput, *, out_of_memory: bool) -> list[Request]:
        """After a step failed: drops all steps in flight, to compute their requests anew. Returns those given
        up.

        Out of memory halves the budget and the number of running requests. Any other failure runs the step's
        requests one at a time, until the one that fails alone is found: it is given up, and the others go on.
        """
        step = self._in_flight.get(output.step)
        requests = [] if step is None else [request for request in step.requests if not request.is_finished]
        tokens = output.total_tokens
        self.drop_steps_in_flight()
        given_up: list[Request] = []
        if out_of_memory and (len(requests) > 1 or tokens > self.block_size):
            self.max_num_batched_tokens = max(1, min(self.max_num_batched_tokens, tokens) // 2)
            self.max_num_seqs = max(1, min(self.max_num_seqs, len(requests) + 1) // 2)
        elif len(requests) <= 1 or self._num_unexplained_failures >= 3:
            given_up = requests
        elif not out_of_memory:
            self._num_unexplained_failures += 1
            self._suspects = sorted(requests, key=self._rank)
        for request in given_up:
            self._finish(request, FinishReason.ERROR)
        return given_up

    def _acquit(self, request: Request) -> None:
        """A suspect caught up alone. It goes back in line, so that the next one has the whole cache."""
        if self._suspects:
            self.running.remove(request)
            self._preempt(request, _Step(budget=0), swap=False)

    def drop_steps_in_flight(self) -> None:
        """Computes all requests anew and empties the prefix cache: what the steps in flight wrote is not known."""
        self._in_flight.clear()
        step = _Step(budget=0)
        while self.running:
            self._preempt(self.running.pop(), step, swap=False)
        for request in self._requests.values():
            request.drop_in_flight()
            if request.status is RequestStatus.SWAPPED:
                self.host_pool.release(request.host_blocks)
                request.host_blocks = []
                request.num_computed_tokens = 0
                request.status = RequestStatus.PREEMPTED
        self.pool.forget_all()

    # ---- helpers

    def _num_wanted(self, request: Request) -> int:
        """Tokens the request would compute now; none when its last token is in flight, or another is being
        tried alone.
        """
        if self._suspects and request is not self._suspects[0]:
            return 0
        if request.num_tokens >= request.length_limit(self.max_model_len):
            return 0
        return request.num_tokens_to_compute

    def _preempt(self, request: Request, step: _Step, *, swap: bool = True) -> None:
        """Takes the blocks of a request that has just left `running`, and puts it back in line."""
        self._remember(request)
        kept = self._blocks_for(request.num_computed_tokens)
        # What a pooled prompt has come to so far stays with the row: it is computed anew.
        swap = swap and self.host_pool.num_blocks > 0 and request.pooling is None
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
        heapq.heappush(self._waiting, (self._rank(request), request))

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


def _rank_by_arrival(request: Request) -> Rank:
    return (0, request.arrival)


def _rank_by_priority(request: Request) -> Rank:
    return (request.priority, request.arrival)


def _without_idle(part: _Together) -> _Together:
    """Without the requests that compute nothing."""
    busy = np.flatnonzero(part.num_tokens)
    return _Together(
        [part.requests[index] for index in busy.tolist()],
        part.rows[busy],
        part.rows_int32[busy],
        part.num_tokens[busy],
        part.num_computed[busy],
        part.samples[busy],
    )


def _wanting_prompt_logprobs(part: _Together) -> list[int]:
    """Indices of the requests that compute prompt positions which are to be reported."""
    return [
        index
        for index, (request, computed) in enumerate(
            zip(part.requests, part.num_computed.tolist(), strict=True)
        )
        if request.wants_prompt_logprobs and computed < request.num_prompt_tokens - 1
    ]


def _why_nothing(request: Request) -> str:
    """Why a request found no token to sample."""
    params = request.params
    bound = params.allowed_token_ids or params.bad_words_token_ids or params.logit_bias
    if request.grammar is not None and bound:
        return (
            "no token is left that both the form of the answer and allowed_token_ids, bad_words or logit_bias allow; "
            "ask for less of one of them"
        )
    return "the model gave logits that are not finite (NaN or infinity)"
