"""Plan the next step: which requests compute how many tokens, in which blocks."""

import numpy as np

from toolkit.scheduler.blocks.block_tables import BlockTables
from toolkit.scheduler.output import IntArray, NewRow, SchedulerOutput
from toolkit.scheduler.places import Places
from toolkit.scheduler.queue import RequestQueue, Suspects
from toolkit.scheduler.request import Request, RequestStatus
from toolkit.scheduler.rows import Rows
from toolkit.scheduler.running import RunningRequests
from toolkit.scheduler.speculation import StepCosts
from toolkit.scheduler.stats import StatsRecorder
from toolkit.scheduler.step import (
    BatchPart,
    BoolArray,
    RowArray,
    RunningBatch,
    StepBuilder,
    StepInFlight,
    StepLimits,
)


class Planner:
    """Plans steps: running requests first, then waiting ones, under one token budget.

    With a pipeline of `num_stages`, as many steps are in flight, and no request samples in two of
    them: it is scheduled again once its token has come back, and the token travels with the step.
    A step takes no more than its share of the requests that decode, and of new ones, so that every
    stage has a step. Chunks of a prompt follow each other without waiting."""

    def __init__(
        self,
        limits: StepLimits,
        costs: StepCosts,
        *,
        queue: RequestQueue,
        running: RunningRequests,
        suspects: Suspects,
        rows: Rows,
        blocks: BlockTables,
        adapters: Places[Request],
        stats: StatsRecorder,
    ) -> None:
        self.in_flight: dict[int, StepInFlight] = {}
        """Steps by number. The owner removes those that have ended."""
        self._limits = limits
        self._costs = costs
        self._queue = queue
        self._running = running
        self._suspects = suspects
        self._rows = rows
        self._blocks = blocks
        self._adapters = adapters
        self._stats = stats
        self._num_steps = 0

    def plan(self) -> SchedulerOutput | None:
        """Return the next step, or None if all wait for the tokens of steps in flight."""
        self._requeue_waiting()
        limits = self._limits
        step = StepBuilder(budget=limits.max_num_batched_tokens)
        if limits.num_stages > 1:
            coming = min(len(self._running) + len(self._queue), limits.max_num_seqs)
            step.most_requests = -(-coming // limits.num_stages)
        if self._suspects.current is not None or not self.schedule_batch(step):
            self.schedule_one_by_one(step)
        if not step.preempted:
            self._schedule_waiting(step)
        if not step.num_requests and not step.swap_out:
            return None
        return self._close(step)

    # ---- running requests

    def schedule_batch(self, step: StepBuilder) -> bool:
        """Give all running requests their tokens and blocks at once.

        Return False, with nothing changed, if there are too few blocks. The result is that of
        `schedule_one_by_one`, in NumPy; Python runs only for requests that need a block or compute
        a prompt. Blocks that decoding fills are registered when they are released: no request looks
        for them sooner."""
        batch, rows, limits = self._running.batch, self._rows, self._limits
        if not batch.requests:
            return True
        where = batch.rows
        computed, tokens = rows.computed.take(where), rows.tokens.take(where)
        in_flight = rows.in_flight.take(where)
        num_tokens = tokens - computed
        num_tokens *= tokens < rows.limit.take(where)  # none when its last token is in flight
        if limits.num_stages > 1:
            num_tokens *= in_flight == 0
            decoding = np.flatnonzero(num_tokens == 1)
            num_tokens[decoding[self._stage_share(len(decoding)) :]] = 0
        has_drafts = limits.most_drafts > 0 and np.count_nonzero(rows.drafts.take(where)) > 0
        if has_drafts:
            num_tokens += self._num_drafts(where, num_tokens, limits.most_drafts)
        total = int(np.add.reduce(num_tokens))
        if total > step.budget:
            before = num_tokens.cumsum() - num_tokens
            num_tokens = np.clip(step.budget - before, 0, num_tokens).astype(np.int32)
            total = step.budget
        end = computed + num_tokens
        grows = end > rows.capacity.take(where)
        if np.count_nonzero(grows) and not self._grow_batch(batch, grows, end, step):
            return False
        samples = end >= tokens
        num_drafts = (end - tokens) * samples if has_drafts else None
        num_sampled = samples if num_drafts is None else samples + num_drafts
        rows.computed[where], rows.tokens[where], rows.in_flight[where] = (
            end,
            tokens + num_sampled,
            in_flight + num_sampled,
        )
        part = BatchPart(
            batch.requests, where, batch.rows_int32, num_tokens, computed, samples, num_drafts
        )
        if np.count_nonzero(num_tokens) < len(num_tokens):
            part = part.without_idle()
        step.budget -= total
        step.together = part
        if batch.wants_prompt_logprobs:
            step.prompt_logprobs += part.wanting_prompt_logprobs()
        in_prompt = computed < rows.prompts.take(where)
        if np.count_nonzero(in_prompt):
            for index in np.flatnonzero(in_prompt).tolist():
                self._blocks.register(batch.requests[index])
        return True

    def _grow_batch(
        self, batch: RunningBatch, grows: BoolArray, end: IntArray, step: StepBuilder
    ) -> bool:
        """Give blocks to requests that grow to `end` tokens. Return False if there are too few."""
        which = np.flatnonzero(grows)
        rows = batch.rows.take(which)
        block_size, capacity = self._blocks.block_size, self._rows.capacity.take(rows)
        counts = -(-(end.take(which) - capacity) // block_size)
        blocks = self._blocks.pool.allocate(int(counts.sum()))
        if blocks is None:
            return False
        self._rows.capacity[rows] = capacity + counts * block_size
        at = 0
        for index, row, count in zip(which.tolist(), rows.tolist(), counts.tolist(), strict=True):
            self._grow(batch.requests[index], row, blocks[at : at + count], step)
            at += count
        return True

    def schedule_one_by_one(self, step: StepBuilder) -> None:
        """Schedule requests that may have to preempt each other, or of which only one may run."""
        running = self._running.requests
        index = num_decoding = 0
        most = len(running)
        if self._limits.num_stages > 1:
            most = self._stage_share(sum(self._num_wanted(request) == 1 for request in running))
        while index < len(running) and step.budget > 0:
            request = running[index]
            wanted = self._num_wanted(request)
            num_decoding += wanted == 1
            num_tokens = 0 if wanted == 1 and num_decoding > most else min(wanted, step.budget)
            if num_tokens > 0 and self._make_room(request, num_tokens, step):
                num_tokens += self._add_drafts(request, num_tokens, step)
                self._take(request, num_tokens, step)
            index += 1

    def _stage_share(self, ready: int) -> int:
        """Return how many requests that are ready to decode go into the next stage's step."""
        num_stages = self._limits.num_stages
        free = max(1, num_stages - len(self.in_flight))
        return min(-(-len(self._running) // num_stages), -(-ready // free))

    def _make_room(self, request: Request, num_tokens: int, step: StepBuilder) -> bool:
        """Give the request blocks for its next tokens, preempting from the highest rank down.

        Return False if the request itself was preempted."""
        blocks = self._blocks
        while True:
            need = blocks.num_for(request.num_computed_tokens + num_tokens) - len(request.blocks)
            new = blocks.pool.allocate(max(0, need))
            if new is not None:
                if new:
                    self._grow(request, request.row, new, step)
                    self._rows.capacity[request.row] += len(new) * blocks.block_size
                return True
            victim = self._running.requests[-1]
            step.swap_out += self._running.preempt(victim)
            step.preempted = True
            if victim is request:
                return False

    def _num_drafts(self, rows: RowArray, num_tokens: IntArray, most: int) -> IntArray:
        """Return how many drafts to add to the tokens of these rows [n], `most` in all."""
        table = self._rows
        offered = table.more_drafts(rows, num_tokens)
        drafts = self._costs.useful(offered, table.rates.of(rows), int(num_tokens.sum()))
        if drafts.sum() > most:
            drafts = np.clip(most - (drafts.cumsum() - drafts), 0, drafts).astype(np.int32)
        return drafts

    def _pays_to_draft(self, rows: RowArray) -> bool:
        """Return whether drafts for these rows' next tokens make the next step faster."""
        return self._costs.pays_to_draft(
            self._rows.most_drafts.take(rows), self._rows.rates.of(rows)
        )

    def _add_drafts(self, request: Request, num_tokens: int, step: StepBuilder) -> int:
        """Return how many drafts to add. They get blocks that are free, and preempt no request."""
        row = np.array([request.row])
        most = self._limits.most_drafts - sum(step.num_drafts)
        drafts = int(self._num_drafts(row, np.array([num_tokens], np.int32), most)[0])
        drafts = min(drafts, step.budget - num_tokens)
        end = request.num_computed_tokens + num_tokens
        blocks = self._blocks
        room = (len(request.blocks) + blocks.pool.num_free) * blocks.block_size - end
        drafts = min(drafts, room)
        return drafts if self._make_room(request, num_tokens + drafts, step) else 0

    def _grow(self, request: Request, row: int, blocks: list[int], step: StepBuilder) -> None:
        held = request.blocks
        for block in blocks:
            step.new_blocks += (row, len(held), block)
            held.append(block)
        if len(held) % self._rows.flush_every == 0:
            request.flush_tail()

    def _num_wanted(self, request: Request) -> int:
        """Return the tokens that the request would compute now.

        None if its last token is in flight, or if another request is being tried alone."""
        suspect = self._suspects.current
        if suspect is not None and request is not suspect:
            return 0
        if self._limits.num_stages > 1 and request.num_in_flight:
            return 0
        if request.num_tokens >= self._rows.limit.item(request.row):
            return 0
        return request.num_tokens_to_compute

    # ---- waiting requests

    def _schedule_waiting(self, step: StepBuilder) -> None:
        set_aside, running = [], self._running.requests
        while (
            self._queue
            and step.budget > 0
            and len(running) < self._limits.max_num_seqs
            and step.num_requests < step.most_requests
            and (request := self._queue.first()) is not None
        ):
            if not self._is_ready(request):
                set_aside.append(request)
            elif (adapter := request.spec.adapter) and not self._adapters.has_room(adapter.key):
                self._adapters.wait(adapter.key, request)
            elif not self._admit(request, step):
                break
            self._queue.pop()
        for request in set_aside:
            self._queue.push(request)

    def _requeue_waiting(self) -> None:
        """Put requests back into the queue whose adapter can have a slot now.

        They are those of one adapter, the first with a request that has not ended meanwhile."""
        while taken := self._adapters.take_waiting():
            for request in taken:
                self._queue.push(request)
            if not all(request.is_finished for request in taken):
                return

    def _is_ready(self, request: Request) -> bool:
        if request.num_in_flight:
            return False
        suspect = self._suspects.current
        if suspect is not None:
            return request is suspect
        leader = request.leader
        if leader is None or leader.is_finished:
            return True
        if leader.wants_prompt_logprobs:  # they are reported before the siblings begin
            return False
        block_size = self._blocks.block_size
        shared = (leader.num_prompt_tokens - 1) // block_size * block_size
        return leader.num_computed_tokens >= shared

    def _admit(self, request: Request, step: StepBuilder) -> bool:
        """Give a waiting request a row and blocks for its first tokens.

        Return False, with nothing changed, if there are too few blocks."""
        is_swapped = request.status is RequestStatus.SWAPPED
        cached = [] if is_swapped else self._blocks.find_cached(request)
        num_computed = (
            request.num_computed_tokens if is_swapped else len(cached) * self._blocks.block_size
        )
        num_tokens = request.num_tokens - num_computed
        if num_tokens > step.budget:
            if self._limits.chunks_prompts:
                num_tokens = step.budget
            elif step.num_requests:
                return False
        if not self._blocks.begin(request, cached, num_computed + num_tokens):
            return False
        if is_swapped:
            step.swap_in += self._blocks.swap_in(request)
        elif request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_computed
            self._stats.current.prefix_cache_queries += request.num_prompt_tokens
            self._stats.current.prefix_cache_hits += num_computed
        request.num_computed_tokens = num_computed
        step.new_rows.append(self._new_row(request, step))
        self._take(request, num_tokens, step)
        return True

    def _new_row(self, request: Request, step: StepBuilder) -> NewRow:
        """Make a request run, and return its initial state."""
        slot = 0
        if (adapter := request.spec.adapter) is not None:
            entry = self._adapters.enter(adapter.key)
            slot = 1 + entry.number
            if entry.is_new:
                step.adapters.append((slot, adapter.key))
        self._running.admit(request, self._num_steps)
        return NewRow(
            row=request.row,
            spec=request.spec,
            seed=request.seed,
            output_token_ids=list(request.output_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            blocks=list(request.blocks),
            adapter=slot,
        )

    # ---- the step itself

    def _take(self, request: Request, num_tokens: int, step: StepBuilder) -> None:
        """Put `num_tokens` of a request into the step."""
        behind = request.num_tokens_to_compute
        samples, num_drafts = behind <= num_tokens, max(0, num_tokens - behind)
        step.add(request, num_tokens, samples, num_drafts)
        request.schedule(num_tokens, samples + num_drafts)
        self._blocks.register(request)

    def _close(self, step: StepBuilder) -> SchedulerOutput:
        part, rows = step.joined(), self._rows
        output = SchedulerOutput(
            step=self._num_steps,
            rows=part.rows_int32,
            num_tokens=part.num_tokens,
            num_computed=part.num_computed,
            samples=part.samples,
            num_drafts=_NONE if part.num_drafts is None else part.num_drafts,
            new_rows=step.new_rows,
            new_blocks=np.array(step.new_blocks, np.int32).reshape(-1, 3),
            swap_out=step.swap_out,
            swap_in=step.swap_in,
            adapters=step.adapters,
            prompt_logprobs=step.prompt_logprobs,
        )
        if self._limits.most_drafts:
            output.drafts = self._pays_to_draft(part.rows[part.samples])
            rows.has_drafted[part.rows] = output.drafts
        if self._limits.num_stages > 1:
            output.known_tokens = rows.known_tokens(part.rows[part.samples], output.num_sampled - 1)
        if rows.constrained.any():
            output.constrained = np.flatnonzero(rows.constrained.take(part.rows) & part.samples)
        self._num_steps += 1
        admitted = part.requests[len(part.requests) - len(step.new_rows) :]
        self.in_flight[output.step] = StepInFlight(
            part.requests, part.rows, admitted, rows.num_released
        )
        return output


_NONE = np.empty(0, np.int32)
